"""Learner: gradients, online updates and prediction over sequences, compiled once per shape."""

from .compile import compile as compile
from .full_rules import KF_RTRL as KF_RTRL
from .full_rules import RTRL as RTRL
from .full_rules import UORO as UORO
from .full_rules import Immediate as Immediate
from .full_rules import OSTLRecurrent as OSTLRecurrent
from .full_rules import SnAp as SnAp
from .functional import FunctionalLearner as FunctionalLearner
from .learner import ETraceAlgorithm as ETraceAlgorithm
from .learner import Learner as Learner
from .learner_state import LearnerState as LearnerState
from .live import LiveStream as LiveStream
from .shard import shard as shard
from .td_trace import TDTrace as TDTrace
from .three_factor import three_factor_loss as three_factor_loss
from .unit_rules import D_RTRL as D_RTRL
from .unit_rules import ES_D_RTRL as ES_D_RTRL
from .unit_rules import OTTT as OTTT
from .unit_rules import RFLO as RFLO
from .unit_rules import EProp as EProp
from .unit_rules import IODimVjpAlgorithm as IODimVjpAlgorithm
from .unit_rules import OSTLFeedforward as OSTLFeedforward
from .unit_rules import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from .unit_rules import pp_prop as pp_prop

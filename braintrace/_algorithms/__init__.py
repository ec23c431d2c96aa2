"""The algorithms by the names that people use."""

from .algorithm import ETraceAlgorithm as ETraceAlgorithm
from .d_rtrl import D_RTRL as D_RTRL
from .d_rtrl import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from .eprop import EProp as EProp
from .es_d_rtrl import ES_D_RTRL as ES_D_RTRL
from .es_d_rtrl import IODimVjpAlgorithm as IODimVjpAlgorithm
from .es_d_rtrl import pp_prop as pp_prop
from .immediate import Immediate as Immediate
from .kf_rtrl import KF_RTRL as KF_RTRL
from .names import algorithm_of as algorithm_of
from .names import made as made
from .ostl_feedforward import OSTLFeedforward as OSTLFeedforward
from .ostl_recurrent import OSTLRecurrent as OSTLRecurrent
from .ottt import OTTT as OTTT
from .rflo import RFLO as RFLO
from .rtrl import RTRL as RTRL
from .rules_by_path import RulesByPath as RulesByPath
from .snap import SnAp as SnAp
from .three_factor import three_factor_loss as three_factor_loss
from .uoro import UORO as UORO
from .window_option import CHUNK as CHUNK
from .window_option import Window as Window

"""Learner: gradients, online updates and prediction over sequences, compiled once per shape."""

from .build import compile as compile
from .functional import FunctionalLearner as FunctionalLearner
from .learner import Learner as Learner
from .learner_state import LearnerState as LearnerState
from .live import LiveStream as LiveStream
from .shard import shard as shard
from .td_trace import TDTrace as TDTrace

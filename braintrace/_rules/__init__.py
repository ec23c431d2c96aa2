"""Learning rules: how a trace advances, and its part of the gradient."""

from .by_path import ComposedTraces as ComposedTraces
from .by_path import Part as Part
from .custom_rules import method_of as method_of
from .d_rtrl import ParameterTraces as ParameterTraces
from .eligibility import eligibility_of as eligibility_of
from .feedback import FeedbackTraces as FeedbackTraces
from .filters import FilterTraces as FilterTraces
from .late import LateTraces as LateTraces
from .plasticity import PairSTDP as PairSTDP
from .plasticity import RewardSTDP as RewardSTDP
from .plasticity import TripletSTDP as TripletSTDP
from .protocol import Rule as Rule
from .protocol import Site as Site
from .protocol import check_rule as check_rule
from .protocol import rule_in_words as rule_in_words
from .random_factors import KroneckerTraces as KroneckerTraces
from .random_factors import RankOneTraces as RankOneTraces
from .rtrl import FullTraces as FullTraces
from .rtrl import LayeredTraces as LayeredTraces
from .rtrl import NoTraces as NoTraces
from .rtrl import SparseTraces as SparseTraces

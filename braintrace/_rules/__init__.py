"""Learning rules: how a trace advances, and its part of the gradient."""

from .composed import ComposedTraces as ComposedTraces
from .custom import Rule as Rule
from .custom import Site as Site
from .custom import check_rule as check_rule
from .custom import method_of as method_of
from .custom import rule_in_words as rule_in_words
from .elementwise.filters import FilterTraces as FilterTraces
from .elementwise.param_dim import ParameterTraces as ParameterTraces
from .eligibility import eligibility as eligibility
from .full.influence_matrix import FullTraces as FullTraces
from .full.influence_matrix import LayeredTraces as LayeredTraces
from .full.passing import NoTraces as NoTraces
from .full.random import KroneckerTraces as KroneckerTraces
from .full.random import RankOneTraces as RankOneTraces
from .full.snap import SparseTraces as SparseTraces

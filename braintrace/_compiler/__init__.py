"""From a model to an `ETraceGraph`. Pure analysis: it runs no model numbers."""

from .columns import Columns as Columns
from .columns import columns_of as columns_of
from .columns import zero_trace as zero_trace
from .derivative import Derivatives as Derivatives
from .diagnostics import ApproximationWarning as ApproximationWarning
from .diagnostics import Diagnostic as Diagnostic
from .graph import ETraceGraph as ETraceGraph
from .graph import compile_etrace_graph as compile_etrace_graph
from .graph import compile_model as compile_model
from .hidden_groups import HiddenGroup as HiddenGroup
from .reach import Branch as Branch
from .reach import Reach as Reach
from .relations import HiddenParamOpRelation as HiddenParamOpRelation
from .slots import components as components
from .slots import join_components as join_components
from .slots import split_components as split_components
from .trace import StateLeaf as StateLeaf
from .trace import TracedModel as TracedModel
from .trace import described as described
from .trace import state_paths as state_paths
from .trace import trace_model as trace_model

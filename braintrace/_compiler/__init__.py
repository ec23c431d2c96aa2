"""Compiler: from a model to an `ETraceGraph`, by analysis alone.

It traces the model and never evaluates it on data.
"""

from .compile import CompilerOptions as CompilerOptions
from .compile import compile_model as compile_model
from .frontend.state_arrays import component_count as component_count
from .frontend.state_arrays import join_components as join_components
from .frontend.state_arrays import split_components as split_components
from .frontend.trace import state_paths as state_paths
from .frontend.trace import trace_model as trace_model
from .reports.diagnose import publish as publish

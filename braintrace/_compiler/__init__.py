"""Compiler: from a model to an `ETraceGraph`, by analysis alone.

It traces the model and never evaluates it on data.
"""

from .compile import CompilerOptions as CompilerOptions
from .compile import compile_model as compile_model
from .diagnostics import lost_gradients as lost_gradients
from .diagnostics import publish as publish

"""The compiled model without an algorithm, with the traces that D_RTRL would have."""

from typing import Any

import brainstate

from .._compiler import CompilerOptions, compile_model
from .._executor import ParameterTraces
from .._graph import ETraceGraph


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *arguments: Any,
    batch_size: int | None = None,
    strict: bool = False,
    unroll_limit: int = 32,
    readout_filters: bool = True,
    mark: Any = None,
) -> ETraceGraph:
    """Analyse one step of a model.

    Parameters
    ----------
    model
        A brainstate module whose states are initialised and whose ``update`` is one step.
    *arguments
        Example arguments of ``update``; their values do not matter.
    batch_size
        ``None``: the model is analysed as it is. A number: the model is written for one
        sample, and is analysed mapped over a leading batch axis of that size.
    strict
        Raise instead of warning wherever a part of the gradient is cut.
    unroll_limit
        Longest loop inside ``update`` that is unrolled because it holds an ETP operation, or
        because it couples elements of a hidden state beside what it does position by position.
    readout_filters
        See `D_RTRL`.
    mark
        ``None``: what the model marks learns online; if no ETP operation with a parameter
        reaches a hidden state, the same as ``'auto'``. ``'explicit'``: what the model marks, and a
        model without marks is refused. ``'auto'``: all of its parameters do,
        as far as there are ETP operations for what it does with them: products and
        convolutions of any layout, with their biases, and whatever acts position by position.
        Marks that are there stay. A path, the beginning of one (``"cell/w"``, ``("cell", "w")``) or
        a function of a path: these parameters alone are marked.

    Returns
    -------
    ETraceGraph
        Frozen and printable.

    Raises
    ------
    CompilationError
        If the model has no hidden states, complex ones, no weight on the way to one that learns,
        or (with ``strict``) a path that a trace cannot carry; or if ``update`` does something
        with its arguments and States that JAX or brainstate cannot.
    OptionError
        If ``model`` or an option is not what it should be.
    NotInitializedError
        If ``init_state`` has not been called.
    UnitError
        If units do not fit together in ``update``.
    DtypeError
        If a parameter of an ETP operation is not floating-point, or is not finite, or if an
        argument is nothing that JAX computes with.

    Warns
    -----
    ApproximationWarning
        Once for every diagnostic of level ``'warning'``.
    """
    options = CompilerOptions(
        strict=strict, unroll_limit=unroll_limit, readout_filters=readout_filters, mark=mark
    )
    return compile_model(model, arguments, batch_size, options, ParameterTraces())[0]

"""Analysis of a model without an algorithm, with the traces of D_RTRL."""

from typing import Any

import brainstate

from .._compiler import CompilerOptions, compile_model
from .._graph import ETraceGraph
from .._rules import ParameterTraces


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
        A brainstate module with initialised states, whose ``update`` is one step.
    *arguments
        Example arguments of ``update``; their values do not matter.
    batch_size
        ``None``: the model is analysed unchanged. A number: the model is written for one sample,
        and is analysed mapped over a leading batch axis of that size.
    strict
        Raise instead of warning if a part of the gradient is truncated.
    unroll_limit
        Maximum length of a loop inside ``update`` that is unrolled. A loop is unrolled if it
        contains an ETP operation, or if it couples elements of a hidden state in addition to its
        elementwise operations.
    readout_filters
        See `D_RTRL`.
    mark
        The parameters that learn online. ``None``: the parameters that the model marks; if no ETP
        operation with a parameter reaches a hidden state, the same as ``'auto'``. ``'explicit'``:
        the parameters that the model marks, and a model without marks is refused. ``'auto'``: all
        parameters whose operations have an ETP form: products and convolutions of any layout, with
        their biases, and elementwise operations. Existing marks stay. A path, the start of a path
        (``"cell/w"``, ``("cell", "w")``) or a function of a path: only these parameters are marked.

    Returns
    -------
    ETraceGraph
        Frozen and printable.

    Raises
    ------
    CompilationError
        If the model has no hidden states, complex ones, no weight that learns on the path to one,
        or (with ``strict``) a path that a trace cannot follow; or if JAX or brainstate do not
        support an operation of ``update``.
    OptionError
        If ``model`` or an option has a value that is not accepted.
    NotInitializedError
        If ``init_state`` has not been called.
    UnitError
        If physical units are incompatible in ``update``.
    DtypeError
        If a parameter of an ETP operation is not floating-point, or is not finite, or if an
        argument is not a JAX type.

    Warns
    -----
    ApproximationWarning
        Once for every diagnostic of level ``'warning'``.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = brainstate.nn.init_all_states(braintrace.nn.IndRNN(2, 3), batch_size=1)
    >>> graph = braintrace.compile_etrace_graph(model, jnp.ones((1, 2)))
    >>> [relation.printed_paths for relation in graph.hidden_param_op_relations]
    [('u',), ('W/weight',)]
    """
    options = CompilerOptions(
        strict=strict, unroll_limit=unroll_limit, readout_filters=readout_filters, mark=mark
    )
    return compile_model(model, arguments, batch_size, options, ParameterTraces())[0]

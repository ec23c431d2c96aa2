"""From a model to the step that an algorithm runs."""

from typing import Any

import brainstate

from .._brainstate import kept_for_other_threads
from .._compiler import CompilerOptions, compile_model, trace_model
from .._executor import check_method, kept_specs
from .._graph import ETraceGraph, TraceMethod
from .batch_axes import example_arguments
from .compiled_step import CompiledStep
from .environment import Environment
from .model_states import States


def compile_step(
    model: brainstate.nn.Module,
    method: TraceMethod,
    example: tuple[Any, ...],
    batch_size: int | None,
    options: CompilerOptions,
    trace_dtype: Any,
) -> CompiledStep:
    """Analyse a model, and return what an algorithm runs.

    Parameters
    ----------
    model, example, batch_size, options
        See `compile_model`.
    method
        The learning rule.
    trace_dtype
        Floating-point dtype in which traces are kept; ``None``: that of the model.

    Raises
    ------
    CompilationError, DtypeError
        See `compile_etrace_graph`.
    OptionError
        If ``method`` needs what drivers do not give it.
    PrimitiveError
        If the traces of ``method`` cannot carry one of the model's operations.
    """
    check_method(method)
    with kept_for_other_threads(model.states().values()):
        graph, outside = compile_model(model, example, batch_size, options, method)
    environment = Environment(lambda: _trace_again(model, graph, outside, options))
    parameters = model.states(brainstate.ParamState).values()
    specs = kept_specs(graph.trace_specs, trace_dtype)
    return CompiledStep(graph, outside, method, specs, environment, parameters)


def _trace_again(
    model: brainstate.nn.Module, graph: ETraceGraph, outside: States, options: CompilerOptions
) -> None:
    traced = graph.traced
    states = [*model.states().values(), *outside.values()]
    before = [state.value for state in states]
    try:
        with kept_for_other_threads(states):
            trace_model(model, example_arguments(traced), traced.batch_size, options.unroll_limit)
    finally:  # a trace that fails leaves tracers in the States
        for state, value in zip(states, before, strict=True):
            state.value = value

"""Steps as a whole: of windows, full-Jacobian rules, the plain model, and a user's own gradient."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from .._errors import OptionError
from .._graph.graph import ETraceGraph
from .._graph.method import Chunk, Records, TraceMethod, Traces, Weights
from .._jax import Var
from .._jax_kernels import without_derivative, zeros_mapped_like
from .._typing import PyTree
from .flat_state import step_of_layers
from .gradient import Inputs, as_chunk, chunk_gradient, finish, operands, probed_step, residuals
from .sites import Probes, of_past, pre_step_probe, probe_shapes, probes_of_past


def single_step(
    graph: ETraceGraph,
    method: TraceMethod,
    inputs: Inputs,
    traces: Traces,
) -> tuple[list[jax.Array], dict[Var, jax.Array], Traces]:
    """Run one step whose derivative with respect to parameters is computed from the traces.

    The derivative with respect to old states is the ordinary one; callers hold them constant.

    Parameters
    ----------
    graph, method, traces
        The compiled model, and its traces before the step.
    inputs
        Values of the program's inputs.

    Returns
    -------
    outputs
        Leaves of the result of ``update``.
    new_states
        New value of every written State leaf, by its input variable.
    traces
        Traces after the step.
    """
    weights = operands(graph, inputs)
    records = as_chunk(residuals(graph, inputs, weights))
    held, before = jax.lax.stop_gradient((weights, traces))
    after = method.update(Chunk(graph, held, records), before)

    def gradient(weights: Weights, residuals: Any, signal: Probes) -> Weights:
        records, before, after = residuals
        chunk = Chunk(graph, weights, records)
        return chunk_gradient(method, chunk, as_chunk(signal), before, after)[0]

    passes = graph.passes_weights
    shapes = probes_of_past(graph) if passes else probe_shapes(graph)
    probes = with_gradient(shapes, gradient, weights, (records, before, after))
    if passes:
        now = before_window(graph, inputs, probes)
        outputs, new_states, _ = window_step(graph, now, separates_layers=True)
    else:
        outputs, new_states = probed_step(graph, inputs, weights, probes)
    return outputs, new_states, after


def plain_step(graph: ETraceGraph, inputs: Inputs) -> tuple[list[jax.Array], dict[Var, jax.Array]]:
    """Run one step of the model itself; filters of its readouts do not change."""
    model = graph.traced.unfiltered
    if model is None:
        return finish(graph.traced, inputs, {})
    filtered = graph.traced
    pairs = zip(model.program.in_vars, filtered.program.in_vars, strict=False)
    outputs, written = finish(model, {own: inputs[var] for own, var in pairs}, {})
    pairs = zip(model.written_vars, filtered.written_vars, strict=False)
    new_states = {var: inputs[var] for var in filtered.written_vars}
    return outputs, new_states | {var: written[own] for own, var in pairs}


def _refuse(primals: Any, tangents: Any) -> Any:
    raise OptionError(
        "The arguments of the model depend on the differentiated parameters or states, and this "
        "learning rule follows these only within `update` of the model. Compute the dependence "
        "in `update`, or pass the arguments through `jax.lax.stop_gradient`."
    )


_given: Any = jax.custom_jvp(lambda value: value)
"""An argument of a step, which has no gradient under full-Jacobian rules."""
_given.defjvp(_refuse)


def before_window(graph: ETraceGraph, inputs: Inputs, probes: Probes) -> Inputs:
    """Return the inputs of a first step, with a perturbation added to each traced state."""
    states = graph.traced_states
    old = {s.in_var: inputs[s.in_var] + probes[pre_step_probe(s)] for s in states}
    return {**inputs, **old}


def window_step(
    graph: ETraceGraph, inputs: Inputs, separates_layers: bool = False
) -> tuple[list[Any], dict[Var, Any], Records]:
    """Run one step of a window, differentiable in full, and return its residuals.

    With ``separates_layers``, the layers of a layered rule have no memory of each other: outside of
    windows.

    Raises
    ------
    OptionError
        For a full-Jacobian rule, if arguments of the step have a derivative.
    """
    if graph.passes_weights:
        arguments = set(graph.traced.argument_vars)
        inputs = {v: _given(x) if v in arguments else x for v, x in inputs.items()}
    weights = operands(graph, inputs)
    if separates_layers and graph.flat_state is not None and graph.flat_state.layers:
        outputs, new_states = step_of_layers(graph, inputs)
    else:
        outputs, new_states = finish(graph.traced, inputs, {})
    return outputs, new_states, residuals(graph, inputs, weights)


# --- the gradient in a window of the user's own


def probes_of_entry(
    graph: ETraceGraph, method: TraceMethod, weights: Weights, traces: Traces
) -> Probes:
    """Return perturbations of the states before a window, with a gradient by the traces."""

    def gradient(weights: Weights, traces: Any, signal: Any) -> Weights:
        chunk = Chunk(graph, weights, Records(x={}))
        return method.carry_in_vjp(chunk, of_past(graph, as_chunk(signal)), traces)

    return with_gradient(probes_of_past(graph), gradient, weights, traces)


SECOND_DERIVATIVE = (
    "The gradient of a learner's step is differentiated again, but it is computed from traces that "
    "are held constant. Pass it through `jax.lax.stop_gradient`, or differentiate backpropagation "
    "through time (`predict`) twice."
)


def with_gradient(
    shapes: Probes,
    gradient: Callable[[Weights, PyTree, Probes], Weights],
    weights: Weights,
    residuals: PyTree,
) -> Probes:
    """Return perturbations of zero, whose cotangents become a gradient of the operands.

    Parameters
    ----------
    shapes
        Shapes of the perturbations.
    gradient
        ``(weights, residuals, cotangents that are not known to be zero) -> gradient``.
    weights, residuals
        The operands, and other values that the gradient is computed from.
    """

    def zeros(*arguments: Any) -> Probes:
        return zeros_mapped_like(shapes, arguments)

    def forward(*arguments: Any) -> tuple[Probes, tuple[Weights, PyTree]]:
        weights, residuals = jax.tree.map(lambda argument: argument.value, arguments)
        return zeros(weights, residuals), (weights, residuals)

    def backward(known: tuple[Weights, PyTree], signal: dict[str, Any]) -> tuple[Weights, None]:
        heard = {name: v for name, v in signal.items() if not isinstance(v, SymbolicZero)}
        found = gradient(*known, heard)
        return without_derivative(known[0], found, OptionError, SECOND_DERIVATIVE), None

    probes = jax.custom_vjp(zeros)
    probes.defvjp(forward, backward, symbolic_zeros=True)
    return probes(weights, residuals)

"""Single steps, with their gradient through the traces.

A learning rule is a set of pure functions over a plain pytree of traces. The functions here connect
it to the differentiable step (see `probed_step`): the step's perturbations have the value zero, and
their derivative, given the learning signal, is the gradient of the rule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._errors import OptionError
from .._graph import ETraceGraph, Record, Records, StateLeaf, TraceMethod, Traces, Weights
from .._jax import Var, zeros_mapped_like
from .._typing import PyTree
from .jacobians import Inputs, jacobians, operands
from .passing import PassingTraces
from .probed_step import (
    Probes,
    finish,
    finish_program,
    hold_old_states,
    pre_step_probe,
    probe_shapes,
    probed_step,
    with_callback_results,
)
from .restart import flags_along, restarted, restarted_probes
from .window import passed_step, probes_of_past

RECORDED: frozenset[Record] = frozenset(
    {"x", "x in parts", "D", "Df", "step", "traces", "operands"}
)
"""Kinds of residuals that can be recorded for a learning rule."""


def check_method(method: TraceMethod) -> None:
    """Refuse a learning rule that needs residuals which are not recorded.

    Raises
    ------
    OptionError
        Naming them.
    """
    name, unknown = type(method).__name__, method.needs - RECORDED
    if unknown:
        raise OptionError(
            f"The learning rule `{name}` needs {', '.join(map(repr, sorted(unknown)))} of every "
            f"step; available are {', '.join(map(repr, sorted(RECORDED)))}."
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """Result of one step.

    Attributes
    ----------
    outputs
        Leaves of the result of ``update``.
    new_states
        New value of every written State leaf, by its input variable.
    traces
        Traces after the step.
    """

    outputs: list[jax.Array]
    new_states: dict[Var, jax.Array]
    traces: Traces


def single_step(
    graph: ETraceGraph,
    method: TraceMethod,
    inputs: Inputs,
    traces: Traces,
    restart: jax.Array | None = None,
    place: Callable[[Records], Records] = lambda records: records,
) -> Step:
    """Run one step whose derivative with respect to parameters is computed from the traces.

    The derivative with respect to old states is the ordinary one; `entered` stops gradients at old
    states where necessary.

    Parameters
    ----------
    graph, method, traces
        The compiled model, and its traces before the step.
    inputs
        Values of the program's inputs.
    restart
        Flags of the samples that were reset before the step; ``None``: none.
    place
        Places residuals on a mesh.
    """
    if isinstance(method, PassingTraces):
        return _passed_step(graph, method, inputs, traces, restart)
    inputs = with_callback_results(graph.traced, inputs)
    weights = operands(graph, inputs)
    found = jacobians(graph, inputs, weights)
    if restart is not None:
        found = restarted(graph, found, restart)
    records = place(as_chunk(found))
    before = jax.lax.stop_gradient(traces)
    after = method.update(graph, jax.lax.stop_gradient(weights), records, before)

    shapes = probe_shapes(graph)

    def zeros(*arguments: Any) -> Probes:
        found: Probes = zeros_mapped_like(shapes, arguments)
        return found

    def forward(*arguments: Any) -> tuple[Probes, tuple[Any, ...]]:
        values = jax.tree.map(lambda argument: argument.value, arguments)
        return zeros(*values), values

    def backward(arguments: tuple[Any, ...], signal: dict[str, Any]) -> tuple[Any, ...]:
        weights, records, before, after = arguments
        silent = {name for name, value in signal.items() if isinstance(value, SymbolicZero)}
        records = dataclasses.replace(records, silent=frozenset(silent))
        arrays = {
            name: jnp.zeros(value.shape, value.dtype) if name in silent else value
            for name, value in signal.items()
        }
        gradients, _ = chunk_gradient(
            graph, method, weights, records, as_chunk(arrays), before, after
        )
        return gradients, None, None, None

    probe = jax.custom_vjp(zeros)
    probe.defvjp(forward, backward, symbolic_zeros=True)
    probes = probe(weights, records, before, after)
    if restart is not None:
        probes = restarted_probes(graph, probes, restart)
    outputs, new_states = probed_step(graph, inputs, weights, probes)
    return Step(outputs, new_states, after)


def _passed_step(
    graph: ETraceGraph,
    method: PassingTraces,
    inputs: Inputs,
    traces: Traces,
    restart: jax.Array | None,
) -> Step:
    """Run a single step of a full-Jacobian rule: a window of one step."""
    weights = operands(graph, inputs)
    held, before = jax.lax.stop_gradient((weights, traces))
    records = dataclasses.replace(jacobians(graph, inputs, weights), restart=restart)
    after, past = method.step(graph, held, as_chunk(records), before)
    probes = probes_of_past(graph, method.past_gradient, (weights, past), restart is not None)

    def entering(state: StateLeaf) -> jax.Array:
        probe = probes[state.name]
        if restart is not None:
            is_new = flags_along(graph.batch.axis(state), restart, probe.ndim)
            probe = jnp.where(is_new, 0, probe)
        return inputs[state.in_var] + probe

    old = {state.in_var: entering(state) for state in graph.traced_states}
    outputs, new_states, _ = passed_step(graph, {**inputs, **old})
    return Step(outputs, new_states, after)


def chunk_gradient(
    graph: ETraceGraph,
    method: TraceMethod,
    weights: Weights,
    records: Records,
    signal: Probes,
    before: Traces,
    after: Traces | None = None,
) -> tuple[Weights, Traces | None]:
    """Return the gradient of a recorded chunk, and the traces after it if the rule returns them.

    The signal of the first step for the states before the chunk is included: the signal of outputs
    that read them, or of a window. The arguments are the same as in `TraceMethod.gradient`.
    """
    gradients, after = method.gradient(graph, weights, records, signal, before, after)
    names = {state.name: pre_step_probe(state) for state in graph.traced_states}
    late = {name: signal[before] for name, before in names.items() if before in signal}
    if late:
        mu = jax.tree.map(lambda leaf: leaf[0], late)
        past = method.entry_gradient(graph, weights, mu, before, records.zeros_select)
        gradients = jax.tree.map(jnp.add, gradients, past)
    return _of_parameters(graph, gradients), after


def _of_parameters(graph: ETraceGraph, gradients: Weights) -> Weights:
    """Return gradients of operands, with zeros for operands without a parameter.

    These gradients are not used, but a loop that accumulates them would compute them.
    """
    if graph.whole is not None:
        return gradients
    learning = {r.key: set(r.trainable_paths) for r in graph.hidden_param_op_relations}
    return {
        key: {
            name: gradient if name in learning[key] else jnp.zeros_like(gradient)
            for name, gradient in found.items()
        }
        for key, found in gradients.items()
    }


def as_chunk(tree: PyTree) -> PyTree:
    """Add a time axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def recorded_step(
    graph: ETraceGraph, inputs: Inputs, weights: Weights, probes: Probes
) -> tuple[list[jax.Array], dict[Var, jax.Array], Records]:
    """Run one step with given perturbations, and return the residuals of the learning rule."""
    if graph.passes_weights:
        return passed_step(graph, inputs)
    inputs = with_callback_results(graph.traced, inputs)
    held = hold_old_states(graph, inputs)
    outputs, new_states = probed_step(graph, held, weights, probes)
    return outputs, new_states, jacobians(graph, inputs, weights)


def plain_step(graph: ETraceGraph, inputs: Inputs) -> tuple[list[jax.Array], dict[Var, jax.Array]]:
    """Run one step of the model itself; filters of its readouts do not change."""
    inputs, model = with_callback_results(graph.traced, inputs), graph.traced.unfiltered
    if model is None:
        return finish(graph, inputs, {})
    filtered = graph.traced
    pairs = zip(model.program.in_vars, filtered.program.in_vars, strict=False)
    outputs, written = finish_program(model, {own: inputs[var] for own, var in pairs}, {})
    pairs = zip(model.written_vars, filtered.written_vars, strict=False)
    new_states = {var: inputs[var] for var in filtered.written_vars}
    return outputs, new_states | {var: written[own] for own, var in pairs}

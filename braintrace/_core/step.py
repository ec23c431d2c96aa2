"""Gradient through the traces: of a single step, and of the steps of a recorded chunk.

A learning rule is a set of pure functions over a plain pytree of traces. The functions here connect
it to the differentiable step (see `probed_step`): the step's perturbations have the value zero, and
their derivative, given the learning signal, is the gradient of the rule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._graph import ETraceGraph, Records, TraceMethod, Traces, Weights
from .._jax import Var
from .._typing import PyTree
from .jacobian.jacobians import Inputs, operands, residuals
from .probed_step import (
    Probes,
    finish,
    of_first_order,
    probe_shapes,
    probed_step,
    probes_of_past,
    with_gradient,
)
from .resets import probes_after_reset
from .signals import of_past
from .window import before_window, passed_step


def single_step(
    graph: ETraceGraph,
    method: TraceMethod,
    inputs: Inputs,
    traces: Traces,
    reset: jax.Array | None = None,
    place: Callable[[Records], Records] = lambda records: records,
) -> tuple[list[jax.Array], dict[Var, jax.Array], Traces]:
    """Run one step whose derivative with respect to parameters is computed from the traces.

    The derivative with respect to old states is the ordinary one; callers hold them constant.

    Parameters
    ----------
    graph, method, traces
        The compiled model, and its traces before the step.
    inputs
        Values of the program's inputs.
    reset
        Flags of the samples that were reset before the step; ``None``: none.
    place
        Places residuals on a mesh.

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
    result = residuals(graph, inputs, weights)
    if reset is not None:
        result = dataclasses.replace(result, reset=reset)
    records = place(as_chunk(result))
    held, before = jax.lax.stop_gradient((weights, traces))
    after = method.update(graph, held, records, before)

    def gradient(weights: Weights, residuals: Any, signal: Probes) -> Weights:
        records, before, after = residuals
        signal = as_chunk(signal)
        return chunk_gradient(graph, method, weights, records, signal, before, after)[0]

    passes = graph.passes_weights
    shapes = probes_of_past(graph) if passes else probe_shapes(graph)
    probes = with_gradient(shapes, gradient, weights, (records, before, after))
    if reset is not None:
        probes = probes_after_reset(graph, probes, reset)
    if passes:
        outputs, new_states, _ = passed_step(graph, before_window(graph, inputs, probes))
    else:
        outputs, new_states = probed_step(graph, inputs, weights, probes)
        outputs, new = of_first_order(weights, (outputs, list(new_states.values())))
        new_states = dict(zip(new_states, new, strict=True))
    return outputs, new_states, after


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
    that read them, of a window, or of a full-Jacobian rule. The arguments are the same as in
    `TraceMethod.gradient`.
    """
    late, parts = signal.keys() & probes_of_past(graph).keys(), []
    if late:
        mu = of_past(graph, signal)
        parts.append(method.carry_in_vjp(graph, weights, mu, before, records.zeros_select))
        if max(map(len, signal.values())) == 1:
            signal = {name: value for name, value in signal.items() if name not in late}
    if signal or not late:
        own, after = method.gradient(graph, weights, records, signal, before, after)
        parts.append(own)
    gradients = jax.tree.map(lambda *result: sum(result[1:], result[0]), *parts)
    return of_parameters(graph, gradients), after


def of_parameters(graph: ETraceGraph, gradients: Weights) -> Weights:
    """Return gradients of operands, with zeros for operands without a parameter.

    These gradients are not used, but a loop that accumulates them would compute them.
    """
    if graph.flat_state is not None:
        return gradients
    learning = {r.key: set(r.trainable_paths) for r in graph.hidden_param_op_relations}
    return {
        key: {
            name: gradient if name in learning[key] else jnp.zeros_like(gradient)
            for name, gradient in result.items()
        }
        for key, result in gradients.items()
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
    outputs, new_states = probed_step(graph, inputs, weights, probes)
    return outputs, new_states, residuals(graph, inputs, weights)


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

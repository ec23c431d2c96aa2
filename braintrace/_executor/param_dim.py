r"""The parameter-dimension trace (D-RTRL).

.. math::

    \epsilon^t[a] = \sum_c D^t[a, c]\, \epsilon^{t-1}[c] + D_f^t[a] \otimes x^t, \qquad
    \nabla w = \sum_t \sum_a l^t[a] \circ \epsilon^t[a].

For a recorded chunk of ``K`` steps this is, exactly and without a trace per step,

.. math::

    \nabla w = \sum_s x^s \otimes (D_f^s \cdot \lambda^s) + \mu \circ \epsilon^0, \qquad
    \epsilon^K = P^0 \epsilon^0 + \sum_s x^s \otimes (P^s D_f^s)

(see `recursion`). One step is a chunk of one. The trace of a state that no later step reads
position by position is not carried: column ``a`` of every ``D`` is zero for it.

The learning signal enters `solve` together with the records, not contracted with a trace as
in a step-by-step formulation: the products over time and batch are then one matrix product.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, HiddenGroup, HiddenParamOpRelation, Reach
from .._etrace_op import accumulate, contract, init_trace, propagate, pull_back
from .jacobians import Jacobians, Weights
from .layout import over_fan_out, positions_to_table, trace_key, x_key
from .live import Probes
from .recursion import backward, num_steps, signals, suffix_products, transition_blocks

Traces = dict[str, Any]


def reaches_of(graph: ETraceGraph) -> list[tuple[HiddenParamOpRelation, Reach, HiddenGroup]]:
    """Return every pair of a relation and a group that it reaches."""
    return [
        (relation, reach, group)
        for relation in graph.hidden_param_op_relations
        for reach, group in zip(relation.reaches, relation.hidden_groups, strict=True)
    ]


def init(graph: ETraceGraph, every_state: bool) -> Traces:
    """Return zero traces.

    Parameters
    ----------
    graph
        The compiled model.
    every_state
        Also for the states that no later step reads position by position: a gradient that
        goes back through mixing reads those too.
    """
    traces = {}
    for relation, reach, group in reaches_of(graph):
        for a in reach.reached if every_state else reach.stored:
            zero = init_trace(
                relation.primitive,
                dict(relation.params),
                relation.x_var,
                relation.y_var,
                dict(relation.trainable_vars),
            )
            if reach.fan_out > 1:
                zero = jax.tree.map(lambda z: jnp.zeros((reach.fan_out, *z.shape), z.dtype), zero)
            traces[trace_key(relation, group, a)] = zero
    return traces


def update(graph: ETraceGraph, weights: Weights, jacobians: Jacobians, traces: Traces) -> Traces:
    """Return the traces after a recorded chunk."""
    new: Traces = {}
    for group in graph.traced_groups:
        members = [entry for entry in reaches_of(graph) if entry[2] is group]
        rows = {
            a
            for relation, reach, _ in members
            for a in reach.reached
            if trace_key(relation, group, a) in traces
        }
        if not rows:
            continue
        each, first = suffix_products(
            group, transition_blocks(group, jacobians), tuple(sorted(rows)), num_steps(graph, jacobians)
        )
        for relation, reach, _ in members:
            new.update(_update(graph, relation, reach, group, each, first, weights, jacobians, traces))
    return {key: new[key] for key in traces}


def _update(
    graph: ETraceGraph,
    relation: HiddenParamOpRelation,
    reach: Reach,
    group: HiddenGroup,
    each: Any,
    first: Any,
    weights: Weights,
    jacobians: Jacobians,
    traces: Traces,
) -> Traces:
    """Return the traces of one relation for one group: ``P⁰ ε⁰ + Σ x ⊗ (P Df)``."""
    x = _input(graph, relation, jacobians)
    operation = relation.primitive, dict(relation.params)
    keys = {a: trace_key(relation, group, a) for a in reach.reached}
    new = {}
    for i, key in keys.items():
        if key not in traces:
            continue
        carried = [
            over_fan_out(
                reach,
                lambda factor, trace: propagate(*operation, factor, trace),
                positions_to_table(reach, first[i, j], group),
                traces[keys[j]],
            )
            for j in reach.reached
            if (i, j) in first and keys[j] in traces
        ]
        entering = [
            positions_to_table(reach, each[i, m], group) * jacobians["Df"][keys[m]]
            for m in reach.reached
            if (i, m) in each and keys[m] in jacobians["Df"]
        ]
        terms = carried
        if entering:
            factors = sum(entering[1:], entering[0])
            if reach.fan_out > 1:
                factors = jnp.moveaxis(factors, 1, 0)
            terms = terms + [
                over_fan_out(
                    reach,
                    lambda f: accumulate(*operation, x, f, weights[relation.key]),
                    factors,
                )
            ]
        new[key] = jax.tree.map(
            lambda old, *parts: sum(parts[1:], parts[0]).astype(old.dtype), traces[key], *terms
        )
    return new


def _input(graph: ETraceGraph, relation: HiddenParamOpRelation, jacobians: Jacobians) -> Any:
    return None if relation.x_var is None else jacobians["x"][x_key(graph, relation)]


def solve(
    graph: ETraceGraph, weights: Weights, jacobians: Jacobians, signal: Probes, traces: Traces
) -> Weights:
    """Return the gradient of a recorded chunk with respect to the operands.

    Parameters
    ----------
    graph, weights
        The compiled model and its operands.
    jacobians
        Recorded, time first.
    signal
        Learning signals by state name, time first, in the layout of the new variables.
    traces
        Traces before the chunk.
    """
    gradients = jax.tree.map(jnp.zeros_like, weights)
    for group in graph.traced_groups:
        adjoint, mu = backward(
            group, transition_blocks(group, jacobians), signals(group, signal)
        )
        gradients = add(gradients, _direct(graph, group, weights, jacobians, adjoint))
        gradients = add(gradients, _carried(graph, group, weights, mu, traces))
    return like(weights, gradients)


def _direct(
    graph: ETraceGraph, group: HiddenGroup, weights: Weights, jacobians: Jacobians, adjoint: Any
) -> Weights:
    """Return ``Σ_s x^s ⊗ (Df^s · λ^s)`` for the relations of one group."""
    gradients = {}
    for relation, reach, _ in [e for e in reaches_of(graph) if e[2] is group]:
        factor = sum(
            jacobians["Df"][key] * positions_to_table(reach, adjoint[a], group)
            for a in reach.reached
            if (key := trace_key(relation, group, a)) in jacobians["Df"]
        )
        if reach.fan_out > 1:
            factor = jnp.sum(factor, axis=1)
        gradients[relation.key] = pull_back(
            relation.primitive,
            dict(relation.params),
            _input(graph, relation, jacobians),
            factor,
            weights[relation.key],
        )
    return gradients


def _carried(
    graph: ETraceGraph, group: HiddenGroup, weights: Weights, mu: Any, traces: Traces
) -> Weights:
    """Return ``Σ_c μ[c] ∘ ε⁰[c]`` for the relations of one group."""
    gradients: Weights = {}
    for relation, reach, _ in [e for e in reaches_of(graph) if e[2] is group]:
        for c in reach.reached:
            key = trace_key(relation, group, c)
            if c not in mu or key not in traces:
                continue
            parts = over_fan_out(
                reach,
                lambda factor, trace: contract(
                    relation.primitive, dict(relation.params), factor, trace, weights[relation.key]
                ),
                positions_to_table(reach, mu[c], group),
                traces[key],
            )
            if reach.fan_out > 1:
                parts = jax.tree.map(lambda p: jnp.sum(p, axis=0), parts)
            gradients = add(gradients, {relation.key: parts})
    return gradients


def carried(
    graph: ETraceGraph, weights: Weights, signal: dict[str, jax.Array], traces: Traces
) -> Weights:
    """Return the gradient that reaches the operands through the states before a window.

    Parameters
    ----------
    graph, weights, traces
        As in `solve`; the traces must be those of every state.
    signal
        Derivative of the loss with respect to the states before the window, by state name.
    """
    gradients = jax.tree.map(jnp.zeros_like, weights)
    for group in graph.traced_groups:
        mu = {
            c: signal[state.name].reshape(group.shape) for c, state in enumerate(group.states)
        }
        gradients = add(gradients, _carried(graph, group, weights, mu, traces))
    return like(weights, gradients)


def like(weights: Weights, gradients: Weights) -> Weights:
    """Return gradients with the dtypes of the weights."""
    return jax.tree.map(lambda w, g: g.astype(w.dtype), weights, gradients)


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; relations that only one of them has keep theirs."""
    both = {
        key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second
    }
    return {**first, **second, **both}

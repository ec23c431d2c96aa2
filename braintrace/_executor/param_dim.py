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

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import accumulate, contract, propagate, pull_back
from .._graph import (
    ActiveOutputs,
    ETraceGraph,
    HiddenGroup,
    Records,
    Weights,
    active_outputs_of,
    zero_trace,
)
from .complex_packing import factors_and_traces, kept_keys, kept_states, pack, pack_like, unpack
from .layout import TraceSite, old_state_to_positions, trace_sites, x_key
from .probed_step import Probes
from .products import PLAIN, Products, products_of_gradient, products_of_traces, where_kept
from .recursion import Blocks, backward, num_steps, signals, suffix_products, transition_blocks
from .restart import at_positions
from .zero import is_zero, narrowed, widened

Traces = dict[str, Any]


def init(graph: ETraceGraph, every_state: bool, dtype: Any = None) -> Traces:
    """Return zero traces.

    Parameters
    ----------
    graph
        The compiled model.
    every_state
        Also for the states that no later step reads position by position: a gradient that
        goes back through mixing reads those too.
    dtype
        Floating-point dtype that they are kept in; ``None``: that of the model.
    """
    traces: Traces = {}
    for site in trace_sites(graph):
        states = site.influence.reached if every_state else site.influence.stored
        columns = active_outputs_of(site.relation, site.influence, states)
        for a in states:
            traces[site.key(a)] = _zero(site, columns)
    return pack(graph, narrowed(traces, dtype))


def _columns(site: TraceSite, traces: Traces) -> ActiveOutputs | None:
    """Return the outputs that the traces of a site are kept for; ``None``: all."""
    return active_outputs_of(site.relation, site.influence, kept_states(site, traces))


def _zero(site: TraceSite, columns: ActiveOutputs | None) -> Any:
    zero = zero_trace(site.relation, columns)
    lead = (site.influence.fan_out,) if site.has_fan_out else ()
    return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), zero)


def restart(graph: ETraceGraph, traces: Traces, flags: jax.Array) -> Traces:
    """Return traces that start anew where flags, of one sample each or of all, are true.

    They are selected, not multiplied by zero: they may be NaN.
    """
    found = dict(traces)
    for site in trace_sites(graph):
        columns, kept = _columns(site, traces), at_positions(site.group, ~flags)
        for key in kept_keys(site, traces):
            found[key] = where_kept(site, columns, kept, traces[key])
    return found


def update(graph: ETraceGraph, weights: Weights, records: Records, traces: Traces) -> Traces:
    """Return the traces after a recorded chunk.

    Traces before it that are known to be zero may be given by their shapes (see `zero`), here
    and in `solve`.
    """
    if records.restart is not None:
        traces = restart(graph, traces, records.restart.any(0))
    before, traces = traces, unpack(graph, traces)
    # What a single step adds to a trace is not multiplied by any transition.
    products_of = products_of_gradient if num_steps(graph, records) == 1 else products_of_traces
    products = products_of(records)
    new: Traces = {}
    for group in graph.traced_groups:
        members = trace_sites(graph, group)
        rows = {a for site in members for a in site.influence.reached if site.key(a) in traces}
        if not rows:
            continue
        suffixes = suffix_products(
            group,
            transition_blocks(group, records),
            tuple(sorted(rows)),
            num_steps(graph, records),
            products.times,
        )
        for site in members:
            x = _input(graph, site, records)
            own_weights = weights[site.relation.key]
            entering = x, records.Df
            new.update(_updated(site, suffixes, entering, own_weights, traces, products))
    return pack_like(graph, new, before)


def _updated(
    site: TraceSite,
    suffixes: tuple[Blocks, Blocks],
    entering: tuple[Any, Any],
    weights: Any,
    traces: Traces,
    products: Products,
) -> Traces:
    """Return ``P⁰ ε⁰ + Σ x ⊗ (P Df)`` for every stored state of one site."""
    (each, first), (x, Df) = suffixes, entering
    columns = _columns(site, traces)
    pick = (lambda value: value) if columns is None else columns.pick
    if columns is not None:
        weights = columns.operands(site.relation, weights)
    keys = {a: site.key(a) for a in site.influence.reached}
    new = {}
    for i in [a for a, key in keys.items() if key in traces]:
        terms = [
            site.each_layer(
                functools.partial(propagate, *site.operation),
                pick(site.table(first[i, j])),
                widened(traces[keys[j]], first[i, j].dtype),
            )
            for j in keys
            if (i, j) in first and keys[j] in traces and not is_zero(traces[keys[j]])
        ]
        added = [
            pick(products.times(site.table(each[i, m]), Df[keys[m]]))
            for m in keys
            if (i, m) in each and keys[m] in Df
        ]
        if added:
            factor = sum(added[1:], added[0])
            terms.append(_entered(site, x, factor, weights, products))
        new[keys[i]] = jax.tree.map(_sum_like, traces[keys[i]], *terms)
    return new


def _entered(site: TraceSite, x: Any, factor: jax.Array, weights: Any, products: Products) -> Any:
    """Return the sum over time of the terms ``x ⊗ factor``."""
    if site.has_fan_out:
        factor = jnp.moveaxis(factor, 1, 0)

    def of_layer(factor: jax.Array) -> Any:
        return accumulate(*site.operation, products.inputs(site, x, factor), factor, weights)

    return site.each_layer(of_layer, factor)


def _sum_like(old: Any, *parts: jax.Array) -> jax.Array:
    if not parts:
        return jnp.zeros(old.shape, old.dtype)
    return sum(parts[1:], parts[0]).astype(old.dtype)


def _input(graph: ETraceGraph, site: TraceSite, records: Records) -> Any:
    has_input = site.relation.x_var is not None
    return records.x[x_key(graph, site.relation)] if has_input else None


def solve(
    graph: ETraceGraph, weights: Weights, records: Records, signal: Probes, traces: Traces
) -> tuple[Weights, None]:
    """Return the gradient of a recorded chunk with respect to the operands.

    The traces after the chunk do not come along: they are the dearer part.

    Parameters
    ----------
    graph, weights
        The compiled model and its operands.
    records
        Of the chunk.
    signal
        Learning signals by state name, time first, in the layout of the new variables.
    traces
        Traces before the chunk.
    """
    gradients = jax.tree.map(jnp.zeros_like, weights)
    traces, products = _first_step(graph, records, traces), products_of_gradient(records)
    for group in graph.traced_groups:
        blocks = transition_blocks(group, records)
        adjoint, mu = backward(group, blocks, signals(group, signal), products.times)
        gradients = add(gradients, _direct(graph, group, weights, records, adjoint, products))
        gradients = add(gradients, _carried(graph, group, weights, mu, traces, products))
    return like(weights, gradients), None


def _first_step(graph: ETraceGraph, records: Records, traces: Traces) -> Traces:
    """Return traces as the first step of a chunk finds them."""
    if records.restart is None:
        return traces
    return restart(graph, traces, records.restart[0])


def solve_step(
    graph: ETraceGraph,
    weights: Weights,
    records: Records,
    signal: Probes,
    before: Traces,
    after: Traces,
) -> Weights:
    """Return the gradient of one step, from the traces on both sides of it.

    Where the states without a trace do not depend on the step before, the traces after the step
    hold all that there is of it: ``Σ_a l[a] ∘ ε[a]``. The traces before it are then overwritten
    in place; reading them as well would make XLA copy them.
    """
    gradients = jax.tree.map(jnp.zeros_like, weights)
    before = _first_step(graph, records, before)
    for group in graph.traced_groups:
        now = signals(group, signal)
        members = [(site, kept_states(site, after)) for site in trace_sites(graph, group)]
        stored = {
            a
            for a in now
            if all(a in kept for site, kept in members if a in site.influence.reached)
        }
        if {a for a, _ in group.transition} <= stored:
            adjoint = {a: value for a, value in now.items() if a not in stored}
            past, traces = {a: now[a][0] for a in stored}, after
        else:
            adjoint, past = backward(group, transition_blocks(group, records), now)
            traces = before
        gradients = add(gradients, _direct(graph, group, weights, records, adjoint, PLAIN))
        gradients = add(gradients, _carried(graph, group, weights, past, traces, PLAIN))
    return like(weights, gradients)


def _direct(
    graph: ETraceGraph,
    group: HiddenGroup,
    weights: Weights,
    records: Records,
    adjoint: Any,
    products: Products,
) -> Weights:
    """Return ``Σ_s x^s ⊗ (Df^s · λ^s)`` for the relations of one group and some of its states."""
    gradients = {}
    for site in trace_sites(graph, group):
        Df = records.Df
        states = [a for a in site.influence.reached if a in adjoint and site.key(a) in Df]
        if states:
            terms = [products.times(site.table(adjoint[a]), Df[site.key(a)]) for a in states]
            factor = sum(terms[1:], terms[0])
            factor = jnp.sum(factor, axis=1) if site.has_fan_out else factor
            columns = active_outputs_of(site.relation, site.influence, states)
            x, key = _input(graph, site, records), site.relation.key
            x = products.inputs(site, x, factor)
            gradients[key] = _pulled_back(site, columns, x, factor, weights[key])
    return gradients


def _pulled_back(
    site: TraceSite, columns: ActiveOutputs | None, x: Any, factor: Any, weights: Any
) -> Any:
    if columns is None:
        return pull_back(*site.operation, x, factor, weights)
    select = functools.partial(columns.operands, site.relation)
    found = pull_back(*site.operation, x, columns.pick(factor), select(weights))
    return jax.linear_transpose(select, weights)(found)[0]


def _carried(
    graph: ETraceGraph,
    group: HiddenGroup,
    weights: Weights,
    mu: Any,
    traces: Traces,
    products: Products,
) -> Weights:
    """Return ``Σ_c μ[c] ∘ ε⁰[c]`` for the relations of one group."""
    gradients: Weights = {}
    for site in trace_sites(graph, group):
        columns = _columns(site, traces)
        for factor, trace in factors_and_traces(site, mu, traces):
            if not is_zero(trace):
                trace = products.trace(site, columns, factor, trace)
                found = _contracted(site, columns, factor, trace, weights[site.relation.key])
                gradients = add(gradients, {site.relation.key: found})
    return gradients


def _contracted(
    site: TraceSite, columns: ActiveOutputs | None, signal: jax.Array, trace: Any, weights: Any
) -> Any:
    def select(operands: Any) -> Any:
        return operands if columns is None else columns.operands(site.relation, operands)

    def of_layer(factor: jax.Array, layer: Any) -> Any:
        factor = factor if columns is None else columns.pick(factor)
        return contract(*site.operation, factor, layer, select(weights))

    found = site.each_layer(of_layer, site.table(signal), widened(trace, signal.dtype))
    if site.has_fan_out:
        found = jax.tree.map(lambda product: jnp.sum(product, axis=0), found)
    return jax.linear_transpose(select, weights)(found)[0]


def carried(
    graph: ETraceGraph,
    weights: Weights,
    signal: dict[str, jax.Array],
    traces: Traces,
    products: Products = PLAIN,
) -> Weights:
    """Return the gradient that reaches the operands through the states before a window.

    Parameters
    ----------
    graph, weights, traces
        As in `solve`; the traces must be those of every state in the signal.
    signal
        Derivative of the loss with respect to the states before the window, by state name;
        zero for those that are missing.
    products
        How they are multiplied.
    """
    gradients = jax.tree.map(jnp.zeros_like, weights)
    for group in graph.traced_groups:
        mu = {
            c: old_state_to_positions(group, c, signal[state.name])
            for c, state in enumerate(group.states)
            if state.name in signal
        }
        gradients = add(gradients, _carried(graph, group, weights, mu, traces, products))
    return like(weights, gradients)


def like(weights: Weights, gradients: Weights) -> Weights:
    """Return gradients with the dtypes of the weights."""
    return jax.tree.map(lambda w, g: g.astype(w.dtype), weights, gradients)


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; relations that only one of them has keep theirs."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}

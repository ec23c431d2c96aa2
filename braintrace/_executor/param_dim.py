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

The learning signal enters `ParameterTraces.gradient` together with the records, not contracted
with a trace as in a step-by-step formulation: the products over time and batch are then one
matrix product.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._etrace_op import Arrays, accumulate, contract, get_primitive_spec, propagate
from .._graph import (
    Boundary,
    ETraceGraph,
    HiddenGroup,
    Record,
    Records,
    Role,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .active_outputs import ActiveOutputs, active_outputs_of, trace_shapes
from .complex_packing import (
    coupled_states,
    factors_and_traces,
    map_arrays,
    pack_like,
    unpack,
)
from .direct import add, direct_gradient, input_of, like
from .layout import TraceSite, old_state_to_positions, trace_sites
from .products import (
    PLAIN,
    SELECTING,
    Products,
    products_of_gradient,
    products_of_traces,
    where_kept,
    which_entries,
)
from .recursion import Blocks, backward, signals, suffix_products, transition_blocks
from .restart import at_positions
from .zero import is_zero, widened


@dataclasses.dataclass(frozen=True)
class ParameterTraces:
    """A trace of the size of the weight for every hidden state that it reaches."""

    needs: ClassVar[frozenset[Record]] = frozenset({"x", "D", "Df"})
    boundary: ClassVar[Boundary] = "cut"

    def check(self, graph: ETraceGraph) -> None:
        """Accept every operation: its own rules carry the trace."""

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the arrays that an operation's rules make for a state, for each such pair."""
        specs = {}
        for site in trace_sites(graph):
            stored = site.influence.reached if every_state else site.influence.stored
            specs.update(_specs_of_site(site, stored))
        return specs

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return the learning signals as they are."""
        return signal

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        if records.restart is not None:
            traces = _restarted(graph, traces, records.restart.any(0))
        before, traces = traces, unpack(traces)
        # What a single step adds to a trace is not multiplied by any transition.
        is_single = records.num_steps == 1
        products = (products_of_gradient if is_single else products_of_traces)(records)
        new: dict[str, Any] = {}
        for group in graph.traced_groups:
            members = trace_sites(graph, group)
            rows = {a for site in members for a in site.influence.reached if site.key(a) in traces}
            if not rows:
                continue
            suffixes = suffix_products(
                group,
                transition_blocks(group, records),
                tuple(sorted(rows)),
                records.num_steps,
                products.times,
            )
            for site in members:
                entering = input_of(graph, site, records), records.Df
                own_weights = weights[site.relation.key]
                new.update(_updated(site, suffixes, entering, own_weights, traces, products))
        return pack_like(new, before)

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, None]:
        """Return the gradient of a recorded chunk.

        The traces after it do not come along: they are the dearer part.

        Where those after a single step are known, and the states without a trace do not depend on
        the step before, they hold all that there is of it: ``Σ_a l[a] ∘ ε[a]``. The traces before
        it are then overwritten in place; reading them as well would make XLA copy them.
        """
        gradients = jax.tree.map(jnp.zeros_like, weights)
        if records.restart is not None:
            before = _restarted(graph, before, records.restart[0])
        products = products_of_gradient(records)
        for group in graph.traced_groups:
            now = signals(group, signal)
            stored = set() if after is None else _stored_states(graph, group, after)
            if after is not None and {a for a, _ in group.transition} <= stored:
                adjoint = {a: value for a, value in now.items() if a not in stored}
                past, traces = {a: now[a][0] for a in stored}, after
            else:
                blocks = transition_blocks(group, records)
                adjoint, past = backward(group, blocks, now, products.times)
                traces = before
            own = direct_gradient(graph, group, weights, records, adjoint, products)
            gradients = add(gradients, own)
            gradients = add(gradients, _carried(graph, group, weights, past, traces, products))
        return like(weights, gradients), None

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return ``Σ_c μ[c] ∘ ε⁰[c]`` for the states before a window."""
        gradients = jax.tree.map(jnp.zeros_like, weights)
        products = SELECTING if zeros_select else PLAIN
        for group in graph.traced_groups:
            by_state = {
                c: old_state_to_positions(group, c, mu[state.name])
                for c, state in enumerate(group.states)
                if state.name in mu
            }
            gradients = add(gradients, _carried(graph, group, weights, by_state, traces, products))
        return like(weights, gradients)


def _specs_of_site(site: TraceSite, stored: tuple[int, ...]) -> dict[str, dict[str, TraceSpec]]:
    """Return what is known of the traces of one site, for all states of its group."""
    relation, influence = site.relation, site.influence
    active = active_outputs_of(relation, influence, stored)
    lead = (influence.fan_out,) if site.has_fan_out else ()
    whole, kept = trace_shapes(relation), trace_shapes(relation, active)
    shapes = {
        name: jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype)
        for name, array in kept.items()
    }
    pairs = dict(coupled_states(site, stored))
    return {
        site.key(a): {
            name: TraceSpec(
                shapes[name].shape,
                shapes[name].dtype,
                _axes(site, name, len(array.shape)),
                relation=relation.key,
                state=state.name,
                operand=name,
                is_stored=a in stored,
                full_shape=(*lead, *array.shape),
                samples=functools.partial(_of_samples, site, active, shapes, name),
                packed_with=site.key(pairs[a]) if a in pairs else None,
            )
            for name, array in whole.items()
        }
        for a, state in enumerate(site.group.states)
    }


def _axes(site: TraceSite, name: str, ndim: int) -> tuple[Role, ...]:
    """Return what the axes of an array run over that an operation's own rule has made."""
    spec = get_primitive_spec(site.relation.primitive)
    lead: list[Role] = ["fan_out"] if site.has_fan_out else []
    batch: list[Role] = ["batch"] if spec.batched else []
    named = () if spec.trace_axes is None else spec.trace_axes.get(name, ())
    rest: Role = "spatial" if named else "entry"
    between: list[Role] = [rest] * (ndim - len(batch) - len(named))
    return (*lead, *batch, *between, *named)


def _of_samples(
    site: TraceSite,
    active: ActiveOutputs,
    shapes: dict[str, jax.ShapeDtypeStruct],
    name: str,
    flags: jax.Array,
) -> jax.Array:
    """Return which entries of one array belong to samples whose flag is set."""
    found: jax.Array = which_entries(site, active, at_positions(site.group, flags), shapes)[name]
    return found


def _restarted(graph: ETraceGraph, traces: Traces, flags: jax.Array) -> Traces:
    """Return traces that start anew for some samples, or for all.

    They are selected, not multiplied by zero: they may be NaN.
    """
    for site in trace_sites(graph):
        active, kept = _active_outputs(site, traces), at_positions(site.group, ~flags)
        select = functools.partial(where_kept, site, active, kept)
        traces = map_arrays(select, site, traces)
    return traces


def _active_outputs(site: TraceSite, traces: Traces) -> ActiveOutputs:
    """Return the outputs that the traces of a site are kept for."""
    return active_outputs_of(site.relation, site.influence, _kept_states(site, traces))


def _kept_states(site: TraceSite, traces: Traces) -> tuple[int, ...]:
    return tuple(a for a in site.influence.reached if site.key(a) in traces)


def _updated(
    site: TraceSite,
    suffixes: tuple[Blocks, Blocks],
    entering: tuple[jax.Array | None, Arrays],
    weights: Arrays,
    traces: Traces,
    products: Products,
) -> Traces:
    """Return ``P⁰ ε⁰ + Σ x ⊗ (P Df)`` for every stored state of one site."""
    (each, first), (x, Df) = suffixes, entering
    active = _active_outputs(site, traces)
    weights = active.operands(site.relation, weights)

    keys = {a: site.key(a) for a in site.influence.reached}
    new = {}
    for i in [a for a, key in keys.items() if key in traces]:
        terms = [
            site.each_layer(
                functools.partial(propagate, *site.operation),
                active.pick(site.to_slots(first[i, j])),
                widened(traces[keys[j]], first[i, j].dtype),
            )
            for j in keys
            if (i, j) in first and keys[j] in traces and not is_zero(traces[keys[j]])
        ]
        added = [
            active.pick(products.times(site.to_slots(each[i, m]), Df[keys[m]]))
            for m in keys
            if (i, m) in each and keys[m] in Df
        ]
        if added:
            factor = sum(added[1:], added[0])
            terms.append(_entered(site, x, factor, weights, products))
        new[keys[i]] = jax.tree.map(_sum_like, traces[keys[i]], *terms)
    return new


def _entered(
    site: TraceSite, x: jax.Array | None, factor: jax.Array, weights: Arrays, products: Products
) -> Arrays:
    """Return the sum over time of the terms ``x ⊗ factor``."""
    if site.has_fan_out:
        factor = jnp.moveaxis(factor, 1, 0)

    def of_layer(factor: jax.Array) -> Arrays:
        return accumulate(*site.operation, products.inputs(site, x, factor), factor, weights)

    entered: Arrays = site.each_layer(of_layer, factor)
    return entered


def _sum_like(old: jax.Array | jax.ShapeDtypeStruct, *parts: jax.Array) -> jax.Array:
    if not parts:
        return jnp.zeros(old.shape, old.dtype)
    return sum(parts[1:], parts[0]).astype(old.dtype)


def _stored_states(graph: ETraceGraph, group: HiddenGroup, traces: Traces) -> set[int]:
    """Return the states of a group of which every trace that there is, is kept."""
    members = [(site, _kept_states(site, traces)) for site in trace_sites(graph, group)]
    return {
        a
        for a in range(group.num_states)
        if all(a in kept for site, kept in members if a in site.influence.reached)
    }


def _carried(
    graph: ETraceGraph,
    group: HiddenGroup,
    weights: Weights,
    mu: dict[int, jax.Array],
    traces: Traces,
    products: Products,
) -> Weights:
    """Return ``Σ_c μ[c] ∘ ε[c]`` for the relations of one group."""
    gradients: Weights = {}
    for site in trace_sites(graph, group):
        active = _active_outputs(site, traces)
        for factor, trace in factors_and_traces(site, mu, traces):
            if not is_zero(trace):
                trace = products.trace(site, active, factor, trace)
                found = _contracted(site, active, factor, trace, weights[site.relation.key])
                gradients = add(gradients, {site.relation.key: found})
    return gradients


def _contracted(
    site: TraceSite,
    active: ActiveOutputs,
    signal: jax.Array,
    trace: Arrays,
    weights: Arrays,
) -> Arrays:
    select = functools.partial(active.operands, site.relation)

    def of_layer(factor: jax.Array, layer: Arrays) -> Arrays:
        return contract(*site.operation, active.pick(factor), layer, select(weights))

    found = site.each_layer(of_layer, site.to_slots(signal), widened(trace, signal.dtype))
    if site.has_fan_out:
        found = jax.tree.map(lambda product: jnp.sum(product, axis=0), found)
    (gradients,) = jax.linear_transpose(select, weights)(found)
    return dict(gradients)

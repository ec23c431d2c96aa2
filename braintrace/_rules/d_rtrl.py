r"""Parameter-dimension traces (D-RTRL).

.. math::

    \epsilon^t[a] = \sum_c D^t[a, c]\, \epsilon^{t-1}[c] + D_f^t[a] \otimes x^t, \qquad
    \nabla w = \sum_t \sum_a l^t[a] \circ \epsilon^t[a].

For a recorded chunk of ``K`` steps this equals, without a trace per step,

.. math::

    \nabla w = \sum_s x^s \otimes (D_f^s \cdot \lambda^s) + \mu \circ \epsilon^0, \qquad
    \epsilon^K = P^0 \epsilon^0 + \sum_s x^s \otimes (P^s D_f^s)

(see `pull`). One step is a chunk of one. The trace of a state that no later step reads
elementwise is not carried: column ``a`` of every ``D`` is zero for it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._core.active_outputs import (
    ActiveOutputs,
    active_outputs_of,
    trace_shapes,
    where_elements,
    where_outputs,
    which_entries,
)
from .._core.gradient import (
    add,
    as_chunk,
    chunk_gradient,
    finite_inputs,
    like,
    recorded_inputs,
    sum_products,
)
from .._core.local_step import Outputs, blocks, pull, values_of
from .._core.sites import (
    TraceSite,
    at_elements,
    at_entry,
    of_past,
    probes_of_past,
    reachable_blocks,
    row_name,
    signals,
    trace_sites,
)
from .._core.step_program import scan_records
from .._core.traces import (
    arrays_of,
    as_arrays,
    coupled_states,
    depend_on,
    factors_and_traces,
    is_zero,
    joined,
    of_arrays,
    of_site,
    ordered_after,
    pack_like,
    readers_first,
    unpack,
    widened,
)
from .._errors import PrimitiveError
from .._etrace_op.registry import Arrays, get_primitive_spec
from .._etrace_op.rules import accumulate, axes_of_trace, contract, has_derived_traces, propagate
from .._graph.graph import ETraceGraph, Role, TraceSpec, TraceSpecs
from .._graph.hidden_group import HiddenGroup
from .._graph.method import Adjoints, Chunk, Records, Signal, TraceMethod, Traces, Weights

Blocks: TypeAlias = dict[tuple[int, int], jax.Array]
"""Blocks of an ``n × n`` matrix per unit, by ``(row, column)``; missing blocks are zero."""

Decays: TypeAlias = dict[tuple[str, str], jax.Array]
"""Factors shaped like an operation's output, by the keys of the written and the read trace."""


@dataclasses.dataclass(frozen=True)
class ParameterTraces(TraceMethod):
    """Trace method with a trace of the size of the weight for every state that it reaches.

    The gradient of a chunk is linear in the adjoints of the states after it (`pull_back`), and its
    part through the traces is linear in the adjoints of the states before it (`contract`).

    Attributes
    ----------
    for_delays
        Returns the method of a model that may hold earlier values in its states.
    """

    for_delays: Callable[[ETraceGraph], TraceMethod] | None = None
    jacobian = "elementwise"
    needs = frozenset({"x", "values"})
    filters_readouts = True

    def fit(self, graph: ETraceGraph) -> TraceMethod:
        """Return another method for a model that may hold earlier values in its states."""
        if self.for_delays is None or not graph.traced.may_delay:
            return self
        return self.for_delays(graph)

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the trace arrays of each pair of an operation and a state."""
        specs = {}
        for site in trace_sites(graph):
            stored = site.influence.reached if every_state else site.influence.stored
            active = active_outputs_of(site.relation, site.influence, stored)
            specs.update(specs_of_site(graph, site, stored, active))
        return specs

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        graph, _, records = chunk
        if records.steps > 1 and not _has_derived_traces(graph):
            return self._step_by_step(chunk, {}, traces)[1]
        # The contribution of a single step is not multiplied by any `D`.
        is_single = records.steps == 1
        selects = records.has_mask if is_single else records.zeros_select
        new: list[Traces] = []
        for group in graph.traced_groups:
            sites = trace_sites(graph, group)
            rows = tuple(sorted({a for site in sites for a in _states_at(site, traces)}))
            if not rows:
                continue
            of_rows = _rows_of_step if is_single else _unit_rows
            before, factors = of_rows(graph, group, records, rows, traces)
            for site in sites:
                if own := of_site(site, traces):
                    new.append(updated_traces(chunk, site, before, factors, own, selects))
        return joined(new)

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, without the traces after it: they cost more.

        If the traces after a single step are known, and the states without a trace do not depend on
        the step before, these traces contain the whole gradient: ``Σ_a l[a] ∘ ε[a]``. The traces
        before the step are then updated in place; if they were read, XLA would copy them.
        """
        graph, weights, records = chunk
        if after is None and not _has_derived_traces(graph):
            return self._step_by_step(chunk, signal, before)
        gradients = jax.tree.map(jnp.zeros_like, weights)
        if records.reset is not None:
            before = after_reset(graph, before, records.reset[0])
        selects = records.has_mask
        for group in graph.traced_groups:
            now, traces = signals(group, signal), before
            stored = set() if after is None else _stored_states(graph, group, after)
            if after is not None and {a for a, _ in group.transition} <= stored:
                traces = after
                mu = {a: now.pop(a)[0] for a in now.keys() & stored}
                _, factors = _pulled(graph, group, records, now)
            else:
                mu, factors = _pulled(graph, group, records, now)
            gradients = add(gradients, sum_products(chunk, factors, selects))
            gradients = add(gradients, carried_gradient(chunk, group, mu, traces, selects))
        return like(weights, gradients), None

    def _step_by_step(self, chunk: Chunk, signal: Signal, before: Traces) -> tuple[Weights, Traces]:
        """Return the gradient of a chunk, and the traces after it, updated after every step.

        A rule ``yw_to_w`` by hand may be anything, so its powers are not known.
        """
        graph, weights, records = chunk
        past = signal.keys() & probes_of_past(graph).keys()  # of the first step: not here
        signal = {n: x.at[0].set(0) if n in past else x for n, x in signal.items()}

        def step(carry: tuple[Traces, Weights], now: Any) -> tuple[tuple[Traces, Weights], None]:
            (traces, gradients), (x, values, reset, signal) = carry, as_chunk(now)
            own = dataclasses.replace(records, x=x, values=values, reset=reset, inputs=(), steps=1)
            one = Chunk(graph, weights, own)
            after = like(traces, self.update(one, traces))
            if signal:
                result = chunk_gradient(self, one, signal, traces, after)[0]
                gradients = jax.tree.map(jnp.add, gradients, result)
            return (after, gradients), None

        # Sums in half precision would stop growing.
        zeros = widened(jax.tree.map(jnp.zeros_like, weights), jnp.float32)
        now = records.x, records.values, records.reset, signal
        (after, gradients), _ = scan_records(step, (as_arrays(before), zeros), now, records.steps)
        return like(weights, gradients), after

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return ``Σ_c μ[c] ∘ ε⁰[c]`` for the states before a window."""
        return self.contract(chunk, at_entry(chunk.graph, mu), traces)

    def pull_back(self, chunk: Chunk, signal: Signal, after: Adjoints) -> tuple[Weights, Adjoints]:
        """Return ``Σ x ⊗ f`` of a chunk, and the adjoints of the states before it.

        ``after`` are the adjoints of all states of the traced groups after the chunk.

        Raises
        ------
        PrimitiveError
            For an operation whose traces are updated step by step.
        """
        if not _has_derived_traces(chunk.graph):
            raise PrimitiveError(
                "`checkpoint` needs operations whose rule `yw_to_w` is derived, but the model has "
                "one whose rule is written by hand. Declare `trace_axes` instead of the rule."
            )
        graph, weights, records = chunk
        gradients, before = jax.tree.map(jnp.zeros_like, weights), {}
        late = at_entry(graph, of_past(graph, signal))
        for group in graph.traced_groups:
            end, past = dict(after[group.index]), late[group.index]
            row, factors = _pulled(graph, group, records, signals(group, signal), end)
            gradients = add(gradients, sum_products(chunk, factors, records.has_mask))
            before[group.index] = {
                a: (value + past.get(a, 0)).astype(value.dtype) for a, value in row.items()
            }
        return like(weights, gradients), before

    def contract(self, chunk: Chunk, adjoints: Adjoints, traces: Traces) -> Weights:
        """Return ``Σ_c μ[c] ∘ ε⁰[c]``."""
        graph, weights, records = chunk
        gradients = jax.tree.map(jnp.zeros_like, weights)
        for group in graph.traced_groups:
            own = adjoints[group.index]
            of_group = carried_gradient(chunk, group, own, traces, records.zeros_select)
            gradients = add(gradients, of_group)
        return like(weights, gradients)


def _has_derived_traces(graph: ETraceGraph) -> bool:
    return all(has_derived_traces(r.primitive) for r in graph.hidden_param_op_relations)


def after_reset(graph: ETraceGraph, traces: Traces, flags: jax.Array) -> Traces:
    """Return traces that are reset for some samples, or for all.

    They are selected, not multiplied by zero: they may be NaN.
    """
    new = {}
    for site in trace_sites(graph):
        active, keep = active_outputs(site, traces), ~at_elements(graph, site.group, flags)
        for keys, trace in arrays_of(of_site(site, traces)).items():
            new[keys] = where_elements(site, active, keep, trace)
    return of_arrays(new)


def active_outputs(site: TraceSite, traces: Traces) -> ActiveOutputs:
    return active_outputs_of(site.relation, site.influence, _states_at(site, traces))


def _states_at(site: TraceSite, traces: Traces) -> tuple[int, ...]:
    return tuple(a for a in site.influence.reached if site.key(a) in traces)


def _pulled(
    graph: ETraceGraph,
    group: HiddenGroup,
    records: Records,
    signal: dict[int, jax.Array],
    end: dict[int, jax.Array] | None = None,
) -> tuple[dict[int, jax.Array], Outputs]:
    """Return the adjoints of the states before a chunk, and the factors of its gradient."""
    if end is None:
        if not signal:
            return {}, {}
        dtype = jnp.result_type(*signal.values())
        end = {c: jnp.zeros(group.shape, dtype) for c in group.read_states}
    return pull(graph, group, records, end, signal, dict, records.has_mask)


def _unit_rows(
    graph: ETraceGraph, group: HiddenGroup, records: Records, rows: tuple[int, ...], traces: Traces
) -> tuple[Blocks, Arrays]:
    """Return ``P⁰`` by row and old state, and the factors of the traces of the rows.

    ``rows`` are the states of the group that have traces.
    """
    dtype = jnp.result_type(*(group.states[a].dtype for a in rows))
    states = sorted({*rows, *group.read_states})
    end = {
        c: jnp.stack([jnp.full(group.shape, float(a == c), dtype) for a in rows]) for c in states
    }
    sites = trace_sites(graph, group)

    def emit(outputs: Outputs) -> Arrays:
        emitted: Arrays = {}
        for site in sites:
            name, active = row_name(graph, site), active_outputs(site, traces)
            for k, a in enumerate(rows):
                if name in outputs and site.key(a) in traces:
                    emitted[factor_key(name, a, active)] = active.pick(outputs[name][k])
        return emitted

    before, factors = pull(graph, group, records, end, {}, emit, records.zeros_select)
    pairs = reachable_blocks(group, rows)
    return {(a, c): before[c][rows.index(a)] for a, c in pairs if c in before}, factors


def _rows_of_step(
    graph: ETraceGraph, group: HiddenGroup, records: Records, rows: tuple[int, ...], traces: Traces
) -> tuple[Blocks, Arrays]:
    """Return the same for a single step.

    XLA evaluates these rows at every entry of a trace, so each is differentiated alone.
    """
    now = {name: value[0] for name, value in records.values.items()}
    D, Df = blocks(graph, group, values_of(graph, now))
    if records.reset is not None:
        is_new = at_elements(graph, group, records.reset[0])
        D = {pair: jnp.where(is_new, 0, block) for pair, block in D.items()}
    factors: Arrays = {}
    for site in trace_sites(graph, group):
        name, active = row_name(graph, site), active_outputs(site, traces)
        for a in rows:
            if (key := site.key(a)) in traces and key in Df:
                factors[factor_key(name, a, active)] = active.pick(Df[key])[None]
    return {(a, c): block for (a, c), block in D.items() if a in rows}, factors


def factor_key(row: str, state: int, active: ActiveOutputs) -> str:
    return f"{row} to {state}, {active.runs}"


def updated_traces(
    chunk: Chunk, site: TraceSite, first: Blocks, factors: Arrays, traces: Traces, selects: bool
) -> Traces:
    """Return ``P⁰ ε⁰ + Σ x ⊗ f`` for every stored state of one site."""
    (graph, _, records), key_of = chunk, site.key
    active, reset = active_outputs(site, traces), records.reset
    weights = chunk.weights[site.relation.key]
    known = {key for key, trace in unpack(traces).items() if not is_zero(trace)}
    decays = {
        (key_of(i), key_of(j)): active.pick(site.to_outputs(block))
        for (i, j), block in first.items()
        if key_of(i) in traces and key_of(j) in known
    }
    names = {
        key_of(a): factor_key(row_name(graph, site), a, active) for a in site.influence.reached
    }
    factors = {
        key: factors[name] for key, name in names.items() if key in traces and name in factors
    }
    if site.has_fan_out:
        factors = {key: jnp.moveaxis(factor, 1, 0) for key, factor in factors.items()}
    x, is_continued = recorded_inputs(graph, records)[site.relation.key], None
    if reset is not None:
        is_new = jax.vmap(functools.partial(at_elements, graph, site.group))(reset).any(0)
        is_continued = active.pick(site.to_outputs(~is_new))

    def of_layer(factors: Arrays, of_samples: tuple[Decays, Any], stored: Traces) -> Traces:
        (decays, is_continued), old = of_samples, depend_on(records.token, stored)
        before, new = unpack(old), dict[str, Arrays]()
        if is_continued is not None:  # selected, not multiplied by zero: they may be NaN
            before = {key: where_outputs(site, is_continued, e) for key, e in before.items()}
        for keys, readers in readers_first(arrays_of(old), decays.keys()):
            own = ordered_after([new[key] for key in readers], {key: before[key] for key in keys})
            read_from = {**before, **own}
            for key in keys:
                terms = [
                    propagate(*site.operation, decay, widened(read_from[read], decay.dtype))
                    for (written, read), decay in decays.items()
                    if written == key
                ]
                if key in factors:
                    inputs = finite_inputs(site, x, factors[key]) if selects else x
                    terms.append(accumulate(*site.operation, inputs, factors[key], weights))
                new[key] = jax.tree.map(_sum_like, own[key], *terms)
        return pack_like(new, old)

    return site.each_layer(of_layer, factors, (decays, is_continued), as_arrays(traces))


def _sum_like(old: jax.Array, *parts: jax.Array) -> jax.Array:
    if not parts:
        return jnp.zeros(old.shape, old.dtype)
    return sum(parts[1:], parts[0]).astype(old.dtype)


def _stored_states(graph: ETraceGraph, group: HiddenGroup, traces: Traces) -> set[int]:
    """Return the states of a group for which all traces are stored."""
    sites = trace_sites(graph, group)
    missing = {a for s in sites for a in s.influence.reached if s.key(a) not in traces}
    return set(range(len(group.states))) - missing


def carried_gradient(
    chunk: Chunk, group: HiddenGroup, mu: Mapping[int, jax.Array], traces: Traces, selects: bool
) -> Weights:
    """Return ``Σ_c μ[c] ∘ ε[c]`` for the relations of one group."""
    gradients: Weights = {}
    if is_zero(traces):
        return gradients
    for site in trace_sites(chunk.graph, group):
        active, operands = active_outputs(site, traces), chunk.weights[site.relation.key]
        product = functools.partial(_contracted, site, active, operands)
        for factor, trace in factors_and_traces(site, mu, traces):
            if selects:
                trace = where_elements(site, active, factor != 0, trace)
            result = site.each_layer(product, site.to_outputs(factor), widened(trace, factor.dtype))
            if site.has_fan_out:
                result = jax.tree.map(lambda layers: jnp.sum(layers, axis=0), result)
            gradients = add(gradients, {site.relation.key: result})
    return gradients


def _contracted(
    site: TraceSite, active: ActiveOutputs, weights: Arrays, factor: jax.Array, trace: Arrays
) -> Arrays:
    pick = None if active.runs is None else active.pick
    return contract(*site.operation, active.pick(factor), trace, weights, pick)


# --- specifications


def specs_of_site(
    graph: ETraceGraph, site: TraceSite, stored: tuple[int, ...], active: ActiveOutputs
) -> dict[str, dict[str, TraceSpec]]:
    """Return the specifications of the traces of one site, for its ``stored`` states.

    ``active`` are the outputs that they contain.
    """
    relation, lead = site.relation, (site.influence.fan_out,) if site.has_fan_out else ()
    full = trace_shapes(relation)
    stored_shapes = full if active.runs is None else trace_shapes(relation, active)
    shapes = {
        name: jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype)
        for name, array in stored_shapes.items()
    }
    pairs = dict(coupled_states(site, stored))

    def entries_of_samples(name: str, flags: jax.Array) -> jax.Array:
        entries = which_entries(site, active, at_elements(graph, site.group, flags), shapes)
        return jnp.asarray(entries[name])

    return {
        site.key(a): {
            name: TraceSpec(
                shapes[name].shape,
                shapes[name].dtype,
                _axes(site, name, len(array.shape)),
                relation=relation.key,
                state=site.group.names[a],
                operand=name,
                full_shape=(*lead, *array.shape),
                samples=functools.partial(entries_of_samples, name),
                packed_with=site.key(pairs[a]) if a in pairs else None,
            )
            for name, array in full.items()
        }
        for a in stored
    }


def _axes(site: TraceSite, name: str, ndim: int) -> tuple[Role, ...]:
    """Return the roles of the axes of a trace array, from the operation's specification."""
    spec = get_primitive_spec(site.relation.primitive)
    lead: list[Role] = ["fan_out"] if site.has_fan_out else []
    batch: list[Role] = ["batch"] if spec.batched else []
    named = axes_of_trace(site.relation.primitive, name)
    rest: Role = "spatial" if named else "entry"
    between: list[Role] = [rest] * (ndim - len(batch) - len(named))
    return (*lead, *batch, *between, *named)

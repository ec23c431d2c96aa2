r"""Traces of the numbers of the state that a weight reaches within some steps (SnAp-n).

.. math::

    \epsilon^t[q, w] = \sum_{q' \in N(w)} J^t[q, q']\, \epsilon^{t-1}[q', w] + F^t[q, w],
    \quad q \in N(w), \qquad \nabla w = \sum_t \sum_{q \in N(w)} l^t[q]\, \epsilon^t[q, w].

The state of one sample is a vector of numbers ``q``, and ``N(w)`` are those that the output of
``w`` reaches within ``n`` steps: those of this step, and ``n - 1`` times what ``J`` makes of them,
by its structure. Nothing else is stored. An operation's own rules say which output an entry of its
traces goes with, what enters, and how traces become a gradient: what they keep for one state is
kept for each neighbour of that output.

``J`` itself is made in every step, by one vector-Jacobian product for each number of the state.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._errors import PrimitiveError
from .._etrace_op import accumulate, contract
from .._graph import (
    Boundary,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    Record,
    Records,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .active_outputs import trace_shapes
from .direct import like
from .forward_mode import has_while
from .layout import TraceSite, new_state_to_positions, old_state_to_positions, trace_sites, x_key
from .neighbour_pairs import Move, has_samples_first, pairs_of, reach_of, samples_of
from .probed_step import pre_step_probe
from .recursion import scan_records
from .zero import as_arrays, is_zero, widened


@dataclasses.dataclass(frozen=True)
class NeighbourTraces:
    """A trace of each weight for the numbers of the state that it reaches within ``n`` steps."""

    n: int
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "Df", "J"})
    boundary: ClassVar[Boundary] = "neighbours"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Tell that every relation has traces."""
        return True

    def check(self, graph: ETraceGraph) -> None:
        """Refuse what neighbours are not known of."""
        rule = f"SnAp(n={self.n})"
        if len(graph.hidden_groups) > 1:
            groups = "; ".join(_names(group) for group in graph.hidden_groups)
            raise PrimitiveError(
                f"{rule} follows one recurrent layer: hidden states that are coupled unit by unit. "
                f"The model has several such groups: {groups}. Use `SnAp(n=1)` or `RTRL`."
            )
        for group in graph.hidden_groups:
            if any(layout is not None for layout in (*group.layouts, *group.old_layouts)):
                raise PrimitiveError(
                    f"{rule} needs hidden states of one layout; {_names(group)} are at parts of "
                    "their common positions, or in another order. Use `SnAp(n=1)` or `RTRL`."
                )
            if any(has_while(graph.traced.program, var) for var in group.new_vars):
                raise PrimitiveError(
                    f"{rule} goes back through every step, and {_names(group)} are computed by a "
                    "`while` loop of unknown length, which has no derivative in that direction. "
                    "Use a loop of known length, or `SnAp(n=1)`."
                )
        for site in trace_sites(graph):
            if site.has_fan_out:
                raise PrimitiveError(
                    f"{rule} has no neighbours for `{site.relation.primitive.name}` of "
                    f"'{site.relation.key}' ({site.relation.source}), of which one output is "
                    f"broadcast to several positions of {_names(site.group)}. Use `SnAp(n=1)` or "
                    "`RTRL`."
                )
            if not has_samples_first(site):
                raise PrimitiveError(
                    f"{rule} follows sample by sample, and the rows of "
                    f"`{site.relation.primitive.name}` of '{site.relation.key}' "
                    f"({site.relation.source}) have their samples in another order than "
                    f"{_names(site.group)}. Give it an input with samples along the first axis, or "
                    "use `SnAp(n=1)` or `RTRL`."
                )

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return an array of pairs ``(entry, number)`` for each array of an operation's traces."""
        specs: dict[str, dict[str, TraceSpec]] = {}
        for site in trace_sites(graph):
            reach = reach_of(site, self.n)
            specs[site.relation.key] = {
                name: TraceSpec(
                    (samples_of(site), len(found.entries)),
                    array.dtype,
                    ("batch", "entry"),
                    relation=site.relation.key,
                    operand=name,
                    full_shape=(samples_of(site), found.size * reach.shape[1]),
                )
                for name, array in trace_shapes(site.relation).items()
                for found in [pairs_of(site, name, reach)]
            }
        return specs

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return the learning signals as they are."""
        return signal

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        return self._run(graph, weights, records, None, traces)[1]

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it."""
        arriving = _signals(graph, signal)
        if after is not None:
            now = arriving[0]
            return self._contracted(graph, weights, now, after, records.zeros_select), after
        return self._run(graph, weights, records, arriving, before)

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return the sum of ``mu[q] eps[q]`` over samples and numbers."""
        gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
        if is_zero(traces):
            return gradients
        for group in graph.traced_groups:
            arriving = _as_numbers(
                group,
                {
                    a: old_state_to_positions(group, a, mu[state.name])
                    for a, state in enumerate(group.states)
                    if state.name in mu
                },
                samples_of(trace_sites(graph, group)[0]),
            )
            return self._contracted(graph, weights, arriving, traces, zeros_select)
        return gradients

    def _run(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        arriving: jax.Array | None,
        before: Traces,
    ) -> tuple[Weights, Traces]:
        """Return the gradients that learning signals give, step by step, and the last traces."""
        moves = {
            (site.relation.key, name): Move.of(site, name, self.n)
            for site in trace_sites(graph)
            for name in trace_shapes(site.relation)
        }
        sites = {site.relation.key: site for site in trace_sites(graph)}
        select, names = records.zeros_select, {key: list(own) for key, own in before.items()}
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, dict(before))

        def step(carry: Any, now: Any) -> Any:
            gradients, traces = carry
            x, Df, J, restart, signal = now
            entering = {key: _inputs(graph, sites[key], x, weights) for key in names}
            new = {
                key: {
                    name: moves[key, name](
                        J, _fresh(restart, traces[key][name]), entering[key][name], Df
                    ).astype(traces[key][name].dtype)
                    for name in names[key]
                }
                for key in names
            }
            if signal is not None:
                found = self._contracted(graph, weights, signal, new, select)
                gradients = jax.tree.map(jnp.add, gradients, found)
            return (gradients, new), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        assert records.J is not None
        wide = widened(as_arrays(dict(before)), records.J.dtype)
        over_time = (records.x, records.Df, records.J, records.restart, arriving)
        (gradients, after), _ = scan_records(step, (zeros, wide), over_time, records.num_steps)
        return gradients, jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), after, dtypes)

    def _contracted(
        self,
        graph: ETraceGraph,
        weights: Weights,
        arriving: jax.Array,
        traces: Traces,
        select: bool,
    ) -> Weights:
        """Return the sums over numbers of signal and trace, as gradients of the operands."""
        gradients: Weights = {}
        for site in trace_sites(graph):
            key, y = site.relation.key, site.relation.y_var.aval
            shapes, reach = trace_shapes(site.relation), reach_of(site, self.n)
            summed = {}
            for name, trace in traces[key].items():
                pairs = pairs_of(site, name, reach)
                factor = arriving[:, pairs.numbers]
                product = factor * widened(trace, factor.dtype)
                product = jnp.where(factor == 0, 0, product) if select else product
                total = jax.ops.segment_sum(
                    product.T, pairs.entries, pairs.size, indices_are_sorted=True
                ).T
                summed[name] = total.reshape(shapes[name].shape)
            ones = jnp.ones(y.shape, arriving.dtype)
            gradients[key] = contract(*site.operation, ones, summed, weights[key])
        return like(weights, gradients)


def _names(group: HiddenGroup) -> str:
    return ", ".join(f"'{state.name}'" for state in group.states)


def _fresh(restart: jax.Array | None, trace: jax.Array) -> jax.Array:
    """Return a trace that starts anew for flagged samples: it is selected, it may be NaN."""
    if restart is None:
        return trace
    flags = restart[:, None] if restart.ndim else restart
    return jnp.where(flags, 0, trace)


def _signals(graph: ETraceGraph, signal: Signal) -> jax.Array:
    """Return the learning signals of all numbers, ``(time, samples, numbers)``.

    What the output of the next step in the chunk reads of a state is a part of its signal.
    """
    (group,) = graph.traced_groups
    found = {}
    for a, state in enumerate(group.states):
        found[a] = new_state_to_positions(group, a, signal[state.name])
        if a in group.read_by_output:
            late = old_state_to_positions(group, a, signal[pre_step_probe(state)])
            found[a] = found[a] + jnp.concatenate([late[1:], jnp.zeros_like(late[:1])])
    return _as_numbers(group, found, samples_of(trace_sites(graph, group)[0]))


def _as_numbers(group: HiddenGroup, values: dict[int, jax.Array], samples: int) -> jax.Array:
    """Bring arrays ``(*lead, *positions)`` of states to one ``(*lead, samples, numbers)``."""
    lead = next(iter(values.values())).shape
    lead = lead[: len(lead) - len(group.shape)]
    zero = jnp.zeros((*lead, *group.shape), jnp.result_type(*values.values()))
    parts = [values.get(a, zero).reshape(*lead, samples, -1) for a in range(group.num_states)]
    return jnp.concatenate(parts, axis=-1)


def _inputs(
    graph: ETraceGraph, site: TraceSite, x: dict[str, Any], weights: Weights
) -> dict[str, jax.Array]:
    """Return what enters every entry of the traces where the sensitivity is one."""
    relation, y = site.relation, site.relation.y_var.aval
    own = None if relation.x_var is None else x[x_key(graph, relation)]
    own = None if own is None else own[None]
    ones = jnp.ones((1, *y.shape), y.dtype)
    found = accumulate(*site.operation, own, ones, weights[relation.key])
    return {name: array.reshape(samples_of(site), -1) for name, array in found.items()}

r"""Trace methods of user-defined rules.

With a trace for each ETP operation and group,

.. math::

    E^t = advance(E^{t-1}, D^t, x^t, D_f^t), \qquad
    \nabla w = \sum_t contract(E^t, l^t).

The steps of a recorded chunk run one by one, since products over time need knowledge of the rule's
recursion. With one trace for all hidden states of a sample as a vector :math:`S`, and parameters,
each step is differentiated separately,

.. math::

    E^t = advance(E^{t-1}, J^t, F^t), \qquad
    \nabla w = \sum_t \partial L^t / \partial w + contract(E^{t-1}, \mu^t), \qquad
    \mu^t = \partial L^t / \partial S^{t-1}.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from .._core.layout import x_key
from .._core.local_step import operand_shapes, values_of
from .._core.products import add, like
from .._core.records import blocks
from .._core.signals import at_elements, at_entry, signals
from .._core.time_loops import scan_records
from .._core.traces import reset_traces, widened
from .._etrace_op import Arrays
from .._graph import (
    Adjoints,
    ETraceGraph,
    Jacobian,
    Record,
    Records,
    Signal,
    TraceMethod,
    Traces,
    TraceSpecs,
    Weights,
)
from .chunk_vjp import step_jacobians
from .full_traces import PassingTraces, arriving_rows, over_steps
from .leaves import Leaves, check_method, leaves_of
from .protocol import Rule
from .sites import OperationSite, full_site, sites_of

Recorded: TypeAlias = tuple[Mapping[str, Any], Arrays, jax.Array | None]
"""Inputs and values of a step, and flags of the samples that were reset before it."""


@dataclasses.dataclass(frozen=True)
class RuleTraces(TraceMethod):
    """`TraceMethod` of a rule whose Jacobian is none or elementwise.

    Attributes
    ----------
    rule
        The rule.
    """

    rule: Rule
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "values"})
    jacobian: ClassVar[Jacobian] = "elementwise"

    def check(self, graph: ETraceGraph) -> None:
        """Refuse wrong results of the rule."""
        check_method(self, graph)

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the leaves of all sites."""
        sites = self._leaves(graph, operand_shapes(graph))
        return {key: spec for leaves in sites for key, spec in leaves.specs.items()}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        sites = self._leaves(graph, weights)

        def step(arrays: Arrays, now: Recorded) -> tuple[Arrays, None]:
            return _advanced(graph, sites, arrays, now), None

        after, _ = scan_records(step, _of(sites, traces), _recorded(records), records.steps)
        return like(traces, after)

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
        sites, selects = self._leaves(graph, weights), records.has_mask
        mu = {group.index: signals(group, signal) for group in graph.traced_groups}
        if after is not None:
            now = jax.tree.map(lambda leaf: leaf[0], mu)
            return like(weights, _contracted(graph, sites, _of(sites, after), now, selects)), after

        def step(carry: tuple[Arrays, Weights], now: Any) -> tuple[tuple[Arrays, Weights], None]:
            (arrays, gradients), (recorded, mu_now) = carry, now
            arrays = _advanced(graph, sites, arrays, recorded)
            result = _contracted(graph, sites, arrays, mu_now, selects)
            return (arrays, jax.tree.map(jnp.add, gradients, result)), None

        # Sums in half precision would stop growing.
        zeros = widened(jax.tree.map(jnp.zeros_like, weights), jnp.float32)
        now = _recorded(records), mu
        start = _of(sites, before), zeros
        (arrays, gradients), _ = scan_records(step, start, now, records.steps)
        return like(weights, gradients), like(before, arrays)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the rule's gradient for the adjoints of the states before a window."""
        sites = self._leaves(graph, weights)
        result = _contracted(graph, sites, _of(sites, traces), at_entry(graph, mu), zeros_select)
        return like(weights, result)

    def _leaves(self, graph: ETraceGraph, weights: Weights) -> list[Leaves[OperationSite]]:
        return [leaves_of(self.rule, site) for site in sites_of(graph, weights)]


def _recorded(records: Records) -> Recorded:
    return records.x, records.values, records.reset


def _of(sites: list[Leaves[OperationSite]], traces: Traces) -> Arrays:
    return {key: leaf for leaves in sites for key, leaf in leaves.of(traces).items()}


def _advanced(
    graph: ETraceGraph,
    sites: list[Leaves[OperationSite]],
    arrays: Arrays,
    recorded: Recorded,
) -> Arrays:
    """Return the arrays of all sites after one step."""
    (x, values, reset), new = recorded, Arrays()
    local = values_of(graph, values)
    jacobians = {g.index: blocks(graph, g, local) for g in graph.traced_groups}
    for leaves in sites:
        site, own = leaves.site, {key: arrays[key] for key in leaves.specs}
        D, Df = jacobians[site.place.group.index]
        if reset is not None:
            own = dict(reset_traces(leaves.specs, own, reset))
            is_new = at_elements(graph, site.place.group, reset)
            D = {pair: jnp.where(is_new, 0, block) for pair, block in D.items()}
        relation = site.place.relation
        inputs = None if relation.x_var is None else x[x_key(graph, relation)]
        keys = {state: site.place.key(a) for state, a in site.indices.items()}
        F = {state: Df[key] for state, key in keys.items() if key in Df}
        new |= leaves.advanced(own, _transition(leaves, D), inputs, F)
    return new


def _contracted(
    graph: ETraceGraph,
    sites: list[Leaves[OperationSite]],
    arrays: Arrays,
    mu: Adjoints,
    selects: bool,
) -> Weights:
    """Return the gradients of all operands from the learning signals of one step.

    With ``selects``, the traces of samples without a signal are set to zero: they may be NaN.
    """
    gradients: Weights = {}
    for leaves in sites:
        site, own = leaves.site, {key: arrays[key] for key in leaves.specs}
        signal = mu[site.place.group.index]
        if selects:
            own = leaves.without(own, _silent(graph, site, signal))
        result = {site.place.relation.key: leaves.contracted(own, _mu(site, signal))}
        gradients = add(gradients, result)
    return gradients


def _transition(
    leaves: Leaves[OperationSite], D: dict[tuple[int, int], jax.Array]
) -> dict[tuple[str, str], jax.Array] | None:
    """Return the Jacobian blocks among a site's states, in the layout of its output."""
    if leaves.rule.jacobian == "none":
        return None
    place = leaves.site.place
    names = {a: state for state, a in leaves.site.indices.items()}
    pairs = [(a, c) for a, c in place.group.transition if a in names and c in names]
    return {(names[a], names[c]): place.to_outputs(D[a, c]) for a, c in pairs}


def _mu(site: OperationSite, signal: Mapping[int, jax.Array]) -> Arrays:
    """Return the learning signals of a site's states, in the layout of its output."""
    group = site.place.group
    result = {}
    for state, a in site.indices.items():
        own = signal[a] if a in signal else jnp.zeros(group.shape, group.states[a].dtype)
        result[state] = site.place.to_outputs(own)
    return result


def _silent(graph: ETraceGraph, site: OperationSite, signal: Mapping[int, jax.Array]) -> jax.Array:
    """Return the samples without a learning signal at the states of a site, or one flag for all."""
    axis, ndim = graph.batch_axis(site.place.group), len(site.place.group.shape)
    over = tuple(i for i in range(ndim) if i != axis)
    has_signal = [(value != 0).any(over) for value in signal.values()]
    return ~functools.reduce(jnp.logical_or, has_signal, jnp.zeros((), bool))


@dataclasses.dataclass(frozen=True)
class FullRuleTraces(PassingTraces):
    """`TraceMethod` of a rule whose Jacobian is full, or block-diagonal by layer.

    Attributes
    ----------
    rule
        The rule.
    """

    rule: Rule
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "traces"})

    @property
    def jacobian(self) -> Jacobian:
        """The rule's."""
        return "layered" if self.rule.jacobian == "layered" else "full"

    def check(self, graph: ETraceGraph) -> None:
        """Refuse wrong results of the rule."""
        check_method(self, graph)

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the leaves of the site."""
        return leaves_of(self.rule, full_site(graph, operand_shapes(graph))).specs

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        leaves = leaves_of(self.rule, full_site(graph, weights))

        def advance(records: Records, traces: Traces) -> Traces:
            J, of_parameters = step_jacobians(graph, weights, records)
            site = leaves.site
            F = {name: of_parameters[name][:, site.rows(name)] for name in site.operands}
            return leaves.advanced(leaves.of(traces), J, None, F)

        return over_steps(advance, graph, records, traces)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the rule's gradient for the adjoints of the states before a step or window."""
        gradients = jax.tree.map(jnp.zeros_like, weights)
        leaves = leaves_of(self.rule, full_site(graph, weights))
        arriving = arriving_rows(graph, mu)
        arrays = leaves.of(traces)
        if zeros_select:
            arrays = leaves.without(arrays, (arriving == 0).all(1))
        for name, result in leaves.contracted(arrays, arriving).items():
            gradients[name] = {"value": result}
        return like(weights, gradients)


def method_of(rule: Rule) -> TraceMethod:
    """Return the trace method of a rule."""
    passes_weights = rule.jacobian in ("layered", "full")
    return FullRuleTraces(rule) if passes_weights else RuleTraces(rule)

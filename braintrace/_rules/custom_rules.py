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
import operator
from collections.abc import Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import in_words
from .._core.gradient import add, like, operand_shapes
from .._core.local_step import blocks, values_of
from .._core.sites import at_elements, at_entry, names_of, new_state_to_elements, signals, x_key
from .._core.step_program import scan_records
from .._core.traces import as_arrays, reset_traces, widened
from .._errors import ShapeError
from .._etrace_op.registry import Arrays
from .._graph.graph import ETraceGraph, Role, TraceSpec, TraceSpecs
from .._graph.hidden_group import HiddenGroup
from .._graph.method import Adjoints, Chunk, Jacobian, Signal, TraceMethod, Traces, Weights
from .._jax import struct_of
from .chunk_vjp import jacobians
from .protocol import Rule, Site
from .rtrl import PassingTraces, arriving_rows, gradients_like, over_steps
from .sites import OperationSite, full_site, sites_of

Where = TypeVar("Where", bound=Site)

Recorded: TypeAlias = tuple[Mapping[str, Any], Arrays, jax.Array | None]
"""Inputs and values of a step, and flags of the samples that were reset before it."""


def method_of(rule: Rule) -> TraceMethod:
    """Return the trace method of a rule."""
    passes_weights = rule.jacobian in ("layered", "full")
    return FullRuleTraces(rule) if passes_weights else RuleTraces(rule)


# --- the trace at one site


@dataclasses.dataclass(frozen=True)
class SiteTrace(Generic[Where]):
    """The trace of one rule at one site, as arrays by name.

    Attributes
    ----------
    rule, site
        The rule, and its site.
    tree
        Structure of the trace that the rule reads and returns.
    specs
        Specifications of its leaves by name, in their order.
    """

    rule: Rule
    site: Where
    tree: Any
    specs: Mapping[str, TraceSpec]

    def read(self, traces: Traces) -> Arrays:
        """Return the arrays of this site among traces, in the dtypes of the rule."""
        own = as_arrays({key: traces[key] for key in self.specs})
        return {key: leaf.astype(self.specs[key].dtype) for key, leaf in own.items()}

    def reset(self, arrays: Arrays, flags: jax.Array) -> Arrays:
        """Return arrays with the initial values of some samples, also if they are NaN.

        An array that all samples share has its initial value if all flags are set.
        """
        result: Arrays = {}
        for key, spec in self.specs.items():
            is_shared = spec.samples is None and "batch" not in spec.axes
            own = flags.all() if is_shared else flags
            result.update(reset_traces({key: spec}, {key: arrays[key]}, own))
        return result

    def advance(self, arrays: Arrays, J: Any, x: Any, F: Any) -> Arrays:
        like = jax.tree.unflatten(self.tree, self.specs.values())
        return dict(zip(self.specs, self._call("advance", arrays, (J, x, F), like), strict=True))

    def contract(self, arrays: Arrays, mu: Any) -> dict[str, jax.Array]:
        operands = dict(self.site.operands)
        found = self._call("contract", arrays, (mu,), operands)
        return dict(zip(sorted(operands), found, strict=True))

    def _call(
        self, method: str, arrays: Arrays, arguments: tuple[Any, ...], like: Any
    ) -> list[jax.Array]:
        """Return the leaves of a rule's result, in the dtypes of ``like``.

        Raises
        ------
        ShapeError
            If the result has another structure or a leaf of another shape.
        """
        called, name = f"`{type(self.rule).__name__}.{method}`", self.site.name
        trace = jax.tree.unflatten(self.tree, [arrays[key] for key in self.specs])
        with in_words(lambda: f"{called} was called for {name}"):
            found = getattr(self.rule, method)(self.site, trace, *arguments)
        shapes = [jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), tree) for tree in (found, like)]
        if shapes[0] != shapes[1]:
            raise ShapeError(f"{called} returned {shapes[0]} for {name}; expected {shapes[1]}.")
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True)
        return [jnp.asarray(leaf, own.dtype) for leaf, own in pairs]


def trace_at(rule: Rule, site: Where) -> SiteTrace[Where]:
    """Return the initial trace of a rule at a site.

    Raises
    ------
    ShapeError
        For a leaf whose first axis is not the samples.
    """
    of_shapes = dataclasses.replace(site, operands=jax.tree.map(struct_of, dict(site.operands)))
    name = type(rule).__name__
    with (
        in_words(lambda: f"`{name}.init` was called for {site.name}"),
        jax.ensure_compile_time_eval(),
    ):
        paths, tree = jax.tree_util.tree_flatten_with_path(rule.init(of_shapes))
        leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
        specs = {site.key + leaf: _spec_of(rule, site, leaf, value) for leaf, value in leaves}
    return SiteTrace(rule, site, tree, specs)


def _spec_of(rule: Rule, site: Site, name: str, leaf: Any) -> TraceSpec:
    if isinstance(leaf, TraceSpec):
        relation = leaf.relation or site.relation
        return dataclasses.replace(leaf, relation=relation, operand=leaf.operand or name)
    array = np.asarray(jnp.asarray(leaf))
    first = array.shape[:1]
    if site.samples and first and first != site.samples:
        raise ShapeError(
            f"`{type(rule).__name__}.init` returned shape {array.shape} at '{name}' for "
            f"{site.name}; expected {site.samples[0]} samples along the first axis. Return a "
            "`TraceSpec` if the axes run over something else."
        )
    lead: list[Role] = ["batch"] if site.samples and first else []
    entries: list[Role] = ["entry"] * (array.ndim - len(lead))
    initial = jnp.asarray(array) if array.any() else 0
    axes = (*lead, *entries)
    return TraceSpec(array.shape, array.dtype, axes, site.relation, operand=name, initial=initial)


# --- a trace for each operation and group

Parts: TypeAlias = list[SiteTrace[OperationSite]]
"""The traces of all sites."""


@dataclasses.dataclass(frozen=True)
class RuleTraces(TraceMethod):
    """`TraceMethod` of a rule whose Jacobian is none or elementwise."""

    rule: Rule
    needs = frozenset({"x", "values", "states"})
    jacobian = "elementwise"

    @property
    def filters_readouts(self) -> bool:
        """Whether leaky readouts get filters."""
        return self.rule.jacobian == "elementwise"

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the leaves of all sites."""
        parts = self._traces_at(graph, operand_shapes(graph))
        return {key: spec for part in parts for key, spec in part.specs.items()}

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it."""
        graph, weights, records = chunk
        parts, selects = self._traces_at(graph, weights), records.has_mask
        mu: Adjoints = {group.index: signals(group, signal) for group in graph.traced_groups}
        if after is not None:
            now = jax.tree.map(lambda leaf: leaf[0], mu)
            arrays = _read(parts, after)
            return like(weights, _contracted(graph, parts, arrays, now, selects)), after

        def step(carry: tuple[Arrays, Weights], now: Any) -> tuple[tuple[Arrays, Weights], None]:
            (arrays, gradients), (recorded, mu_now) = carry, now
            arrays = _advanced(graph, parts, arrays, recorded)
            if signal:
                result = _contracted(graph, parts, arrays, mu_now, selects)
                gradients = jax.tree.map(jnp.add, gradients, result)
            return (arrays, gradients), None

        # Sums in half precision would stop growing.
        zeros = widened(jax.tree.map(jnp.zeros_like, weights), jnp.float32)
        now = (records.x, records.values, records.reset), mu
        start = _read(parts, before), zeros
        (arrays, gradients), _ = scan_records(step, start, now, records.steps)
        return like(weights, gradients), like(before, arrays)

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the rule's gradient for the adjoints of the states before a window."""
        graph, weights, records = chunk
        parts = self._traces_at(graph, weights)
        arrays, entering = _read(parts, traces), at_entry(graph, mu)
        return like(weights, _contracted(graph, parts, arrays, entering, records.zeros_select))

    def _traces_at(self, graph: ETraceGraph, weights: Weights) -> Parts:
        return [trace_at(self.rule, site) for site in sites_of(graph, weights)]


def _read(parts: Parts, traces: Traces) -> Arrays:
    return {key: leaf for part in parts for key, leaf in part.read(traces).items()}


def _advanced(graph: ETraceGraph, parts: Parts, arrays: Arrays, recorded: Recorded) -> Arrays:
    """Return the arrays of all sites after one step."""
    (x, values, reset), new = recorded, Arrays()
    local = values_of(graph, values)
    of_groups = {g.index: blocks(graph, g, local) for g in graph.traced_groups}
    states = {g.index: _new_states(graph, g, values) for g in graph.traced_groups}
    for part in parts:
        place, index = part.site.place, part.site.indices
        own, (D, Df) = {key: arrays[key] for key in part.specs}, of_groups[place.group.index]
        if reset is not None:
            own = dict(reset_traces(part.specs, own, reset))
            is_new = at_elements(graph, place.group, reset)
            D = {pair: jnp.where(is_new, 0, block) for pair, block in D.items()}
        J = {
            (to, old): place.to_outputs(D[a, c])
            for to, a in index.items()
            for old, c in index.items()
            if (a, c) in D
        }
        F = {state: Df[place.key(a)] for state, a in index.items() if place.key(a) in Df}
        inputs = None if place.relation.x_var is None else x[x_key(graph, place.relation)]
        of_group = states[place.group.index]
        after = {state: place.to_outputs(of_group[a]) for state, a in index.items()}
        part = dataclasses.replace(part, site=dataclasses.replace(part.site, new_states=after))
        new |= part.advance(own, None if part.rule.jacobian == "none" else J, inputs, F)
    return new


def _new_states(
    graph: ETraceGraph, group: HiddenGroup, values: Mapping[str, jax.Array]
) -> dict[int, jax.Array]:
    """Return the values of a group's states after a step, per unit."""
    names = names_of(graph.traced.program, group.new_vars)
    return {a: new_state_to_elements(group, a, values[name]) for a, name in enumerate(names)}


def _contracted(
    graph: ETraceGraph, parts: Parts, arrays: Arrays, mu: Adjoints, selects: bool
) -> Weights:
    """Return the gradients of all operands from the learning signals of one step.

    With ``selects``, the traces of samples without a signal are set to zero: they may be NaN.
    """
    gradients: Weights = {}
    for part in parts:
        place, own = part.site.place, {key: arrays[key] for key in part.specs}
        group, signal = place.group, mu[place.group.index]
        if selects:
            axis = graph.batch_axis(group)
            over = tuple(i for i in range(len(group.shape)) if i != axis)
            has_signal = [(value != 0).any(over) for value in signal.values()]
            own = part.reset(own, ~functools.reduce(operator.or_, has_signal, jnp.zeros((), bool)))
        at_outputs = {
            state: place.to_outputs(
                signal[a] if a in signal else jnp.zeros(group.shape, group.states[a].dtype)
            )
            for state, a in part.site.indices.items()
        }
        gradients = add(gradients, {place.relation.key: part.contract(own, at_outputs)})
    return gradients


# --- a trace for all hidden states


@dataclasses.dataclass(frozen=True)
class FullRuleTraces(PassingTraces):
    """`TraceMethod` of a rule whose Jacobian is full, or block-diagonal by layer."""

    rule: Rule
    needs = frozenset({"step", "traces"})

    @property
    def jacobian(self) -> Jacobian:
        """The rule's."""
        return "layered" if self.rule.jacobian == "layered" else "full"

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the leaves of the site."""
        return trace_at(self.rule, full_site(graph, operand_shapes(graph))).specs

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        part = trace_at(self.rule, full_site(chunk.graph, chunk.weights))

        def advance(one: Chunk, traces: Traces) -> Traces:
            J, of_parameters = jacobians(one)
            F = {name: of_parameters[name][:, part.site.rows(name)] for name in part.site.operands}
            return part.advance(part.read(traces), J, None, F)

        return over_steps(advance, chunk, traces)

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the rule's gradient for the adjoints of the states before a step or window."""
        graph, weights, records = chunk
        part = trace_at(self.rule, full_site(graph, weights))
        arrays, arriving = part.read(traces), arriving_rows(graph, mu)
        if records.zeros_select:
            arrays = part.reset(arrays, (arriving == 0).all(1))
        return gradients_like(weights, part.contract(arrays, arriving))

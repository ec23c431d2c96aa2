r"""Filters of inputs and of sensitivities as traces (ES-D-RTRL, pp-prop; OTTT).

.. math::

    \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[u, a] = \alpha \sum_c D^t[p(u), a, c]\, \epsilon_f^{t-1}[u, c]
                         + (1 - \alpha)\, D_f^t[u, a],

.. math::

    \nabla w = \sum_t f^t \otimes \epsilon_x^t, \qquad
    f^t[u] = \sum_a \frac{l^t[p(u), a]}{1 - \alpha^t}\, \epsilon_f^t[u, a],

with ``t`` counted in steps since a reset. OTTT filters inputs only: :math:`\epsilon_f^t = D_f^t`,
and the signal is not divided.

A chunk scans both filters, and its gradient is one product over time and batch. Operations with the
same input share its filter; the first of them names it. An operation that is not linear in its
input is refused, except an embedding: the filter of its one-hot input contains discounted counts of
the lookups of each row.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.gradient import InputsByRelation, as_chunk, like, sum_products, times
from .._core.local_step import blocks, values_of
from .._core.sites import (
    TraceSite,
    at_elements,
    at_entry,
    filter_key,
    over_first_axis,
    row_name,
    signals,
    trace_sites,
    where_flagged,
    x_key,
)
from .._core.step_program import scan_records
from .._core.traces import as_arrays, widened
from .._errors import OptionError, PrimitiveError
from .._etrace_op.registry import ETP_RULES_INIT_PP, Arrays, get_primitive_spec
from .._etrace_op.rules import is_linear_in_input, linear_input, pull_back
from .._graph.graph import ETraceGraph, Role, TraceSpec, TraceSpecs
from .._graph.hidden_group import HiddenGroup, HiddenParamOpRelation
from .._graph.method import Adjoints, Chunk, Records, Signal, TraceMethod, Traces, Weights
from .._jax import struct_of
from .._jaxpr.vjp import Kind, kinds_of


@dataclasses.dataclass(frozen=True)
class FilterTraces(TraceMethod):
    """Trace method with filters of each operation's input and of the sensitivity to its output.

    Attributes
    ----------
    decay
        The decay ``α`` of both.
    filters_outputs
        Whether sensitivities are filtered (ES-D-RTRL); else they are the ones of the last step
        (OTTT).
    """

    decay: float
    filters_outputs: bool = True
    jacobian = "elementwise"
    needs = frozenset({"x", "values"})

    @property
    def filters_readouts(self) -> bool:
        """Whether leaky readouts get filters."""
        return self.filters_outputs

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` for an operation whose input cannot be filtered."""
        check_filtered_inputs(graph, "ES_D_RTRL" if self.filters_outputs else "OTTT")

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the two filters, shared between operations if possible, and the step count."""

        def stored_states(site: TraceSite) -> Iterable[int]:
            if self.filters_outputs:
                return site.influence.reached if every_state else site.influence.stored
            reached = site.influence.states  # within the step: other derivatives are zero
            return [a for a in reached if every_state or a in site.group.read_late]

        filters = {
            self._inputs: {key: spec_of_input(graph, key) for key in inputs_of(graph)},
            "f": {
                site.key(a): spec_of_output(graph, site, a)
                for site in _row_sites(graph).values()
                for a in stored_states(site)
            },
        }
        if not self.filters_outputs:
            return filters
        counts = _samples(graph)
        of_samples: tuple[Role, ...] = ("batch",) if counts else ()
        steps = TraceSpec(counts, jnp.dtype("int32"), of_samples, takes_trace_dtype=False)
        return {**filters, self._steps: steps}

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it.

        It depends only on the traces before the chunk: those after it omit states that no later
        step reads.
        """
        factors, filters, after = self._run(chunk.graph, chunk.records, signal, before)
        return self._gradient(chunk, filters, factors, chunk.records.has_mask), after

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        dtype = jnp.result_type(*mu.values())
        wide = {
            key: widened(value, dtype)
            for key, value in as_arrays(traces).items()
            if key != self._steps
        }
        traces = {**as_arrays(traces), **wide}
        graph, selects = chunk.graph, chunk.records.zeros_select
        factors = self._factors(graph, at_entry(graph, mu), traces, selects)
        filters, factors = as_chunk((traces[self._inputs], factors))
        return self._gradient(chunk, filters, factors, selects)

    def _gradient(self, chunk: Chunk, filters: Arrays, factors: Arrays, selects: bool) -> Weights:
        """Return ``Σ f ⊗ ε_x`` over time and batch."""
        inputs = by_relation(chunk.graph, filters)
        result = sum_products(chunk, factors, selects, inputs)
        return like(chunk.weights, {**jax.tree.map(jnp.zeros_like, chunk.weights), **result})

    # Names include the decay, so that filters of another decay are not restored.

    @property
    def _inputs(self) -> str:
        return "x" if self.filters_outputs else f"x, decay={self.decay}"

    @property
    def _steps(self) -> str:
        return f"steps, decay={self.decay}"

    def _run(
        self, graph: ETraceGraph, records: Records, signal: Signal, before: Traces
    ) -> tuple[Arrays, Arrays, Traces]:
        """Return the factors ``f`` and filters of inputs of every step, and the traces after."""
        mu: Adjoints = {group.index: signals(group, signal) for group in graph.traced_groups}
        x = {key: records.x[x_key(graph, relation)] for key, relation in inputs_of(graph).items()}
        start = as_arrays(dict(before))
        start[self._inputs] = wide_filters(graph, start[self._inputs])
        if self.filters_outputs:
            _check_counts(records, start[self._steps])

        def step(traces: Traces, now: Any) -> tuple[Traces, tuple[Arrays, Arrays]]:
            x, values, signal, reset = now
            traces = self._advanced(graph, traces, x, values, reset)
            factors = self._factors(graph, signal, traces, records.has_mask)
            stored = {key: traces["f"][key].astype(old.dtype) for key, old in before["f"].items()}
            return {**traces, "f": stored}, (factors, traces[self._inputs])

        now = x, records.values, mu, records.reset
        after, (factors, filters) = scan_records(step, start, now, records.steps)
        return factors, filters, like(before, after)

    def _advanced(
        self, graph: ETraceGraph, traces: Traces, x: Arrays, values: Arrays, reset: jax.Array | None
    ) -> dict[str, Any]:
        """Return the traces after one more step, with the sensitivities of all states."""
        alpha, before, after = self.decay if self.filters_outputs else 0.0, traces["f"], Arrays()
        local = values_of(graph, values)
        for group in graph.traced_groups:
            D, Df = blocks(graph, group, local)
            for site in _row_sites(graph, group).values():
                dtype = site.relation.y_var.aval.dtype
                for a in site.influence.reached:
                    past = [
                        alpha * site.to_outputs(D[a, c]) * widened(before[site.key(c)], dtype)
                        for c in range(len(group.states))
                        if alpha and (a, c) in D and site.key(c) in before
                    ]
                    if past and reset is not None:  # selected: the filter may be NaN
                        is_new = site.to_outputs(at_elements(graph, group, reset))
                        past = [jnp.where(is_new, 0, term) for term in past]
                    own = [(1 - alpha) * Df[site.key(a)]] if site.key(a) in Df else []
                    zero = jnp.zeros(site.influence.output_shape, dtype)
                    after[site.key(a)] = sum([*past, *own], zero)
        inputs = filter_inputs(graph, self.decay, traces[self._inputs], x, reset)
        if not self.filters_outputs:
            return {self._inputs: inputs, "f": after}
        count = traces[self._steps]
        count = 1 + (count if reset is None else jnp.where(reset, 0, count))
        return {self._inputs: inputs, "f": after, self._steps: count}

    def _factors(
        self, graph: ETraceGraph, signal: Adjoints, traces: Traces, selects: bool
    ) -> Arrays:
        """Return ``Σ_a l[a] ε_f[a] / (1 - α^t)`` of one step, by the names of rows.

        After ``t`` steps, the filter of a constant has reached the fraction ``1 - α^t`` of it. The
        quotient has at least single precision, since it may overflow in half precision.
        """
        result, eps, seen = Arrays(), traces["f"], None
        if self.filters_outputs:
            log_alpha = math.log(self.decay) if self.decay else -math.inf
            seen = -jnp.expm1(log_alpha * jnp.maximum(traces[self._steps], 1))
        for group in graph.traced_groups:
            mu = dict(signal[group.index])
            if seen is not None:
                mu = {
                    a: value / at_elements(graph, group, seen.astype(value.dtype))
                    for a, value in widened(mu, jnp.float32).items()
                }
            for name, site in _row_sites(graph, group).items():
                terms = [
                    times(site.to_outputs(value), eps[site.key(a)], selects)
                    for a, value in mu.items()
                    if a in site.influence.reached and site.key(a) in eps
                ]
                if terms:
                    result[name] = sum(terms[1:], terms[0]).astype(site.relation.y_var.aval.dtype)
        return result


def _row_sites(graph: ETraceGraph, group: HiddenGroup | None = None) -> dict[str, TraceSite]:
    """Return the first of the sites that share their sensitivities, by the name of their row."""
    sites: dict[str, TraceSite] = {}
    for site in trace_sites(graph, group):
        sites.setdefault(row_name(graph, site), site)
    return sites


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the step count: one per sample, or one for all.

    There is one for all if a hidden state is shared by all samples.
    """
    samples = graph.batch.samples
    states = [state for group in graph.traced_groups for state in group.states]
    is_apart = all(graph.batch.axis(state) is not None for state in states)
    return () if samples is None or not is_apart else (samples,)


def _check_counts(records: Records, counts: jax.Array) -> None:
    """Refuse resets of single samples if all samples share the step count."""
    if records.reset is not None and records.reset.ndim > 1 + counts.ndim:
        raise OptionError(
            "All samples share a hidden state, and this algorithm counts steps since a reset, so "
            "it cannot reset single samples. Give one flag per step, or use `D_RTRL`."
        )


# --- filters of inputs, and their specifications


def inputs_of(graph: ETraceGraph) -> dict[str, HiddenParamOpRelation]:
    """Return the first of the operations that share the filter of an input, by its name."""
    relations = graph.hidden_param_op_relations
    return {r.key: r for r in relations if r.x_var is not None and filter_key(graph, r) == r.key}


def by_relation(graph: ETraceGraph, filters: Arrays) -> InputsByRelation:
    """Return the filter of each relation; ``None`` for a relation without an input."""
    relations = graph.hidden_param_op_relations
    return {r.key: None if r.x_var is None else filters[filter_key(graph, r)] for r in relations}


def filter_inputs(
    graph: ETraceGraph, alpha: float, before: Arrays, x: Arrays, reset: jax.Array | None
) -> Arrays:
    """Return ``α ε + x``, the filters of inputs after one more step."""
    relations, after = inputs_of(graph), Arrays()
    for key, eps in before.items():
        if reset is not None:  # selected: the filter may be NaN
            eps = where_flagged(~rows_of_samples(graph, key, reset), eps)
        past = (alpha * eps).astype(eps.dtype)
        now = linear_input(relations[key].primitive, relations[key].params, x[key])
        after[key] = (past + now).astype(eps.dtype)
    return after


def wide_filters(graph: ETraceGraph, filters: Arrays) -> Arrays:
    """Return filters in at least the dtype of the operation's output."""
    relations = inputs_of(graph)
    return {key: widened(eps, relations[key].y_var.aval.dtype) for key, eps in filters.items()}


def rows_of_samples(graph: ETraceGraph, key: str, flags: jax.Array) -> jax.Array:
    """Return the rows of a filter of inputs whose sample has a flag; one flag stays one.

    Raises
    ------
    OptionError
        If samples that share the input, or one of the states that it reaches, have flags.
    """
    if flags.ndim == 0:
        return flags
    rows, are_shared = [], set()
    for site in trace_sites(graph):
        if site.relation.x_var is None or filter_key(graph, site.relation) != key:
            continue
        outputs = site.to_outputs(at_elements(graph, site.group, flags))
        outputs = outputs.any(0) if site.has_fan_out else outputs
        rows.append(outputs.any(tuple(range(1, outputs.ndim))))
        are_shared.add(all(graph.batch.axis(state) is None for state in site.group.states))
        is_batched = get_primitive_spec(site.relation.primitive).batched
        if not is_batched or len(are_shared) > 1:
            raise OptionError(
                f"All samples share the input of '{key}', or a hidden state that it reaches, so "
                "this algorithm cannot reset single samples. Give `reset` one value per step, or "
                "use `D_RTRL`."
            )
    return functools.reduce(jnp.logical_or, rows)


def check_filtered_inputs(graph: ETraceGraph, rule: str) -> None:
    """Check that every operation has a gradient in terms of a filter of its input.

    Raises
    ------
    PrimitiveError
        Naming the rule, and the first operation that is not linear in its input.
    """
    for relation in graph.hidden_param_op_relations:
        is_known = relation.x_var is None or is_linear_in_input(relation.primitive)
        if is_known or _is_linear(relation):
            continue
        raise PrimitiveError(
            f"{rule} filters the input of '{relation.key}' ({relation.source}), but `xy_to_dw` of "
            f"`{relation.primitive}` is not linear in that input. Use `D_RTRL`, or compute "
            "the nonlinear function before the operation."
        )


def _is_linear(relation: HiddenParamOpRelation) -> bool:
    operation = relation.primitive, relation.params
    weights = {name: struct_of(var.aval) for name, var in relation.trainable_vars.items()}

    def pulled_back(x: jax.Array, factor: jax.Array, weights: Arrays) -> Arrays:
        return pull_back(*operation, x[None], factor[None], weights)

    y = struct_of(relation.y_var.aval)
    try:
        return Kind.OTHER not in kinds_of(pulled_back, _filter_shape(relation), y, weights)
    except Exception:  # a rule for integers, such as indices, may fail for other dtypes
        return False


def _filter_shape(relation: HiddenParamOpRelation) -> jax.ShapeDtypeStruct:
    x, y = (struct_of(atom.aval) for atom in (relation.x_var, relation.y_var) if atom is not None)
    encode = functools.partial(linear_input, relation.primitive, relation.params)
    encoded = jax.eval_shape(encode, x)
    return jax.ShapeDtypeStruct(encoded.shape, jnp.promote_types(encoded.dtype, y.dtype))


def spec_of_input(graph: ETraceGraph, key: str) -> TraceSpec:
    """Return the specification of the filter of an input."""
    relation = inputs_of(graph)[key]
    shape = _filter_shape(relation)

    def samples(flags: jax.Array) -> jax.Array:
        return over_first_axis(rows_of_samples(graph, key, flags), len(shape.shape))

    axes = _operand_axes(relation, len(shape.shape), "input")
    return TraceSpec(shape.shape, shape.dtype, axes, relation=key, operand="input", samples=samples)


def spec_of_output(graph: ETraceGraph, site: TraceSite, state: int) -> TraceSpec:
    """Return the specification of an array in the layout of an output, for one state."""
    relation, shape = site.relation, site.influence.output_shape
    rule, variables = ETP_RULES_INIT_PP[relation.primitive], dict(relation.trainable_vars)
    zero = jax.eval_shape(lambda: rule(relation.x_var, relation.y_var, variables, 1))
    lead: tuple[Role, ...] = ("fan_out",) if site.has_fan_out else ()

    def samples(flags: jax.Array) -> jax.Array:
        return site.to_outputs(at_elements(graph, site.group, flags))

    axes = (*lead, *_operand_axes(relation, len(shape) - len(lead), "output"))
    name = site.group.names[state]
    return TraceSpec(shape, zero.dtype, axes, relation.key, name, "output", samples=samples)


def _operand_axes(relation: HiddenParamOpRelation, ndim: int, last: Role) -> tuple[Role, ...]:
    is_batched = get_primitive_spec(relation.primitive).batched
    batch: list[Role] = ["batch"] if is_batched else []
    spatial: list[Role] = ["spatial"] * (ndim - len(batch) - 1)
    return tuple([*batch, *spatial, last][:ndim])

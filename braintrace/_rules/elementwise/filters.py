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

A chunk scans both filters, and its gradient is one product over time and batch; for embeddings see
`filtered_inputs`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.jacobian.jacobians import blocks
from ..._core.layout import TraceSite, filter_key, trace_sites, x_key
from ..._core.local_step import row_name, values_of
from ..._core.products.direct import add, like
from ..._core.products.nan_safe import PLAIN, SELECTING, Products, products_of_gradient
from ..._core.resets import at_elements, over_first_axis
from ..._core.signals import ByGroup, at_entry, signals
from ..._core.time_loops import scan_records
from ..._core.zero import as_arrays, is_zero, widened
from ..._errors import OptionError
from ..._etrace_op import Arrays, pull_back, pull_back_filtered
from ..._graph import (
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    Jacobian,
    Record,
    Records,
    Role,
    Signal,
    TraceMethod,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .filter_specs import check_filtered_inputs, spec_of_input, spec_of_output
from .filtered_inputs import filter_backward, filter_inputs, inputs_of, looks_up

Inputs = dict[str, jax.Array | None]
"""An array in place of the input of each relation, ``None`` for a relation without an input."""


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
    jacobian: ClassVar[Jacobian] = "elementwise"
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "values"})

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` for an operation whose input cannot be filtered."""
        check_filtered_inputs(graph, "ES_D_RTRL" if self.filters_outputs else "OTTT")

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the two filters, shared between operations if possible, and the step count."""

        def stored_states(site: TraceSite) -> Iterable[int]:
            if self.filters_outputs:
                return site.influence.reached if every_state else site.influence.stored
            reached = site.influence.states  # within the step: other derivatives are zero
            return [a for a in reached if every_state or a in site.group.read_by_output]

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

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        _, _, eps = self._scan(graph, weights, records, traces["f"], {})
        _, of_inputs = filter_inputs(graph, self.decay, records, traces[self._inputs])
        return self._after(of_inputs, eps, self._counts(records, traces))

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it.

        It depends only on the traces before the chunk: those after it omit states that no later
        step reads.
        """
        by_group: ByGroup = {g.index: signals(g, signal) for g in graph.traced_groups}
        counts = self._counts(records, before)
        if counts is not None:
            by_group = jax.vmap(functools.partial(self._corrected, graph))(by_group, counts)
        factors, sums, eps = self._scan(graph, weights, records, before["f"], by_group)
        filters, of_inputs = filter_inputs(graph, self.decay, records, before[self._inputs])
        first, backward = filter_backward(graph, self.decay, records, factors)
        products, result = products_of_gradient(records), Weights()
        counts_before, indices = Inputs(), Inputs()
        for relation in filter(looks_up, _with_input(graph)):
            eps_x = before[self._inputs][filter_key(graph, relation)]
            indices[relation.key] = records.x[x_key(graph, relation)]
            counts_before |= {} if is_zero(eps_x) else {relation.key: eps_x[None]}
        for inputs, own, pull in (
            (_without_input(graph), sums, pull_back),
            (_by_relation(graph, filters), factors, pull_back),
            (indices, backward, pull_back),
            (counts_before, first, pull_back_filtered),
        ):
            result = add(result, _pulled_back(graph, weights, inputs, own, products, pull))
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return like(weights, {**zeros, **result}), self._after(of_inputs, eps, counts)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        traces, products = as_arrays(traces), SELECTING if zeros_select else PLAIN
        dtype = jnp.result_type(*mu.values())
        filters, eps = (widened(traces[key], dtype) for key in (self._inputs, "f"))
        signal = at_entry(graph, mu)
        if self.filters_outputs:
            signal = self._corrected(graph, signal, traces[self._steps])
        factors = {
            name: factor[None]
            for group in graph.traced_groups
            for name, factor in _factors(graph, group, signal[group.index], eps, products).items()
        }
        every = {key: eps_x[None] for key, eps_x in filters.items()}
        inputs = _without_input(graph) | _by_relation(graph, every)
        result = _pulled_back(graph, weights, inputs, factors, products, pull_back_filtered)
        return like(weights, {**jax.tree.map(jnp.zeros_like, weights), **result})

    # Names include the decay, so that filters of another decay are not restored.

    @property
    def _inputs(self) -> str:
        """Name of the filters of inputs."""
        return "x" if self.filters_outputs else f"x, decay={self.decay}"

    @property
    def _steps(self) -> str:
        """Name of the step count."""
        return f"steps, decay={self.decay}"

    def _scan(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        before: Arrays,
        signal: ByGroup,
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Return the factors ``f`` of all steps, sums of them, and the filters after a chunk.

        Operations without an input need only the sums, which differ by element of their fan-out.
        """
        factors, sums, after = Arrays(), Arrays(), Arrays()
        for group in graph.traced_groups:
            of_group = self._scan_group(graph, group, weights, records, before, signal)
            for every, own in zip((factors, sums, after), of_group, strict=True):
                every.update(own)
        return factors, sums, after

    def _scan_group(
        self,
        graph: ETraceGraph,
        group: HiddenGroup,
        weights: Weights,
        records: Records,
        before: Arrays,
        signal: ByGroup,
    ) -> tuple[Arrays, Arrays, Arrays]:
        products, sites = products_of_gradient(records), trace_sites(graph, group)
        keys = {site.key(a) for site in sites for a in site.influence.reached}
        emitted, summed = (
            {row_name(graph, s) for s in sites if _has_input(s) == has} for has in (True, False)
        )

        def step(carry: tuple[Arrays, Arrays], now: Any) -> tuple[tuple[Arrays, Arrays], Arrays]:
            (before, sums), (values, own_signal, reset) = carry, now
            eps = self._advanced(graph, group, weights, values, before, reset)
            after = {key: eps[key].astype(old.dtype) for key, old in before.items()}
            factors = _factors(graph, group, own_signal, eps, products)
            sums = {
                name: total + factors[name] if name in factors else total
                for name, total in sums.items()
            }
            return (after, sums), {name: f for name, f in factors.items() if name in emitted}

        start = as_arrays({key: eps for key, eps in before.items() if key in keys})
        zeros = {
            name: jnp.zeros(
                site.influence.output_shape,
                jnp.promote_types(site.relation.y_var.aval.dtype, jnp.float32),
            )
            for name, site in _row_sites(graph, group).items()
            if name in summed
        }
        now = records.values, signal.get(group.index, {}), records.reset
        (after, sums), factors = scan_records(step, (start, zeros), now, records.steps)
        return factors, jax.tree.map(lambda leaf: leaf[None], sums), after

    def _advanced(
        self,
        graph: ETraceGraph,
        group: HiddenGroup,
        weights: Weights,
        values: Arrays,
        before: Arrays,
        reset: jax.Array | None,
    ) -> Arrays:
        """Return the filters of sensitivities after one more step, of all states of a group."""
        alpha, after = self.decay if self.filters_outputs else 0.0, Arrays()
        D, Df = blocks(graph, group, values_of(graph, values), weights)
        for site in _row_sites(graph, group).values():
            dtype = site.relation.y_var.aval.dtype
            for a in site.influence.reached:
                past = [
                    alpha * site.to_outputs(D[a, c]) * widened(before[site.key(c)], dtype)
                    for c in range(group.num_state)
                    if alpha and (a, c) in D and site.key(c) in before
                ]
                if past and reset is not None:  # selected: the filter may be NaN
                    is_new = site.to_outputs(at_elements(graph, group, reset))
                    past = [jnp.where(is_new, 0, term) for term in past]
                own = [(1 - alpha) * Df[site.key(a)]] if site.key(a) in Df else []
                zero = jnp.zeros(site.influence.output_shape, dtype)
                after[site.key(a)] = sum([*past, *own], zero)
        return after

    def _counts(self, records: Records, traces: Traces) -> jax.Array | None:
        """Return the number of steps since a reset, for the traces of every step, if counted."""
        return _counted(records, as_arrays(traces[self._steps])) if self.filters_outputs else None

    def _after(self, inputs: Arrays, eps: Arrays, counts: jax.Array | None) -> Traces:
        after = {self._inputs: inputs, "f": eps}
        return after if counts is None else {**after, self._steps: counts[-1]}

    def _corrected(self, graph: ETraceGraph, signal: ByGroup, count: jax.Array) -> ByGroup:
        """Return ``l / (1 - α^t)`` of one step.

        After ``t`` steps, the filter of a constant has reached the fraction ``1 - α^t`` of it. The
        result has at least single precision, since it may overflow in half precision.
        """
        log_alpha = math.log(self.decay) if self.decay else -math.inf
        seen = -jnp.expm1(log_alpha * jnp.maximum(count, 1))

        def corrected(group: int, value: jax.Array) -> jax.Array:
            wide = widened(value, jnp.float32)
            return wide / at_elements(graph, groups[group], seen.astype(wide.dtype))

        groups = {group.index: group for group in graph.traced_groups}
        return {
            group: {a: corrected(group, value) for a, value in own.items()}
            for group, own in signal.items()
        }


def _row_sites(graph: ETraceGraph, group: HiddenGroup | None = None) -> dict[str, TraceSite]:
    """Return the first of the sites that share their sensitivities, by the name of their row."""
    sites: dict[str, TraceSite] = {}
    for site in trace_sites(graph, group):
        sites.setdefault(row_name(graph, site), site)
    return sites


def _has_input(site: TraceSite) -> bool:
    return site.relation.x_var is not None


def _with_input(graph: ETraceGraph) -> list[HiddenParamOpRelation]:
    return [r for r in graph.hidden_param_op_relations if r.x_var is not None]


def _by_relation(graph: ETraceGraph, filters: Arrays) -> Inputs:
    keys = {r.key: filter_key(graph, r) for r in _with_input(graph)}
    return {relation: filters[key] for relation, key in keys.items() if key in filters}


def _without_input(graph: ETraceGraph) -> Inputs:
    return {r.key: None for r in graph.hidden_param_op_relations if r.x_var is None}


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the step count: one per sample, or one for all.

    There is one for all if a hidden state is shared by all samples.
    """
    samples = graph.batch.samples
    states = [state for group in graph.traced_groups for state in group.states]
    is_apart = all(graph.batch.axis(state) is not None for state in states)
    return () if samples is None or not is_apart else (samples,)


def _counted(records: Records, before: jax.Array) -> jax.Array:
    """Return the number of steps since a reset, for the traces of every step."""
    steps = over_first_axis(1 + jnp.arange(records.steps, dtype=before.dtype), 1 + before.ndim)
    if records.reset is None:
        return before + steps
    if records.reset.ndim > steps.ndim:
        raise OptionError(
            "All samples share a hidden state, and this algorithm counts steps since a reset, so "
            "it cannot reset single samples. Give one flag per step, or use `D_RTRL`."
        )
    reset = over_first_axis(records.reset, steps.ndim)
    began = jax.lax.cummax(jnp.where(reset, steps, 0), axis=0)
    return jnp.where(began == 0, before + steps, steps - began + 1)


def _factors(
    graph: ETraceGraph,
    group: HiddenGroup,
    signal: Mapping[int, jax.Array],
    eps: Arrays,
    products: Products,
) -> Arrays:
    """Return ``Σ_a l[a] ε_f[a]`` of one step, by the names of rows."""
    result: Arrays = {}
    for name, site in _row_sites(graph, group).items():
        terms = [
            products.times(site.to_outputs(value), eps[site.key(a)])
            for a, value in signal.items()
            if a in site.influence.reached and site.key(a) in eps
        ]
        if terms:
            result[name] = sum(terms[1:], terms[0]).astype(site.relation.y_var.aval.dtype)
    return result


def _pulled_back(
    graph: ETraceGraph,
    weights: Weights,
    inputs: Inputs,
    factors: Arrays,
    products: Products,
    pull: Callable[..., Arrays] = pull_back,
) -> Weights:
    """Return ``Σ f ⊗ x`` over time and batch, for the relations in ``inputs``."""
    gradients: Weights = {}
    for site in trace_sites(graph):
        name, key = row_name(graph, site), site.relation.key
        if name not in factors or key not in inputs:
            continue
        factor = factors[name]
        if site.has_fan_out:  # without an input, one sum over all steps and samples
            factor = factor.sum(1) if _has_input(site) else factor.sum((0, 1))[None]
        x = products.inputs(site, inputs[key], factor)
        gradients = add(gradients, {key: pull(*site.operation, x, factor, weights[key])})
    return gradients

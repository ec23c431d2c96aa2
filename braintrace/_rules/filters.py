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
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._core.layout import TraceSite, row_name, trace_sites
from .._core.local_step import values_of
from .._core.products import add, like, sum_products, times
from .._core.records import blocks
from .._core.signals import at_elements, at_entry, over_first_axis, signals
from .._core.time_loops import scan_records
from .._core.traces import as_arrays, widened
from .._errors import OptionError
from .._etrace_op import Arrays, pull_back_filtered
from .._graph import (
    Adjoints,
    ETraceGraph,
    HiddenGroup,
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
from .filtered_inputs import (
    by_relation,
    check_filtered_inputs,
    filter_backward,
    filter_inputs,
    inputs_of,
    spec_of_input,
    spec_of_output,
)


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

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        return self._run(graph, records, {}, traces)[2]

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
        factors, filters, after = self._run(graph, records, signal, before)
        total = functools.partial(sum_products, graph, weights, selects=records.has_mask)
        result = total(by_relation(graph, filters), factors, pull=pull_back_filtered)
        now, past = filter_backward(graph, self.decay, records, before[self._inputs], factors)
        result = add(result, total(*now))
        result = add(result, total(*past, pull=pull_back_filtered))
        return like(weights, {**jax.tree.map(jnp.zeros_like, weights), **result}), after

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        traces = as_arrays(traces)
        dtype = jnp.result_type(*mu.values())
        filters, eps = (widened(traces[key], dtype) for key in (self._inputs, "f"))
        signal, factors = at_entry(graph, mu), Arrays()
        if self.filters_outputs:
            signal = self._corrected(graph, signal, traces[self._steps])
        for group in graph.traced_groups:
            factors |= _factors(graph, group, signal[group.index], eps, zeros_select)
        filters, factors = jax.tree.map(lambda leaf: leaf[None], (filters, factors))
        inputs = by_relation(graph, filters)
        result = sum_products(graph, weights, inputs, factors, zeros_select, pull_back_filtered)
        return like(weights, {**jax.tree.map(jnp.zeros_like, weights), **result})

    # Names include the decay, so that filters of another decay are not restored.

    @property
    def _inputs(self) -> str:
        return "x" if self.filters_outputs else f"x, decay={self.decay}"

    @property
    def _steps(self) -> str:
        return f"steps, decay={self.decay}"

    def _run(
        self,
        graph: ETraceGraph,
        records: Records,
        signal: Signal,
        before: Traces,
    ) -> tuple[Arrays, Arrays, Traces]:
        """Return the factors ``f`` and filters of inputs of every step, and the traces after."""
        mu: Adjoints = {group.index: signals(group, signal) for group in graph.traced_groups}
        filters, of_inputs = filter_inputs(graph, self.decay, records, before[self._inputs])
        factors, after = Arrays(), {self._inputs: of_inputs, "f": Arrays()}
        if self.filters_outputs:
            counts = _counted(records, as_arrays(before[self._steps]))
            mu = jax.vmap(functools.partial(self._corrected, graph))(mu, counts)
            after[self._steps] = counts[-1]
        for group in graph.traced_groups:

            def step(before: Arrays, now: Any, group: HiddenGroup = group) -> tuple[Arrays, Arrays]:
                values, signal, reset = now
                eps = self._advanced(graph, group, values, before, reset)
                own = _factors(graph, group, signal, eps, records.has_mask)
                return {key: eps[key].astype(old.dtype) for key, old in before.items()}, own

            sites = _row_sites(graph, group).values()
            keys = {site.key(a) for site in sites for a in site.influence.reached}
            start = as_arrays({key: eps for key, eps in before["f"].items() if key in keys})
            now = records.values, mu[group.index], records.reset
            last, own = scan_records(step, start, now, records.steps)
            after["f"] |= last
            factors |= own
        return factors, filters, after

    def _advanced(
        self,
        graph: ETraceGraph,
        group: HiddenGroup,
        values: Arrays,
        before: Arrays,
        reset: jax.Array | None,
    ) -> Arrays:
        """Return the filters of sensitivities after one more step, of all states of a group."""
        alpha, after = self.decay if self.filters_outputs else 0.0, Arrays()
        D, Df = blocks(graph, group, values_of(graph, values))
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

    def _corrected(
        self, graph: ETraceGraph, signal: Adjoints, count: jax.Array
    ) -> dict[int, dict[int, jax.Array]]:
        """Return ``l / (1 - α^t)`` of one step.

        After ``t`` steps, the filter of a constant has reached the fraction ``1 - α^t`` of it. The
        result has at least single precision, since it may overflow in half precision.
        """
        log_alpha, result = math.log(self.decay) if self.decay else -math.inf, {}
        seen = -jnp.expm1(log_alpha * jnp.maximum(count, 1))
        for group in graph.traced_groups:
            wide = widened(dict(signal[group.index]), jnp.float32)
            result[group.index] = {
                a: value / at_elements(graph, group, seen.astype(value.dtype))
                for a, value in wide.items()
            }
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
    selects: bool,
) -> Arrays:
    """Return ``Σ_a l[a] ε_f[a]`` of one step, by the names of rows."""
    result: Arrays = {}
    for name, site in _row_sites(graph, group).items():
        terms = [
            times(site.to_outputs(value), eps[site.key(a)], selects)
            for a, value in signal.items()
            if a in site.influence.reached and site.key(a) in eps
        ]
        if terms:
            result[name] = sum(terms[1:], terms[0]).astype(site.relation.y_var.aval.dtype)
    return result

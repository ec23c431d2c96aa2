r"""Filters of inputs and of sensitivities as traces (ES-D-RTRL, pp-prop; OTTT).

.. math::

    \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[u, a] = \alpha \sum_c D^t[p(u), a, c]\, \epsilon_f^{t-1}[u, c]
                         + (1 - \alpha)\, D_f^t[u, a],

.. math::

    \nabla w = \sum_t ( \sum_a \hat l^t[p(u), a]\, \epsilon_f^t[u, a] ) \otimes
    \epsilon_x^t, \qquad \hat l^t = l^t / (1 - \alpha^t),

with ``t`` counted in steps since a reset. OTTT filters inputs only: :math:`\epsilon_f^t = D_f^t`
and :math:`\hat l^t = l^t`. A chunk scans the two small traces, and its gradient is a product over
time and batch.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._core.layout import TraceSite
from ..._core.products.direct import add, like
from ..._core.products.nan_safe import PLAIN, SELECTING, products_of_gradient
from ..._core.resets import at_elements
from ..._core.signals import ByGroup, at_entry, signals
from ..._core.zero import as_arrays, widened
from ..._etrace_op import Arrays
from ..._graph import (
    ETraceGraph,
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
from .filtered_factors import advanced_filters, split_filters
from .filtered_factors import gradients as filtered_factors
from .filtered_products import contract, contract_once, factors
from .filters import (
    Filters,
    counts_of,
    of_active,
    outputs_of,
    run_filters,
    specs_of_outputs,
    whole,
)
from .input_filters import check_filtered_inputs, specs_of_inputs


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

    @property
    def needs(self) -> frozenset[Record]:
        """Residuals of every step: ``D`` only for a filter of sensitivities."""
        transition: frozenset[Record] = frozenset({"D"} if self.filters_outputs else ())
        return transition | {"x", "Df"}

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
            self._inputs: specs_of_inputs(graph),
            "f": specs_of_outputs(graph, stored_states),
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
        stepwise, once = split_filters(graph, records, traces[self._inputs])
        start = self._filters(graph, stepwise, traces)
        after, _ = run_filters(graph, self._decays, lambda *_: None, start, records)
        after["x"] |= advanced_filters(graph, self.decay, records, once)
        return self._traces(graph, after, self._counts(records, traces))

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
        by_group = {group.index: signals(group, signal) for group in graph.traced_groups}
        counts = self._counts(records, before)
        if counts is not None:
            by_group = jax.vmap(functools.partial(_corrected, self.decay, graph))(by_group, counts)
        products = products_of_gradient(records)
        stepwise, once = split_filters(graph, records, before[self._inputs])

        def of_step(eps_x: Arrays, eps_f: Arrays, now: Arrays) -> tuple[Arrays, Arrays]:
            return eps_x, factors(graph, now, eps_f, products)

        start, signal_now = self._filters(graph, stepwise, before), _at_outputs(graph, by_group)
        last, (eps_x, filtered) = run_filters(
            graph, self._decays, of_step, start, records, signal_now
        )
        gradients = contract(graph, weights, eps_x, filtered, products)
        of_once = filtered_factors(graph, self.decay, weights, records, once, filtered, products)
        last["x"] |= advanced_filters(graph, self.decay, records, once)
        return like(weights, add(gradients, of_once)), self._traces(graph, last, counts)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        traces, products = as_arrays(traces), SELECTING if zeros_select else PLAIN
        dtype = jnp.result_type(*mu.values())
        eps_x, eps_f = (widened(traces[key], dtype) for key in (self._inputs, "f"))
        by_group = at_entry(graph, mu)
        if self.filters_outputs:
            by_group = _corrected(self.decay, graph, by_group, traces[self._steps])
        signal = _at_outputs(graph, by_group)
        return contract_once(graph, weights, eps_x, signal, whole(graph, eps_f), products)

    # Names include the decay, so that filters of another decay are not restored.

    @property
    def _inputs(self) -> str:
        """Name of the filters of inputs."""
        return "x" if self.filters_outputs else f"x, decay={self.decay}"

    @property
    def _steps(self) -> str:
        """Name of the step count."""
        return f"steps, decay={self.decay}"

    @property
    def _decays(self) -> tuple[float, float]:
        """The decays of the filters of inputs and of sensitivities."""
        return self.decay, self.decay if self.filters_outputs else 0.0

    def _filters(self, graph: ETraceGraph, inputs: Arrays, traces: Traces) -> Filters:
        """Return the filters of traces in the form that runs over a chunk."""
        return {"x": as_arrays(inputs), "f": whole(graph, as_arrays(traces["f"]))}

    def _counts(self, records: Records, traces: Traces) -> jax.Array | None:
        """Return the number of steps since a reset, for the traces of every step, if counted."""
        if not self.filters_outputs:
            return None
        return counts_of(records, as_arrays(traces[self._steps]))

    def _traces(self, graph: ETraceGraph, filters: Filters, counts: jax.Array | None) -> Traces:
        """Return the traces of filters in the form in which they are stored between chunks."""
        result = {self._inputs: filters["x"], "f": of_active(graph, filters["f"])}
        return result if counts is None else {**result, self._steps: counts[-1]}


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the step count: one per sample, or one for all.

    There is one for all if a hidden state is shared by all samples.
    """
    samples = graph.batch.samples
    states = [state for group in graph.traced_groups for state in group.states]
    is_apart = all(graph.batch.axis(state) is not None for state in states)
    return () if samples is None or not is_apart else (samples,)


def _corrected(
    alpha: float, graph: ETraceGraph, signal: ByGroup, steps: jax.Array
) -> dict[int, dict[int, jax.Array]]:
    """Return ``l / (1 - α^t)`` of one step, by group and state.

    After ``t`` steps, the filter of a constant has reached the fraction ``1 - α^t`` of it. The
    result has at least single precision, since it may overflow in half precision.
    """
    log_alpha = math.log(alpha) if alpha else -math.inf
    seen = -jnp.expm1(log_alpha * jnp.maximum(steps, 1))
    groups = {group.index: group for group in graph.traced_groups}

    def corrected(value: jax.Array, index: int) -> jax.Array:
        wide = widened(value, jnp.float32)
        return wide / at_elements(graph, groups[index], seen.astype(wide.dtype))

    return {
        index: {a: corrected(value, index) for a, value in own.items()}
        for index, own in signal.items()
    }


def _at_outputs(graph: ETraceGraph, signal: ByGroup) -> Arrays:
    """Return signals in the layout of each operation's output, by trace name."""
    return {
        key: site.to_outputs(signal[site.group.index][a])
        for key, (site, a) in outputs_of(graph).items()
        if a in signal[site.group.index]
    }

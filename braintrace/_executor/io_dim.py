r"""Input/output-dimension traces (ES-D-RTRL, pp-prop).

.. math::

    \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[u, a] = \alpha \sum_c D^t[p(u), a, c]\, \epsilon_f^{t-1}[u, c]
                         + (1 - \alpha)\, D_f^t[u, a],

.. math::

    \nabla w = \sum_t ( \sum_a \hat l^t[p(u), a]\, \epsilon_f^t[u, a] ) \otimes
    \epsilon_x^t, \qquad \hat l^t = l^t / (1 - \alpha^t),

with ``t`` counted in steps since a reset. A chunk scans the two small traces, and its gradient is a
product over time and batch.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._etrace_op import Arrays
from .._graph import (
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
from .direct import add, like
from .filtered_factors import apart, moved_on
from .filtered_factors import gradients as filtered_factors
from .filtered_products import ByGroup, at_entry, contract, contract_once, factors
from .filters import (
    counts_of,
    filters_of,
    outputs_of,
    run_filters,
    specs_of_outputs,
    steps_key,
    traces_of,
    whole,
)
from .input_filters import check_filtered_inputs, specs_of_inputs
from .layout import TraceSite
from .products import PLAIN, SELECTING, products_of_gradient
from .recursion import signals
from .restart import at_positions
from .zero import as_arrays, widened


@dataclasses.dataclass(frozen=True)
class InputOutputTraces(TraceMethod):
    """Trace method with filters of each operation's input and of the sensitivity to its output.

    Attributes
    ----------
    decay
        The decay ``α`` of both.
    """

    decay: float
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "D", "Df"})
    jacobian: ClassVar[Jacobian] = "elementwise"

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` for an operation whose input cannot be filtered."""
        check_filtered_inputs(graph, "ES_D_RTRL")

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the two filters, shared between operations if possible, and the step count."""

        def kept_states(site: TraceSite) -> Iterable[int]:
            return site.influence.reached if every_state else site.influence.stored

        counts = _samples(graph)
        of_samples: tuple[Role, ...] = ("batch",) if counts else ()
        return {
            "x": specs_of_inputs(graph),
            "f": specs_of_outputs(graph, kept_states),
            steps_key(self.decay): TraceSpec(
                counts, jnp.dtype("int32"), of_samples, takes_trace_dtype=False
            ),
        }

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        stepwise, once = apart(graph, records, traces["x"])
        start = filters_of(graph, {**traces, "x": stepwise})
        after, _ = run_filters(graph, self.decay, lambda *_: None, start, records)
        after["x"] |= moved_on(graph, self.decay, records, once)
        counts = counts_of(self.decay, graph, records, traces)
        return traces_of(self.decay, graph, after, counts[-1])

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
        counts = counts_of(self.decay, graph, records, before)
        corrected = jax.vmap(functools.partial(_corrected, self.decay, graph))(by_group, counts)
        products = products_of_gradient(records)
        stepwise, once = apart(graph, records, before["x"])

        def of_step(eps_x: Arrays, eps_f: Arrays, now: Arrays) -> tuple[Arrays, Arrays]:
            return eps_x, factors(graph, now, eps_f, products)

        start = filters_of(graph, {**before, "x": stepwise})
        last, (eps_x, found) = run_filters(graph, self.decay, of_step, start, records, corrected)
        gradients = contract(graph, weights, eps_x, found, products)
        of_once = filtered_factors(graph, self.decay, weights, records, once, found, products)
        last["x"] |= moved_on(graph, self.decay, records, once)
        gradients = like(weights, add(gradients, of_once))
        return gradients, traces_of(self.decay, graph, last, counts[-1])

    def entry_gradient(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        traces, products = as_arrays(traces), SELECTING if zeros_select else PLAIN
        dtype = jnp.result_type(*mu.values())
        eps_x = {key: widened(x, dtype) for key, x in traces["x"].items()}
        eps_f = widened(whole(graph, traces["f"]), dtype)
        by_group = at_entry(graph, mu)
        steps = traces[steps_key(self.decay)]
        corrected = _corrected(self.decay, graph, by_group, steps)
        return contract_once(graph, weights, eps_x, corrected, eps_f, products)


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the step count: one per sample, or one for all.

    There is one for all if a hidden state is shared by all samples.
    """
    samples = graph.batch.samples
    states = [state for group in graph.traced_groups for state in group.states]
    is_apart = all(graph.batch.axis(state) is not None for state in states)
    return () if samples is None or not is_apart else (samples,)


def _corrected(alpha: float, graph: ETraceGraph, signal: ByGroup, steps: jax.Array) -> Arrays:
    """Return ``l / (1 - α^t)`` of one step in the layout of each operation's output, by trace.

    After ``t`` steps, the filter of a constant has reached the fraction ``1 - α^t`` of it.
    ``signal`` has one array per state of each group; the result has at least single precision,
    since it may overflow in half precision.
    """
    log_alpha = math.log(alpha) if alpha else -math.inf
    seen = -jnp.expm1(log_alpha * jnp.maximum(steps, 1))
    in_slots = {}
    for key, (site, a) in outputs_of(graph).items():
        found = signal[site.group.index].get(a)
        if found is not None:
            wide = widened(found, jnp.float32)
            count = at_positions(graph, site.group, seen.astype(wide.dtype))
            in_slots[key] = site.to_slots(wide / count)
    return in_slots

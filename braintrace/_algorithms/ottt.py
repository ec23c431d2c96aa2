r"""OTTT (online training through time): a filter of each input as trace.

.. math::

    \epsilon_x^t = \lambda\, \epsilon_x^{t-1} + x^t, \qquad
    \nabla w = \sum_t ( \sum_a l^t[p(u), a]\, D_f^t[u, a] ) \otimes \epsilon_x^t.

The Jacobian of a state with respect to its old value is replaced by the number :math:`\lambda`, for
all states, elements and steps. If an output reads a state from before the step, and before a
window, the derivative of that state is :math:`D_f^{t-1} \otimes \epsilon_x^{t-1}`. The traces
contain the last :math:`D_f` of these states.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import brainstate
import jax.numpy as jnp

from .._arguments import DECAY, check_option
from .._etrace_op import Arrays
from .._executor.direct import add, like
from .._executor.filtered_factors import apart, moved_on
from .._executor.filtered_factors import gradients as filtered_factors
from .._executor.filtered_products import ByGroup, at_entry, contract, contract_once, factors
from .._executor.filters import of_active, outputs_of, specs_of_outputs, whole
from .._executor.input_filters import check_filtered_inputs, specs_of_inputs, take_in
from .._executor.layout import TraceSite
from .._executor.products import PLAIN, SELECTING, products_of_gradient
from .._executor.recursion import signals
from .._executor.time_loops import scan_records
from .._executor.zero import as_arrays, widened
from .._graph import (
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
from .algorithm import ETraceAlgorithm


@dataclasses.dataclass(frozen=True)
class InputTraces(TraceMethod):
    """Trace method with a filter of the input of each operation.

    Attributes
    ----------
    decay
        The decay ``λ`` of all filters.
    """

    decay: float
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "Df"})
    jacobian: ClassVar[Jacobian] = "elementwise"

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` for an operation whose input cannot be filtered."""
        check_filtered_inputs(graph, "OTTT")

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the filters, and the last ``Df`` of states that are read after their step."""

        def read_later(site: TraceSite) -> Iterable[int]:
            reached = site.influence.states  # within the step: other derivatives are zero
            return [a for a in reached if every_state or a in site.group.read_by_output]

        return {self._key: specs_of_inputs(graph), "f": specs_of_outputs(graph, read_later)}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""

        def step(kept: Arrays, now: Any) -> tuple[Arrays, None]:
            return take_in(graph, self.decay, kept, *now)[1], None

        stepwise, once = apart(graph, records, traces[self._key])
        recorded = records.x, records.restart
        last, _ = scan_records(step, as_arrays(stepwise), recorded, records.num_steps)
        last |= moved_on(graph, self.decay, records, once)
        return self._after(graph, records, traces, last)

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
        products = products_of_gradient(records)
        stepwise, once = apart(graph, records, before[self._key])
        by_group = {group.index: signals(group, signal) for group in graph.traced_groups}
        recorded = records.x, records.restart, _in_slots(graph, by_group), records.Df

        def step(kept: Arrays, now: Any) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            x, restart, signal_now, Df = now
            eps_x, kept = take_in(graph, self.decay, kept, x, restart)
            return kept, (eps_x, factors(graph, signal_now, Df, products))

        start = as_arrays(stepwise)
        last, (eps_x, found) = scan_records(step, start, recorded, records.num_steps)
        gradients = contract(graph, weights, eps_x, found, products)
        of_once = filtered_factors(graph, self.decay, weights, records, once, found, products)
        last |= moved_on(graph, self.decay, records, once)
        return like(weights, add(gradients, of_once)), self._after(graph, records, before, last)

    def entry_gradient(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        traces, products = as_arrays(traces), SELECTING if zeros_select else PLAIN
        dtype = jnp.result_type(*mu.values())
        eps_x, Df = (widened(part, dtype) for part in (traces[self._key], traces["f"]))
        signal = _in_slots(graph, at_entry(graph, mu))
        return contract_once(graph, weights, eps_x, signal, whole(graph, Df), products)

    @property
    def _key(self) -> str:
        """Name of the filters, including their decay: filters of another decay are not restored."""
        return f"x, decay={self.decay}"

    def _after(
        self, graph: ETraceGraph, records: Records, before: Traces, filters: Arrays
    ) -> Traces:
        """Return the traces after a chunk, given the filters after it."""
        last = of_active(graph, {key: records.Df[key][-1] for key in before["f"]})
        Df = {key: last[key].astype(trace.dtype) for key, trace in before["f"].items()}
        return {self._key: filters, "f": Df}


def _in_slots(graph: ETraceGraph, signal: ByGroup) -> Arrays:
    """Return signals in the layout of each operation's output, by trace name."""
    return {
        key: site.to_slots(signal[site.group.index][a])
        for key, (site, a) in outputs_of(graph).items()
        if a in signal[site.group.index]
    }


class OTTT(ETraceAlgorithm):
    r"""Online training through time (OTTT): low-pass filters of the inputs, for spiking networks.

    For an ETP operation with input :math:`x`, with :math:`D_f` and :math:`l` as in `D_RTRL`,

    .. math::

        \epsilon_x^t = \lambda\, \epsilon_x^{t-1} + x^t, \qquad
        \nabla w = \sum_t \left( \sum_a l^t[a]\, D_f^t[a] \right) \otimes \epsilon_x^t.

    There is one filter for each input of an ETP operation, for any number of units and states. This
    is the least memory of all rules with traces. The filter replaces the derivative of a leaky
    membrane with leak ``decay``; the effects of resets, adaptation and synapses on this derivative
    are ignored. Learning signals are backpropagated through the layers of the same step. A bias or
    an elementwise weight has no input to filter: its gradient is the gradient of each step.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    decay
        ``λ`` of the filters, a float in ``[0, 1)``: usually the leak of the membranes. With zero,
        the gradient is the gradient of the single steps, as with `Immediate`.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        If ``decay`` is not a float in ``[0, 1)``.

    Notes
    -----
    The paper derives the rule for LIF neurons, with the leak as decay. Here, :math:`D_f` is the
    derivative of any model's step, so the rule runs on every model; ``decay`` is not compared with
    the leak of the model.

    References
    ----------
    .. [1] M. Xiao, Q. Meng, Z. Zhang, D. He, Z. Lin, "Online training through time for spiking
       neural networks", NeurIPS 2022, arXiv:2210.04195, section 4.1.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> xs = jnp.ones((3, 1, 2))
    >>> learner = braintrace.compile(Leaky(), "ottt", xs[0], batch_size=1, decay=0.5)
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")
    >>> float(gradients[("w",)][0, 0])
    4.25
    """

    names = ("ottt",)
    told = ("decay",)

    def __init__(self, model: brainstate.nn.Module, decay: float, **options: Any) -> None:
        super().__init__(model, **options)
        check_option("decay", decay, DECAY)
        self.decay = float(decay)

    @property
    def method(self) -> InputTraces:
        """The trace method: filters of inputs."""
        return InputTraces(self.decay)

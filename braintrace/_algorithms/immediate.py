r"""The immediate gradient: each step learns from itself alone.

.. math:: \nabla w = \sum_s \frac{\partial L^s}{\partial w} \Big|_{h^{s-1}}
    = \sum_s x^s \otimes (D_f^s \cdot l^s)

Nothing is carried from step to step, so that no operation needs a trace: every weight, marked or
not, gets its ordinary gradient of the step.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._graph import (
    Boundary,
    ETraceGraph,
    HiddenParamOpRelation,
    Record,
    Records,
    Signal,
    Traces,
    TraceSpecs,
    Weights,
)
from .algorithm import ETraceAlgorithm


@dataclasses.dataclass(frozen=True)
class NoTraces:
    """Nothing of a step is recorded, and nothing carried to the next."""

    needs: ClassVar[frozenset[Record]] = frozenset()
    boundary: ClassVar[Boundary] = "closed"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Tell that no operation has traces."""
        return False

    def check(self, graph: ETraceGraph) -> None:
        """Accept every model."""

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return nothing."""
        return {}

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return the learning signals as they are."""
        return signal

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces as they are."""
        return traces

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces]:
        """Return zero: all that there is of the gradient is the ordinary one."""
        return jax.tree.map(jnp.zeros_like, weights), before

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return zero: the states before a window count as constants."""
        zeros: Weights = jax.tree.map(jnp.zeros_like, weights)
        return zeros


class Immediate(ETraceAlgorithm):
    r"""Online learning without a past.

    The gradient is the sum of those of the single steps, with the states before each step held
    constant. It costs no memory, and is what every trace has to beat. It is that of every weight,
    marked or not, and of every model with a hidden state.

    With a ``window`` it is truncated backpropagation through time: every window is differentiated
    in full, with the states before it held constant.

    Parameters
    ----------
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`. There are no traces that ``trace_dtype`` would concern, nor cuts
        for ``strict`` to refuse.

    Raises
    ------
    CompilationError
        When it is compiled, for a ``while`` loop between a parameter and a state or an output.

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
    ...         self.h.value = 0.5 * self.h.value + x @ self.w.value
    ...         return self.h.value
    >>> xs = jnp.ones((4, 1, 2))
    >>> learner = braintrace.compile(Leaky(), "immediate", xs[0], batch_size=1)
    >>> def gradient(**options):
    ...     step_fn = lambda x: learner(x).sum()
    ...     found = learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options)
    ...     return float(found[("w",)][0, 0])
    >>> gradient()
    4.0

    Windows of two steps: each second step adds half of the one before.

    >>> gradient(window=2)
    5.0
    """

    names = ("immediate",)

    @property
    def method(self) -> NoTraces:
        """No traces."""
        return NoTraces()

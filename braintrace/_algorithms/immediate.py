r"""Immediate gradient, and truncated backpropagation through time.

.. math:: \nabla w = \sum_s \partial L^s / \partial w = \sum_s x^s \otimes (D_f^s \cdot l^s)

with the state before each step held constant. The rule has no traces. Every weight, marked or not,
has its ordinary gradient of the step.
"""

from .._rules import NoTraces
from .algorithm import ETraceAlgorithm


class Immediate(ETraceAlgorithm):
    """Gradient of single steps without traces; with a ``window``, truncated BPTT.

    The gradient is the sum of the gradients of the single steps, with the states before each step
    held constant. It needs no memory, and is the baseline for every rule with traces. It covers
    every weight, marked or not, and every model with a hidden state.

    With a ``window`` of ``K`` steps, it is truncated backpropagation through time: each window is
    differentiated in full, with the states before it held constant.

    Parameters
    ----------
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`. ``trace_dtype`` and ``strict`` have no effect: the rule has no traces
        and no truncated paths to report.

    Notes
    -----
    The paper's BPTT(h; h') backpropagates over ``h`` steps every ``h'`` steps, so its ranges may
    overlap. Windows do not overlap: this is BPTT(K; K).

    References
    ----------
    .. [1] R. J. Williams and J. Peng, "An efficient gradient-based algorithm for on-line training
       of recurrent network trajectories", Neural Computation 2, 1990 (the algorithm BPTT(h; h')).

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
    ...     gradients = learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options)
    ...     return float(gradients[("w",)][0, 0])
    >>> gradient()
    4.0

    Windows of two steps: the second step of each window adds half of the first.

    >>> gradient(window=2)
    5.0
    """

    names = ("immediate",)

    @property
    def method(self) -> NoTraces:
        """The trace method without traces."""
        return NoTraces()

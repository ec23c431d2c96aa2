"""Rules whose traces are filters or nothing: ES-D-RTRL (pp-prop), OTTT, Immediate."""

from typing import Any

import brainstate
import numpy as np

from .._errors import OptionError
from .._rules import FilterTraces, NoTraces
from .algorithm import ETraceAlgorithm


def _decay(value: float) -> float:
    if not 0 <= value < 1:
        raise OptionError(
            f"The decay is {value}; expected a float in [0, 1), or a rank, an integer of at least "
            "1, which gives the decay (rank - 1) / (rank + 1)."
        )
    return float(value)


class ES_D_RTRL(ETraceAlgorithm):
    r"""Exponentially smoothed D-RTRL (ES-D-RTRL, pp-prop): traces as large as inputs and outputs.

    For an ETP operation with input :math:`x`,

    .. math::

        \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
        \epsilon_f^t[a] = \alpha \sum_c D^t[a, c]\, \epsilon_f^{t-1}[c] + (1 - \alpha)\, D_f^t[a],

    .. math::

        \nabla w = \sum_t \left( \sum_a \frac{l^t[a]}{1 - \alpha^t}\, \epsilon_f^t[a] \right)
        \otimes \epsilon_x^t,

    with :math:`D`, :math:`D_f` and :math:`l` as in `D_RTRL`. The product of the two filters
    replaces the trace of a weight, so memory grows with the number of neurons, not of weights. The
    factor :math:`1 - \alpha^t`, with :math:`t` the number of steps since a reset, corrects the bias
    of filters that start from zero.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    decay_or_rank
        A float in ``[0, 1)`` is the decay ``α`` of both filters; an integer ``r ≥ 1`` means ``α =
        (r - 1) / (r + 1)``.
    readout_filters
        See `D_RTRL`.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        If ``decay_or_rank`` is neither such a float nor such an integer.

    References
    ----------
    .. [1] C. Wang et al., "Model-agnostic linear-memory online learning in spiking neural
       networks", Nature Communications 17:1745, 2026.

    Examples
    --------
    >>> import brainstate, braintrace
    >>> braintrace.ES_D_RTRL(brainstate.nn.Module(), decay_or_rank=3).decay
    0.5
    """

    names = ("es_d_rtrl", "esd_rtrl", "pp_prop")
    told = ("decay",)

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: float | int = 0.9,
        *,
        readout_filters: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.readout_filters = readout_filters
        is_rank = isinstance(decay_or_rank, (int, np.integer))
        self.decay = _decay((decay_or_rank - 1) / (decay_or_rank + 1) if is_rank else decay_or_rank)

    @property
    def method(self) -> FilterTraces:
        """Input/output-dimension traces."""
        return FilterTraces(self.decay)


pp_prop = ES_D_RTRL
IODimVjpAlgorithm = ES_D_RTRL


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
        self.decay = _decay(decay)

    @property
    def method(self) -> FilterTraces:
        """The trace method: filters of inputs."""
        return FilterTraces(self.decay, filters_outputs=False)


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

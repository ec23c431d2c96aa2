"""ES-D-RTRL (pp-prop): filtered inputs and outputs as traces."""

from typing import Any

import brainstate

from .._arguments import BOOLEAN, DECAY, check_option, is_integer, shown
from .._errors import OptionError
from .._executor import InputOutputTraces
from .algorithm import ETraceAlgorithm


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
        check_option("readout_filters", readout_filters, BOOLEAN)
        self.readout_filters = readout_filters
        if is_integer(decay_or_rank) and decay_or_rank >= 1:
            self.decay = (int(decay_or_rank) - 1) / (int(decay_or_rank) + 1)
        elif DECAY.accepts(decay_or_rank):
            self.decay = float(decay_or_rank)
        else:
            raise OptionError(
                f"`decay_or_rank` is {shown(decay_or_rank)}; expected a decay (a float in [0, 1)) "
                "or a rank (an integer of at least 1)."
            )

    @property
    def method(self) -> InputOutputTraces:
        """Input/output-dimension traces."""
        return InputOutputTraces(self.decay)


pp_prop = ES_D_RTRL
IODimVjpAlgorithm = ES_D_RTRL

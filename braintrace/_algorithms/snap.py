"""SnAp: real-time recurrent learning of the entries that a weight reaches within few steps."""

from typing import Any

import brainstate

from .._arguments import POSITIVE, check_option
from .._errors import OptionError
from .._executor import ParameterTraces
from .algorithm import ETraceAlgorithm


class SnAp(ETraceAlgorithm):
    r"""Online learning with the sparse n-step approximation, ``n = 1``.

    Of the derivative of all hidden states with respect to a weight, the entries are kept that are
    not zero after one step: those of the position that the weight reaches. The traces are those of
    `D_RTRL`, and so is their size; in addition they follow what goes through one product, such as a
    recurrent weight or the four gates of an LSTM, from each position to itself:

    .. math::

        D_{\mathrm{SnAp}} = D + \mathrm{diag}\Big(\sum_y \frac{\partial h'}{\partial y}
        \frac{\partial y}{\partial x} \frac{\partial x}{\partial h}\Big)

    over all products ``y`` of values ``x``, marked or plain (``@``, ``jnp.einsum``, convolutions).
    What goes through two of them is left out, such as the reset gate of a GRU that acts before the
    recurrent weight; `report` tells of it. Where there is no product from state to state, it is
    `D_RTRL`.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    n
        Within how many steps: 1.
    **options
        ``vjp_method``, ``strict``, ``unroll_limit`` and ``trace_dtype``; see `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        For another ``n``.
    PrimitiveError
        When it is compiled, for a marked operation of one's own on the way from a state to itself
        that is not linear in its input.

    References
    ----------
    .. [1] J. Menick et al., "Practical real time recurrent learning with a sparse approximation",
       ICLR 2021.

    Examples
    --------
    A plain recurrent cell, of which D_RTRL remembers nothing:

    >>> import braintrace, jax.numpy as jnp
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.ValinaRNNCell(2, 3), "snap", x, batch_size=5)
    >>> learner.report().groups[0].transition
    (('h', 'h'),)
    """

    names = ("snap",)

    def __init__(self, model: brainstate.nn.Module, n: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        check_option("n", n, POSITIVE)
        if n > 1:
            raise OptionError(f"`n` is {n}; `SnAp` keeps what a weight reaches within one step: 1.")
        self.n = n

    @property
    def method(self) -> ParameterTraces:
        """Parameter-dimension traces, the diagonal of products in their transition."""
        return ParameterTraces("diagonal")

"""SnAp: real-time recurrent learning of the entries that a weight reaches within few steps."""

from typing import Any

import brainstate

from .._arguments import BOOLEAN, POSITIVE, check_option
from .._errors import OptionError
from .._executor import NeighbourTraces, ParameterTraces
from .algorithm import ETraceAlgorithm


class SnAp(ETraceAlgorithm):
    r"""Online learning with the sparse n-step approximation.

    Of the derivative of all hidden states with respect to a weight, the entries are kept that are
    not zero after ``n`` steps.

    After one step, these are those of the position that the weight reaches. The traces are those of
    `D_RTRL`, and so is their size; in addition they follow what goes through one product, such as a
    recurrent weight or the four gates of an LSTM, from each position to itself:

    .. math::

        D_{\mathrm{SnAp}} = D + \mathrm{diag}\left(\sum_y \frac{\partial h'}{\partial y}
        \frac{\partial y}{\partial x} \frac{\partial x}{\partial h}\right)

    over all products ``y`` of values ``x``, marked or plain (``@``, ``jnp.einsum``, convolutions).
    What goes through two of them is left out, such as the reset gate of a GRU that acts before the
    recurrent weight; `report` tells of it. Where there is no product from state to state, it is
    `D_RTRL`.

    With ``n`` of 2 or more, every parameter, marked or not, has a trace for each number of the
    whole state (of all layers) that it reaches within so many steps, by the structure of the
    model: the entries of a sparse matrix, all units of a dense one, and those of the layers above
    that they enter in the same step. Traces go on from number to number through whatever the model
    computes, so that a dense recurrent layer learns as by `RTRL` from ``n = 2`` on. Sparse
    connectivity is the use: ``report`` tells the bytes of what is kept, and of all. Every step
    makes the Jacobian of the state, by one vector-Jacobian product for each number of it.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    n
        Within how many steps.
    readout_filters
        See `D_RTRL`; ``None``: with ``n = 1``, which is what can have them.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        If ``n`` is no positive integer, or has ``readout_filters`` though it is not 1.
    PrimitiveError
        When it is compiled, with ``n = 1``, for an ETP operation of one's own on the way from a
        state to itself that is not linear in its input.
    CompilationError
        With ``n`` of 2 or more, for what `RTRL` refuses, such as samples that mix or a ``while``
        loop of unknown length.

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
    told = ("n",)

    def __init__(
        self,
        model: brainstate.nn.Module,
        n: int = 1,
        *,
        readout_filters: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        check_option("n", n, POSITIVE)
        check_option("readout_filters", readout_filters, BOOLEAN.or_else(None))
        if readout_filters and n > 1:
            raise OptionError(
                f"`readout_filters` is True for `SnAp(n={n})`, which has none. Leave it out, or "
                "use `SnAp(n=1)`."
            )
        self.readout_filters = n == 1 if readout_filters is None else readout_filters
        self.n = n

    @property
    def method(self) -> ParameterTraces | NeighbourTraces:
        """Traces of the position that a weight reaches, or of all that it reaches in n steps."""
        return ParameterTraces("diagonal") if self.n == 1 else NeighbourTraces(self.n)

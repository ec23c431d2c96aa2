"""SnAp: RTRL with the sparse n-step approximation of the influence matrix."""

from typing import Any

import brainstate

from .._rules import ParameterTraces, SparseTraces
from .algorithm import ETraceAlgorithm


class SnAp(ETraceAlgorithm):
    r"""Sparse n-step approximation (SnAp) of real-time recurrent learning.

    The derivative of all hidden states with respect to a weight is sparse in the first steps after
    the weight's effect. SnAp keeps the entries that are nonzero within ``n`` steps, and sets the
    others to zero.

    With ``n = 1``, these are the entries of the element that the weight reaches. The traces have
    the size and the recursion of `D_RTRL`. In addition, they follow paths from each element to
    itself through one product, such as a recurrent weight or the four gates of an LSTM:

    .. math::

        D_{\mathrm{SnAp}} = D + \mathrm{diag}\left(\sum_y \frac{\partial h'}{\partial y}
        \frac{\partial y}{\partial x} \frac{\partial x}{\partial h}\right)

    over all products ``y`` of values ``x``, marked or ordinary (``@``, ``jnp.einsum``,
    convolutions). Without products between states, the rule equals `D_RTRL`.

    With ``n`` of 2 or more, every parameter, marked or not, has a trace for each scalar of the
    state of all layers that it reaches within ``n`` steps, by the structure of the model: the
    entries of a sparse matrix or of a weight times a constant mask, all units of a dense matrix,
    and units of upper layers that they reach in the same step. These traces follow all paths of the
    model, so a dense recurrent layer has the gradient of `RTRL` from ``n = 2`` on. Use it for
    sparse connectivity: ``report`` contains the bytes of the traces, and of the full influence
    matrix. Each step computes the derivatives of all new states by old states and by weights, as
    `RTRL` does, so a network is limited to sizes for which one step of `RTRL` fits into memory.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    n
        Number of steps.
    readout_filters
        See `D_RTRL`; only for ``n = 1``. ``None``: True with ``n = 1``.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        If ``n`` is not a positive integer, or for ``readout_filters=True`` with another ``n`` than
        1.
    PrimitiveError
        When compiled with ``n = 1``: for a user-defined ETP operation on the path from a state to
        itself that is not linear in its input.
    CompilationError
        With ``n`` of 2 or more: for every model that `RTRL` refuses, such as models with coupled
        samples.

    Notes
    -----
    The paper's SnAp-1 keeps the full diagonal of the Jacobian. With ``n = 1``, paths through two
    products are truncated here, such as the path through the reset gate of a GRU that acts before
    the recurrent weight; `report` lists them.

    References
    ----------
    .. [1] J. Menick et al., "Practical real time recurrent learning with a sparse approximation",
       ICLR 2021 (arXiv:2006.07232), section 3.

    Examples
    --------
    A recurrent cell, whose past is truncated by `D_RTRL`:

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
        self.readout_filters = n == 1 if readout_filters is None else readout_filters
        self.n = n

    @property
    def method(self) -> ParameterTraces | SparseTraces:
        """Traces of the element that a weight reaches, or of all elements reached in n steps."""
        return ParameterTraces("diagonal") if self.n == 1 else SparseTraces(self.n)

"""SnAp: RTRL with the sparse n-step approximation of the influence matrix."""

from typing import Any

import brainstate

from .._rules import SparseTraces
from .algorithm import ETraceAlgorithm


class SnAp(ETraceAlgorithm):
    r"""Sparse n-step approximation (SnAp) of real-time recurrent learning.

    The derivative of all hidden states with respect to a weight is sparse in the first steps after
    the weight's effect. SnAp keeps the entries that are nonzero within ``n`` steps, and sets the
    others to zero.

    Every parameter, marked or not, has a trace for each scalar of the state of all layers that it
    reaches within ``n`` steps, by the structure of the model: the element that an input weight
    drives with ``n = 1``, the entries of a sparse matrix or of a weight times a constant mask, all
    units of a dense matrix from ``n = 2`` on, and units of upper layers that are reached in the
    same step. These traces follow all paths of the model, so a dense recurrent layer has the
    gradient of `RTRL` from ``n = 2`` on. Use it for sparse connectivity: ``report`` contains the
    bytes of the traces, and of the full influence matrix. Each step computes the derivatives of all
    new states by old states and by weights, as `RTRL` does, so a network is limited to sizes for
    which one step of `RTRL` fits into memory.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    n
        Number of steps.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.

    Raises
    ------
    OptionError
        If ``n`` is not a positive integer.
    CompilationError
        For every model that `RTRL` refuses, such as models with coupled samples.

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
    >>> learner(x).shape
    (5, 3)
    """

    names = ("snap",)
    told = ("n",)

    def __init__(self, model: brainstate.nn.Module, n: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        self.n = n

    @property
    def method(self) -> SparseTraces:
        """Traces of the state scalars that a weight reaches within n steps."""
        return SparseTraces(self.n)

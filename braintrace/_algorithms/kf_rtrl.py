"""KF-RTRL: traces of products as random Kronecker factors."""

from typing import Any

import brainstate

from .._rules import KroneckerTraces
from .algorithm import ETraceAlgorithm


class KF_RTRL(ETraceAlgorithm):
    r"""Kronecker-factored RTRL (KF-RTRL): unbiased random estimate of the gradient of RTRL.

    For a weight that multiplies an input :math:`x`, `RTRL` carries the derivative of all hidden
    states of a sample with respect to the weight. This rule estimates it by a product :math:`u
    \otimes A` of a vector shaped like the input and a matrix of states by outputs:

    .. math::

        u' = p_0 u + p_1 \nu x, \qquad A' = J A / p_0 + \nu F / p_1.

    :math:`J` and :math:`F` are the derivatives of the new states with respect to the old states and
    to the output of the product. There is one random sign :math:`\nu` per weight, sample and step.
    The factors :math:`p_0 = \sqrt{|J A| / |u|}` and :math:`p_1 = \sqrt{|F| / |x|}` balance the
    norms. The derivative of the step itself is exact; only the derivative of earlier steps is
    estimated. A bias is a weight of the constant input 1. An elementwise parameter (a leak, a gain)
    has the exact trace of `RTRL`, which is as large as an :math:`A`.

    The mean over random signs is the gradient of `RTRL`: backpropagation through time over the
    whole past, for every parameter, marked or not. One estimate has much less variance than with
    `UORO`. Memory is states times outputs of each product, per sample. A step costs one product of
    :math:`J` with that matrix, which is cheaper than RTRL by the number of inputs.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    seed
        Seed of the random signs. A reset does not restart the random stream, so sequences have
        independent noise.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`. Gradients are exact within a ``window``, and estimated for the time
        before it: longer windows have less noise.

    Raises
    ------
    OptionError
        If ``seed`` is not an integer of 32 bits.
    PrimitiveError
        When compiled: for a weight that multiplies several parts of its input (a convolution), or
        whose gradient is not linear in the input.

    Notes
    -----
    The paper draws two independent signs per step. One sign gives the same distribution, because
    only the product of the two signs matters. If one norm of a ratio is zero, both terms of that
    product are zero here. See `UORO` for the trace ``"key"`` and for ``vmap``.

    References
    ----------
    .. [1] A. Mujika, F. Meier and A. Steger, "Approximating real-time recurrent learning with
       random Kronecker factors", NeurIPS 2018 (arXiv:1805.10842), Algorithm 1.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> x, cell = jnp.ones((5, 2)), braintrace.nn.LeakyRNN(2, 3)
    >>> learner = braintrace.compile(cell, "kf_rtrl", x, batch_size=5, seed=7)
    >>> [A.shape for A in learner.algorithm.traces.value["A"].values()]
    [(5, 3, 3)]
    """

    names = ("kf_rtrl",)

    def __init__(self, model: brainstate.nn.Module, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.seed = int(seed)

    @property
    def method(self) -> KroneckerTraces:
        """Kronecker factors."""
        return KroneckerTraces(self.seed)

"""KF-RTRL: traces of marked products as random Kronecker factors."""

from typing import Any

import brainstate

from .._arguments import SEED, check_option
from .._executor import KroneckerTraces
from .algorithm import ETraceAlgorithm


class KF_RTRL(ETraceAlgorithm):
    r"""Online learning with random Kronecker factors, unbiased for the gradient of RTRL.

    For a weight that multiplies an input :math:`x`, the derivative of all hidden states of a sample
    with respect to it, which `RTRL` carries, is estimated by a product :math:`u \otimes A` of a
    vector like the input and a matrix of states times outputs:

    .. math::

        u' = p_0 u + p_1 \nu x, \qquad A' = J A / p_0 + \nu F / p_1

    with the derivatives :math:`J` and :math:`F` of the new states by the old ones and by the
    product, one random sign :math:`\nu` per weight, sample and step, and factors
    :math:`p_0 = \sqrt{|J A| / |u|}`, :math:`p_1 = \sqrt{|F| / |x|}` that keep the norms balanced.
    What the step itself adds to the gradient is exact; what came before goes through the estimate.
    A bias is a weight of the constant input 1. Parameters that meet data element by element (a
    leak, a gain) have the trace of `RTRL`, which is as large as an :math:`A`, and exact.

    The mean over draws is the gradient of `RTRL`, that is of backpropagation through time over the
    whole past, for every parameter, marked or not; a single draw is much less noisy than that of
    `UORO`. Memory is states times outputs of each product per sample, and a step costs a product
    of :math:`J` with that: less than RTRL by the number of inputs.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    seed
        Of the random signs. They go on at a reset, so that the noise of one sequence is not that of
        the next.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.
        A ``window`` is exact inside, and only the time before it goes through the estimate: the
        longer the window, the less noise.

    Raises
    ------
    OptionError
        If ``seed`` is no integer of 32 bits.
    PrimitiveError
        When compiled: for a weight that meets its input in several places (a convolution), or whose
        gradient is not linear in the input.

    Notes
    -----
    For the traces ``"key"`` and ``"draws"``, and for maps, see `UORO`.

    References
    ----------
    .. [1] A. Mujika, F. Meier and A. Steger, "Approximating real-time recurrent learning with
       random Kronecker factors", NeurIPS 2018.

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
        check_option("seed", seed, SEED)
        self.seed = int(seed)

    @property
    def method(self) -> KroneckerTraces:
        """Kronecker factors."""
        return KroneckerTraces(self.seed)

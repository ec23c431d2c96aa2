"""UORO: unbiased online recurrent optimization with a random rank-one trace."""

from typing import Any

import brainstate

from .._rules import RankOneTraces
from .algorithm import ETraceAlgorithm


class UORO(ETraceAlgorithm):
    r"""Unbiased online recurrent optimization (UORO): a random rank-one estimate of RTRL.

    `RTRL` carries the derivative of all hidden states of a sample with respect to all parameters.
    This rule estimates it by a product :math:`s \otimes t` of a vector shaped like the states and a
    vector shaped like the parameters:

    .. math::

        s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1.

    :math:`J` and :math:`F` are the derivatives of the new states with respect to the old states and
    to the parameters, and :math:`\nu` are random signs. The factors :math:`\rho_0 = \sqrt{|t| / |J
    s|}` and :math:`\rho_1 = \sqrt{|\nu^\top F| / |\nu|}` balance the norms. The derivative of the
    step itself is exact. The derivative of earlier steps is the estimate :math:`(\mu \cdot s)\, t`,
    with :math:`\mu` the derivative of the loss with respect to the states before the step.

    The mean over random signs is the gradient of RTRL: backpropagation through time over the whole
    past, for every model that RTRL accepts and every parameter, marked or not. One estimate is
    noisy, and the noise grows with the number of states and steps; use small learning rates or many
    samples. Memory is one copy of the parameters per sample. A step costs a few passes over this
    copy, without a Jacobian.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    seed
        Seed of the random signs, drawn for each sample and step. A reset does not restart the
        random stream, so sequences have independent noise.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`. Gradients are exact within a ``window``, and estimated for the time
        before it: longer windows have less noise.

    Raises
    ------
    OptionError
        If ``seed`` is not an integer of 32 bits.

    Notes
    -----
    The paper adds a small constant to :math:`\rho_0` and :math:`\rho_1` for numerical stability.
    Here, both terms of a product are zero if one norm of its ratio is zero.

    The trace ``"key"`` determines the next signs; it is saved and restored with the other traces.
    Learners under ``vmap`` (`Learner.functional`) draw the same signs, unless they are given
    different keys.

    References
    ----------
    .. [1] C. Tallec and Y. Ollivier, "Unbiased online recurrent optimization", ICLR 2018
       (arXiv:1702.05043), Algorithm 1.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 3), "uoro", x, batch_size=5, seed=7)
    >>> learner.algorithm.traces.value["s"].shape
    (5, 3)
    """

    names = ("uoro",)

    def __init__(self, model: brainstate.nn.Module, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.seed = int(seed)

    @property
    def method(self) -> RankOneTraces:
        """The trace method: a random trace of rank one."""
        return RankOneTraces(self.seed)

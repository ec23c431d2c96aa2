"""UORO: unbiased online recurrent optimization, a random trace of rank one."""

from typing import Any

import brainstate

from .._arguments import SEED, check_option
from .._executor import RankOneTraces
from .algorithm import ETraceAlgorithm


class UORO(ETraceAlgorithm):
    r"""Online learning with a random trace of rank one, unbiased for the gradient of RTRL.

    The derivative :math:`\epsilon` of all hidden states of a sample with respect to all parameters,
    which `RTRL` carries, is estimated by a product :math:`s \otimes t` of a vector like the states
    and one like the parameters:

    .. math::

        s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1

    with the derivatives :math:`J` and :math:`F` of the new states by the old ones and by the
    parameters, random signs :math:`\nu`, and factors
    :math:`\rho_0 = \sqrt{|t| / |J s|}`, :math:`\rho_1 = \sqrt{|\nu^\top F| / |\nu|}` that keep the
    norms balanced. What the step itself adds to the gradient is exact; what came before goes
    through the estimate, :math:`(\mu \cdot s)\, t` with :math:`\mu` the derivative of the loss by
    the states before the step.

    The mean over draws is the gradient of RTRL, that is of backpropagation through time over the
    whole past, for every model and every parameter, marked or not. A single draw is noisy, the more
    so the more states and steps there are: small learning rates or many samples average the noise.
    Memory is one copy of the parameters per sample, and a step costs a few passes over it; no
    Jacobian is built.

    Parameters
    ----------
    model
        See `ETraceAlgorithm`.
    seed
        Of the random signs, drawn for every sample and step. They go on at a reset, so that the
        noise of one sequence is not that of the next.
    **options
        ``window``, ``strict``, ``unroll_limit``, ``mark`` and ``trace_dtype``; see
        `ETraceAlgorithm`.
        A ``window`` is exact inside, and only the time before it goes through the estimate: the
        longer the window, the less noise.

    Raises
    ------
    OptionError
        If ``seed`` is no integer of 32 bits.

    Notes
    -----
    The traces ``"key"`` and ``"draws"`` (the number of steps drawn for) say what is drawn next;
    they are saved and restored with the others. Learners that are mapped (`Learner.functional`)
    draw from the keys in their states; where all lanes of a map have the same key, the number of
    the lane is folded in.

    References
    ----------
    .. [1] C. Tallec and Y. Ollivier, "Unbiased online recurrent optimization", ICLR 2018.

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
        check_option("seed", seed, SEED)
        self.seed = int(seed)

    @property
    def method(self) -> RankOneTraces:
        """A trace of rank one."""
        return RankOneTraces(self.seed)

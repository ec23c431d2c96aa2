"""Three-factor learning: a modulator as learning signal."""

from typing import Any

import jax
import jax.numpy as jnp

from .._errors import ShapeError
from .._etrace_op import quantities


def three_factor_loss(h: Any, modulator: Any) -> Any:
    r"""Return a loss whose learning signal is a modulator.

    .. math:: L = \sum_{bj} m_{bj} h_{bj}, \qquad \partial L / \partial h_{bj} = m_{bj},

    with the modulator held constant. Under any learning rule, the gradient of a weight is the
    modulator times the weight's eligibility: neo-Hebbian three-factor learning. Optimizers descend
    the gradient: pass a reward, or a dopamine signal that strengthens synapses, with a minus sign.

    Parameters
    ----------
    h : array or Quantity ``(batch, ..., units)``
        Output of the model computed from its hidden states (potentials, rates, surrogate spikes).
    modulator : array or Quantity
        One number for each unit (the shape of ``h``), for each sample ``(batch,)``, or for all
        ``()``. Its axes are the first axes of ``h``; an axis of size 1 is broadcast, so ``(1,
        units)`` is one number for each unit in all samples. It has no gradient.

    Returns
    -------
    array or Quantity
        A scalar with the unit of ``h`` times the unit of ``modulator``. Use it as the loss of a
        step: return it from ``step_fn`` of `Learner.etrace_grad` or `Learner.etrace_online`. Its
        value has no meaning.

    Raises
    ------
    ShapeError
        If the shape of the modulator does not fit.

    Notes
    -----
    The review describes the rule as eligibility trace times third factor. It leaves the form of the
    eligibility open; here, the learning rule of the learner defines it. For `compile`,
    ``"three_factor"`` is another name of `D_RTRL`.

    References
    ----------
    .. [1] W. Gerstner et al., "Eligibility traces and plasticity on behavioral time scales:
       experimental support of neoHebbian three-factor learning rules", Frontiers in Neural Circuits
       12, 2018.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.IndRNN(2, 3)
    >>> xs, rewards = jnp.ones((4, 5, 2)), jnp.ones((4, 5))
    >>> learner = braintrace.compile(cell, "d_rtrl", xs[0], batch_size=5)
    >>> gradients = learner.etrace_grad(
    ...     xs, rewards, step_fn=lambda x, r: braintrace.three_factor_loss(learner(x), -r)
    ... )
    """
    h, h_unit = quantities.split(h)
    modulator, unit = quantities.split(modulator)
    factor = _beside(jax.lax.stop_gradient(modulator), h).astype(h.dtype)
    return quantities.attach(jnp.sum(factor * h), h_unit * unit)


def _beside(modulator: jax.Array, h: jax.Array) -> jax.Array:
    """Return the modulator with trailing axes of size 1, up to the number of axes of ``h``."""
    shape = (*modulator.shape, *(1,) * (h.ndim - modulator.ndim))
    if len(shape) > h.ndim or any(n not in (1, m) for n, m in zip(shape, h.shape, strict=True)):
        samples = f"{h.shape[:1]}, one for each sample, " if h.ndim > 1 else ""
        raise ShapeError(
            f"`three_factor_loss`: expected `modulator` of shape {h.shape}, one number for each "
            f"unit as in `h`, {samples}or (), one for all; got {modulator.shape}. Use axes of size "
            "1 where it is the same for several entries."
        )
    return modulator.reshape(shape)

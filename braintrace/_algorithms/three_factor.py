"""Three-factor learning: a modulator in the place of the derivative of a loss."""

from typing import Any

import jax
import jax.numpy as jnp

from .._errors import DtypeError, ShapeError
from .._etrace_op.operations import quantities


def three_factor_loss(h: Any, modulator: Any) -> Any:
    r"""Return a loss of which the learning signal is a modulator.

    .. math:: L = \sum_{bj} m_{bj} h_{bj}, \qquad \partial L / \partial h_{bj} = m_{bj},

    with the modulator held constant. Under any learning rule the gradient of a weight is then the
    modulator times the weight's eligibility: neo-Hebbian three-factor learning. Optimizers go
    downhill; give a reward, or a dopamine signal that strengthens synapses, with a minus sign.

    Parameters
    ----------
    h : array or Quantity ``(batch, ..., units)``
        What the model returns of its hidden states (potentials, rates, surrogate spikes).
    modulator : array or Quantity
        One number for each unit (the shape of ``h``), for each sample ``(batch,)``, or for all
        ``()``. It goes with the first axes of ``h``; an axis of size 1 counts for all entries, so
        that ``(1, units)`` is one number for each unit in all samples. It carries no gradient.

    Returns
    -------
    array or Quantity
        A scalar with the unit of ``h`` times that of ``modulator``. It is meant as the loss of a
        step, as what ``step_fn`` of `Learner.etrace_grad` or `Learner.etrace_online` returns; its
        value has no meaning.

    Raises
    ------
    ShapeError
        If the modulator does not fit.
    DtypeError
        If one of the two is nothing that JAX computes with, ``h`` has no derivative (booleans,
        integers), or the modulator is complex.

    References
    ----------
    .. [1] W. Gerstner et al., "Eligibility traces and plasticity on behavioral time scales:
       experimental support of neoHebbian three-factor learning rules", Frontiers in Neural
       Circuits 12, 2018.

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
    h, h_unit = quantities.split("three_factor_loss", "h", h)
    modulator, unit = quantities.split("three_factor_loss", "modulator", modulator)
    if not jnp.issubdtype(h.dtype, jnp.floating) or jnp.iscomplexobj(modulator):
        raise DtypeError(
            "`three_factor_loss`: expected floating-point `h` and real `modulator`, got dtypes "
            f"{h.dtype} and {modulator.dtype}."
        )
    factor = _beside(jax.lax.stop_gradient(modulator), h).astype(h.dtype)
    return quantities.attach(jnp.sum(factor * h), h_unit * unit)


def _beside(modulator: jax.Array, h: jax.Array) -> jax.Array:
    """Return the modulator with as many axes as ``h``, the first of which are its own."""
    shape = (*modulator.shape, *(1,) * (h.ndim - modulator.ndim))
    if len(shape) > h.ndim or any(n not in (1, m) for n, m in zip(shape, h.shape, strict=True)):
        samples = f"{h.shape[:1]}, one for each sample, " if h.ndim > 1 else ""
        raise ShapeError(
            f"`three_factor_loss`: expected `modulator` of shape {h.shape}, one number for each "
            f"unit as in `h`, {samples}or (), one for all; got {modulator.shape}. Put axes of size "
            "1 where it is the same for several entries."
        )
    return modulator.reshape(shape)

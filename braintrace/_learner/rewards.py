r"""Rewards as learning signals: TD(λ), and three-factor losses.

TD(λ) has eligibility traces of gradients, for delayed errors.

For a function :math:`f` of parameters w and of the observations so far (a prediction, or the
log-probability of an action), for each sample:

.. math::
    z_t = \gamma_t \lambda z_{t-1} + \nabla_w f_t, \qquad
    \Delta w_t \propto \frac1B \sum_b \delta_{t, b} z_{t, b}

The gradient :math:`\nabla_w f_t` comes from a learning rule, whose traces carry it through the
memory of the network. The traces of this module carry it through the delay of rewards. They are
different sums over the past: a weight's gradient is first pulled back through the states of all
earlier steps, and then summed over the predictions of all earlier steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._etrace_op import quantities
from .._typing import PyTree


@dataclasses.dataclass(frozen=True)
class TDTrace:
    r"""Eligibility traces of gradients, for TD(λ) and for actor-critics that learn at every step.

    .. math:: z_t = \gamma_t \lambda z_{t-1} + \nabla_w f_t, \qquad
        \nabla_w L_t = -\frac1B \sum_b \delta_{t, b} z_{t, b}

    with the TD error :math:`\delta_t = r_{t+1} + \gamma_{t+1} v_{t+1} - v_t`, and :math:`\gamma_t`
    the discount at the transition to step t: 0 where an episode has ended, which resets the trace.
    For a critic, f is v; for an actor, :math:`\log \pi(a_t)`; for both with shared weights, the sum
    of the two. All methods are pure functions of pytrees, under any transformation of JAX.

    Parameters
    ----------
    decay : float
        λ in [0, 1]: 0 credits one step, 1 the whole episode.

    References
    ----------
    .. [1] R. S. Sutton and A. G. Barto, "Reinforcement learning: an introduction", 2nd edition,
       2018: equations 12.5 to 12.7, section 13.5, and 12.23 to 12.25 with a discount per step.
    .. [2] M. Elsayed, G. Vasan and A. R. Mahmood, "Streaming deep reinforcement learning finally
       works", 2024.

    Examples
    --------
    Two environments; an episode of the second one has ended before the second step:

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> credit = braintrace.TDTrace(0.5)
    >>> trace = credit.init({"w": jnp.zeros(1)}, batch_size=2)
    >>> gradients = {"w": jnp.ones((2, 1))}
    >>> trace = credit.update(trace, gradients, discount=jnp.array([0.9, 0.9]))
    >>> trace = credit.update(trace, gradients, discount=jnp.array([0.9, 0.0]))
    >>> print(trace["w"].T)
    [[1.45 1.  ]]
    >>> print(credit.gradients(trace, errors=jnp.array([1.0, -0.45]))["w"])
    [-0.5]
    """

    decay: float

    def init(self, like: PyTree, batch_size: int | None = None) -> PyTree:
        """Return zeros as the trace before the first step.

        Parameters
        ----------
        like
            Parameters, or their gradients: a pytree of floating-point arrays.
        batch_size
            Number of environments, each with a separate trace along a new first axis. Default None:
            without such an axis, or ``like`` already has it.
        """
        batch = () if batch_size is None else (batch_size,)
        return jax.tree.map(lambda leaf: jnp.zeros((*batch, *leaf.shape), leaf.dtype), like)

    def update(self, trace: PyTree, gradients: PyTree, discount: ArrayLike) -> PyTree:
        """Return the trace of this step, with the same dtypes.

        Parameters
        ----------
        trace
            The trace of the previous step.
        gradients
            Gradients of f at this step, with the structure of the trace: separate for each
            environment, as ``jax.vmap(jax.grad(f), in_axes=(None, 0))`` returns them.
        discount
            γ at the transition to this step, ``(batch,)``, or ``()`` for all: 0 if this step is the
            first of an episode. The trace then equals the gradient.
        """

        def advanced(z: jax.Array, gradient: jax.Array) -> jax.Array:
            factor = (self.decay * jnp.asarray(discount)).astype(z.dtype)
            factor = factor.reshape(*factor.shape, *(1,) * (z.ndim - factor.ndim))
            # Select zeros: a product would let non-finite values outlive the episode.
            kept = jnp.where(factor == 0, jnp.zeros_like(z), factor * z)
            return jax.lax.add(kept, gradient.astype(z.dtype))  # refuses one gradient for all

        return jax.tree.map(advanced, trace, gradients)

    def gradients(self, trace: PyTree, errors: ArrayLike) -> PyTree:
        """Return the mean of errors times traces, with a minus sign for optimizers that descend.

        Parameters
        ----------
        trace
            The trace of the step that the errors belong to.
        errors
            δ of each environment, ``(batch,)``, over which the mean is taken; or ``()`` for a trace
            without that axis.
        """
        deltas = jnp.asarray(errors)

        def descent(z: jax.Array) -> jax.Array:
            if not deltas.ndim:
                return -deltas.astype(z.dtype) * z
            # One contraction: the elementwise product is never materialised.
            weights = -deltas.astype(z.dtype) / len(deltas)
            return jnp.tensordot(weights, z, 1, precision=jax.lax.Precision.HIGHEST)

        return jax.tree.map(descent, trace)


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
    modulator = jax.lax.stop_gradient(modulator)
    axes = (*modulator.shape, *(1,) * (h.ndim - modulator.ndim))
    factor = jnp.broadcast_to(modulator.reshape(axes), h.shape).astype(h.dtype)
    return quantities.attach(jnp.sum(factor * h), h_unit * unit)

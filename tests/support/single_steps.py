"""The gradient of each step with the states before it held constant, in plain JAX."""

import functools

import jax
import numpy as np
import oracles

LENGTH, BATCH = 6, 2


@functools.partial(jax.jit, static_argnums=0)
def plain_step(case, params, states, x, target):
    """Loss of a step, its gradient with the old states held constant, and the new states."""

    def loss(params):
        ops = oracles.PlainOps()
        output = case.step(ops, params, jax.lax.stop_gradient(states), x)
        return case.loss(output, target), ops.hidden

    (value, states), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return value, gradient, states


def after_reset(case, states, flags):
    """States in which some samples, or all, are at the start of a sequence."""
    flags = np.broadcast_to(flags, BATCH)[:, None]
    fresh = case.initial_states(BATCH)
    return {name: np.where(flags, fresh[name], value) for name, value in states.items()}


def plain_steps(case, rate=0.0, reset=None):
    """Yield loss and gradient of every step; with a rate, parameters descend between them."""
    params, states = case.params(), case.initial_states(BATCH)
    for t, (x, target) in enumerate(zip(*case.sequences(BATCH, LENGTH), strict=True)):
        if reset is not None:
            states = after_reset(case, states, reset[t])
        found = plain_step(case, params, states, x, target)
        loss, gradient, states = jax.device_get(found)
        params = jax.tree.map(lambda w, g: w - rate * g, params, gradient)
        yield loss, gradient, params


def plain_gradient(case, mask=None, reset=None):
    """The weighted sum of the gradients of all steps."""
    weights = np.ones(LENGTH) if mask is None else mask
    found = [gradient for _, gradient, _ in plain_steps(case, reset=reset)]
    parts = [
        jax.tree.map(lambda leaf, weight=weight: weight * leaf, gradient)
        for weight, gradient in zip(weights, found, strict=True)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)

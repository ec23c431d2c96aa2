"""The gradient of each step with the states before it held constant, in plain JAX."""

import functools

import jax
import numpy as np
import oracles

LENGTH, BATCH = 6, 2


@functools.partial(jax.jit, static_argnums=0)
def plain_step(case, params, states, x, target):
    """The gradient of a step with the old states held constant, and the new states."""

    def loss(params):
        ops = oracles.PlainOps()
        output = case.step(ops, params, jax.lax.stop_gradient(states), x)
        return case.loss(output, target), ops.hidden

    return jax.grad(loss, has_aux=True)(params)


def plain_gradient(case, mask=None, reset=None):
    """The weighted sum of the gradients of all steps; flags (time, batch) start samples again."""
    params, states = case.params(), case.initial_states(BATCH)
    start, found = states, []
    for t, (x, target) in enumerate(zip(*case.sequences(BATCH, LENGTH), strict=True)):
        if reset is not None:
            flags = reset[t][:, None]
            states = {name: np.where(flags, start[name], old) for name, old in states.items()}
        gradient, states = jax.device_get(plain_step(case, params, states, x, target))
        weight = 1 if mask is None else mask[t]
        found.append(jax.tree.map(lambda leaf, weight=weight: weight * leaf, gradient))
    return jax.tree.map(lambda *leaves: sum(leaves), *found)

"""Backpropagation through time of the models in plain JAX: no learner, none of its operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from golden.nets import BATCH, Plain


def loss(output, target):
    """The loss of one step, summed over samples."""
    return 0.5 * jnp.sum((output - target) ** 2)


@functools.cache
def bptt(net, masked=False, resets=False, window=None):
    """{parameter: gradient of the summed losses}; truncated every `window` steps, if given."""
    inputs = net.inputs
    xs, targets = inputs["xs"], inputs["targets"]
    mask = inputs["mask"] if masked else np.ones(len(xs))
    reset = inputs["reset"] if resets else np.zeros((len(xs), BATCH), bool)
    arrays, initial = net.group("p/"), net.group("s/")
    initial = {name: np.broadcast_to(v, (BATCH, *v.shape)) for name, v in initial.items()}
    held = np.arange(len(xs)) % (window or len(xs)) == 0
    constants = {name: arrays[name] for name in net.constants}

    def step(parameters, states, now):
        x, target, weight, begins, is_held = now
        states = {n: jnp.where(is_held, jax.lax.stop_gradient(v), v) for n, v in states.items()}
        states = {n: jnp.where(begins[:, None], initial[n], v) for n, v in states.items()}
        states, output = net.step(Plain, {**parameters, **constants}, states, x)
        return states, weight * loss(output, target)

    def total(parameters):
        def body(states, now):
            return step(parameters, states, now)

        return jax.lax.scan(body, initial, (xs, targets, mask, reset, held))[1].sum()

    found = jax.jit(jax.grad(total))({name: arrays[name] for name in net.shapes})
    return {name: np.asarray(value) for name, value in found.items()}

"""Gradients of the summed squares of a learner's outputs, on each path, from where it is."""

import functools

import jax.numpy as jnp
from drivers import calls_gradient, stream_gradient


@functools.lru_cache(maxsize=16)
def loss_of(learner):
    """One function for all calls of a learner, which are compiled once."""
    return lambda x: (learner(x) ** 2).sum().astype(jnp.float32)


def sequence(learner, xs):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), reduction="sum")


def own_loop(learner, xs):
    return calls_gradient(learner.algorithm.model, loss_of(learner), xs)


def stream(learner, xs):
    return stream_gradient(learner, xs, step_fn=loss_of(learner))


def pure(learner, xs):
    functional = learner.functional()
    step_fn = loss_of(learner)
    state, found = functional.grad(functional.state(), xs, step_fn=step_fn, reduction="sum")
    functional.restore(state)
    return found


RUNS = {"sequence": sequence, "own loop": own_loop, "stream": stream, "pure": pure}

"""Eight ways to one gradient.

Each is a function of a learner, of what a `Request` asks, and of a loss; it returns the sum of the
weighted gradients of all steps, by parameter.
"""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from random_models import named


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of a learner.

    mask: weights of the steps. reset: (time, batch), samples that start anew before these steps.
    """

    xs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    reset: np.ndarray
    window: int | None = None
    chunk_size: int | str = "auto"
    cut: int = 3

    def options(self, part=slice(None)):
        """Of a call for a part of the sequence."""
        return {
            "window": self.window,
            "mask": self.mask[part],
            "reset": self.reset[part],
            "chunk_size": self.chunk_size,
            "reduction": "sum",
        }


def add(left, right):
    return jax.tree.map(jnp.add, left, right)


def loss_with(learner, loss):
    def step(x, target):
        return loss(learner(x), target)

    return step


def by_chunks(learner, asked, loss):
    """A sequence in chunks of some length."""
    step = loss_with(learner, loss)
    return named(learner.etrace_grad(asked.xs, asked.targets, step_fn=step, **asked.options()))


def by_two_calls(learner, asked, loss, **options):
    """A sequence cut in two."""
    step, found = loss_with(learner, loss), []
    for part in (slice(None, asked.cut), slice(asked.cut, None)):
        sequences, own = (asked.xs[part], asked.targets[part]), asked.options(part) | options
        found.append(named(learner.etrace_grad(*sequences, step_fn=step, **own)))
    return add(*found)


def by_checkpoints(learner, asked, loss):
    """The same, each call in parts that run twice."""
    return by_two_calls(learner, asked, loss, checkpoint=True)


def by_stream(learner, asked, loss):
    """Updates of a stream, which here only remember what they get."""
    zeros = {
        name: jnp.zeros(value.shape, jnp.promote_types(value.dtype, jnp.float32))
        for name, value in weights_of(learner).items()
    }
    total = brainstate.State(zeros)

    def remember(gradients, weights):
        """An update gets the gradient of the weighted mean of a block of steps."""
        of_sum = jax.tree.map(lambda g: g * jnp.sum(weights), named(gradients))
        total.value = add(total.value, of_sum)

    def step(x, target, weight):
        return loss(learner(x), target), weight

    learner.etrace_online(
        asked.xs,
        asked.targets,
        asked.mask,
        step_fn=step,
        update_fn=remember,
        has_aux=True,
        mask=asked.mask,
        reset=asked.reset,
        window=asked.window,
        every=asked.window or 1,
    )
    return total.value


def weights_of(learner):
    """The parameters by name, without units."""
    states = learner.module.states(brainstate.ParamState)
    return {path[-1]: jax.tree.leaves(state.value)[0] for path, state in states.items()}


def by_own_gradient(learner, asked, loss):
    """One step after the other in a gradient of one's own."""
    states = learner.module.states(brainstate.ParamState)
    own = brainstate.transform.grad(lambda x, y: loss(learner(x), y), states)
    own, total = brainstate.transform.jit(own), None
    for t, weight in enumerate(asked.mask):
        if asked.reset[t].any():
            learner.reset_state(where=asked.reset[t])
        gradient = own(asked.xs[t], asked.targets[t])
        if weight:
            weighted = jax.tree.map(lambda g, w=weight: w * g, gradient)
            total = weighted if total is None else add(total, weighted)
    return {path[-1]: value for path, value in total.items()}


def by_pure_function(learner, asked, loss):
    """The pure function under `jit`."""
    pure, step = learner.functional(), loss_with(learner, loss)

    @jax.jit
    def run(state, xs, targets):
        return pure.grad(state, xs, targets, step_fn=step, **asked.options())[1]

    return named(run(pure.state(), asked.xs, asked.targets))


def by_mapped_learners(learner, asked, loss):
    """The same mapped over two learners, of which the first sees something else."""
    pure, step = learner.functional(), loss_with(learner, loss)

    @jax.jit
    @jax.vmap
    def run(state, xs, targets):
        return pure.grad(state, xs, targets, step_fn=step, **asked.options())[1]

    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), pure.state())
    found = run(states, *(np.stack([a[::-1], a]) for a in (asked.xs, asked.targets)))
    return named(jax.tree.map(lambda leaf: leaf[1], found))


def by_another_start(learner, asked, loss):
    """After another sequence that made all of its numbers NaN, and a reset."""
    learner.etrace_evolve(np.nan * asked.xs)
    learner.reset_state()
    return by_chunks(learner, asked, loss)


PATHS = {
    path.__name__: path
    for path in (
        by_chunks,
        by_two_calls,
        by_checkpoints,
        by_stream,
        by_own_gradient,
        by_pure_function,
        by_mapped_learners,
        by_another_start,
    )
}

"""Training as one pure function, vmapped over learning rates and seeds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .methods import Gradient
from .networks import Values
from .rows import points_of
from .tasks import Task

LARGEST = 1.0
"""Norm to which a gradient is clipped."""

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": optax.scale_by_adam,
    "rmsprop": optax.scale_by_rms,
}

Train = Callable[[Any, Any, Values, Any], Values]


def lane(task: Task, gradient: Gradient, batch: int, updates: int, optimizer: str) -> Train:
    """Return training: ``(rate, key, weights, memory) -> weights at every point``."""
    descent = optax.chain(optax.clip_by_global_norm(LARGEST), OPTIMIZERS[optimizer]())
    counts = jnp.arange(points_of(updates)[-1]).reshape(len(points_of(updates)) - 1, -1)

    def train(rate: Any, key: Any, weights: Values, memory: Any) -> Values:
        def update(carry: Any, count: Any) -> tuple[Any, None]:
            weights, memory, state = carry
            sequences = task.sample(jax.random.fold_in(key, count), batch, "train")
            found, memory = gradient(weights, memory, sequences)
            steps, state = descent.update(found, state)
            weights = jax.tree.map(lambda w, step: w - rate * step, weights, steps)
            return (weights, memory, state), None

        def until_point(carry: Any, counts: Any) -> tuple[Any, Values]:
            carry, _ = jax.lax.scan(update, carry, counts)
            return carry, carry[0]

        start = weights, memory, descent.init(weights)
        kept = jax.lax.scan(until_point, start, counts)[1]
        return jax.tree.map(lambda first, rest: jnp.append(first[None], rest, 0), weights, kept)

    return train

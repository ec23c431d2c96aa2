"""Scores of weights on held-out sequences."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import tasks
from .networks import Values, build, pure
from .tasks import Split

AT_A_TIME = 256
"""Sequences in one batch."""

Score = Callable[[Values], Any]


@functools.lru_cache(maxsize=8)
def scorer(task_name: str, cell: str, units: int, split: Split) -> Score:
    """Return a compiled score of many weights, whose two axes are lanes and points.

    It is NaN where an answer is not finite.
    """
    task = tasks.load(task_name)
    held_out = task.held_out(split)
    size = held_out.inputs.shape[1]
    count = -(-size // AT_A_TIME)
    side_by_side = -(-size // count)
    network = pure(build(task, cell, units, 0), side_by_side, task.features)

    def padded(leaf: Any) -> Any:
        missing = count * side_by_side - size
        return jnp.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2))

    def score(weights: Values) -> Any:
        def answers(part: Any) -> Any:
            return network.run(weights, network.start, part)[1]

        inputs = padded(held_out.inputs)
        parts = inputs.reshape(len(inputs), count, side_by_side, -1).swapaxes(0, 1)
        outputs = jax.lax.map(answers, parts).swapaxes(0, 1)
        outputs = outputs.reshape(len(inputs), count * side_by_side, -1)[:, :size]
        return jnp.where(jnp.isfinite(outputs).all(), task.score(outputs, held_out), jnp.nan)

    return jax.jit(lambda weights: jax.lax.map(jax.vmap(score), weights))

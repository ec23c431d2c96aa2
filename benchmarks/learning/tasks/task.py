"""A task: batches, losses, a score and a budget."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Batch(NamedTuple):
    """Sequences, time first.

    inputs: ``(T, B, features)``.
    targets: ``(T, B)`` integers for classes, ``(T, B, outputs)`` for values.
    weights: ``(T, B)``, how much the answer at a step counts: 0 or 1.
    """

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array


@dataclasses.dataclass(frozen=True)
class Task:
    """Sequences to learn from, and what an answer is worth.

    `sample` draws a batch ``(key, size, split)``: pure, for ``jit`` and for ``vmap`` over keys.
    `held_out` returns the fixed sequences of a split on which scores are computed. Outputs are
    logits of classes, or values. ``counted``
    is the number of steps that count in a sequence, on average; ``chance`` the score of the best
    answer that does not look at the inputs; from ``threshold`` on, the task counts as learned.
    ``truncations`` are the short and the long window of truncated backpropagation through time;
    ``batch`` and ``updates`` the budget of training.
    """

    sample: Callable[[Any, int, Split], Batch]
    held_out: Callable[[Split], Batch]
    outputs: int
    threshold: float
    truncations: tuple[int, int]
    updates: int
    kind: Literal["classes", "values"] = "classes"
    counted: float = 1.0
    chance: float = 0.0
    batch: int = 32

    @functools.cached_property
    def _shape(self) -> tuple[int, ...]:
        batch = jax.eval_shape(lambda key: self.sample(key, 1, "train"), jax.random.key(0))
        shape: tuple[int, ...] = batch.inputs.shape
        return shape

    @property
    def length(self) -> int:
        return self._shape[0]

    @property
    def features(self) -> int:
        return self._shape[2]

    def losses(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the loss of every answer, of one step or of all: ``(..., outputs)`` to ``(...)``.

        A batch's loss is the sum of these times ``weights``, over ``counted`` and the batch size.
        """
        if self.kind == "classes":
            return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return jnp.sum((outputs - targets) ** 2, axis=-1)

    def score(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Return how good answers ``(T, B, outputs)`` are; higher is better, 1 is best.

        The accuracy, or the part of the variance that is explained.
        """
        weights = batch.weights / jnp.sum(batch.weights)
        if self.kind == "classes":
            return jnp.sum(weights * (jnp.argmax(outputs, axis=-1) == batch.targets))
        weights = weights[..., None]
        mean = jnp.sum(weights * batch.targets, axis=(0, 1))
        spread = jnp.sum(weights * (batch.targets - mean) ** 2)
        return 1 - jnp.sum(weights * (outputs - batch.targets) ** 2) / spread

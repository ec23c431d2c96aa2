"""How batches are drawn: of sequences that are made up, of examples, of windows of a series."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .task import SPLITS, Batch, Split

HELD_OUT: dict[Split, int] = {"train": 256, "validation": 256, "test": 1024}
"""Fixed sequences of a split, where there are as many as one likes."""

Draw = Callable[[Any, int, Split], Batch]
HeldOut = Callable[[Split], Batch]


def made_up(make: Callable[[Any, int], Batch]) -> tuple[Draw, HeldOut]:
    """Return draws of a generator ``(key, size)``; no split has a sequence of another's keys."""

    def sample(key: Any, size: int, split: Split) -> Batch:
        return make(jax.random.fold_in(key, SPLITS.index(split)), size)

    def held_out(split: Split) -> Batch:
        return jax.jit(sample, static_argnums=(1, 2))(jax.random.key(0), HELD_OUT[split], split)

    return sample, held_out


class Examples(NamedTuple):
    """Sequences ``(N, T, F)`` of a data set, their labels ``(N,)`` and their lengths ``(N,)``."""

    inputs: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray


def of_examples(splits: Mapping[Split, Examples]) -> tuple[Draw, HeldOut]:
    """Return draws of labelled sequences; the answer at the last step of each is what counts."""
    arrays = {split: Examples(*map(jnp.asarray, found)) for split, found in splits.items()}

    def batch_of(found: Examples) -> Batch:
        steps = jnp.arange(found.inputs.shape[1])[:, None]
        weights = (steps == found.lengths - 1).astype(jnp.float32)
        targets = jnp.broadcast_to(found.labels, weights.shape)
        return Batch(found.inputs.swapaxes(0, 1), targets, weights)

    def sample(key: Any, size: int, split: Split) -> Batch:
        found = arrays[split]
        chosen = jax.random.randint(key, (size,), 0, len(found.labels))
        return batch_of(Examples(*(array[chosen] for array in found)))

    return sample, lambda split: batch_of(arrays[split])


def most_frequent(splits: Mapping[Split, Examples]) -> float:
    """Return how often the most frequent label of the test is right there."""
    labels = splits["test"].labels
    return round(float(np.bincount(labels).max() / len(labels)), 3)


Starts = Mapping[Split, np.ndarray]
"""Where the windows of a split begin. In training all are drawn from, held out are these alone."""


def of_windows(
    inputs: np.ndarray,
    targets: np.ndarray,
    starts: Starts,
    length: int,
    washout: int,
    encode: Callable[[Any], Any] = lambda inputs: inputs,
) -> tuple[Draw, HeldOut]:
    """Return draws of windows of long arrays, time first; answers count after the washout.

    A window of inputs is encoded when it is seen.
    """
    seen, said = jnp.asarray(inputs), jnp.asarray(targets)
    begins = {split: jnp.asarray(found) for split, found in starts.items()}
    steps = jnp.arange(length)[:, None]

    def windows(first: jax.Array) -> Batch:
        places = steps + first
        weights = jnp.broadcast_to(steps >= washout, places.shape).astype(jnp.float32)
        return Batch(encode(seen[places]), said[places], weights)

    def sample(key: Any, size: int, split: Split) -> Batch:
        found = begins[split]
        return windows(found[jax.random.randint(key, (size,), 0, len(found))])

    return sample, lambda split: windows(begins[split])


def windows_in_time(total: int, length: int, washout: int, ahead: int) -> dict[Split, np.ndarray]:
    """Return where windows of a series begin: three fifths to learn from, then a fifth each.

    What counts of a window, after the washout and up to ``ahead`` steps later, lies in its split;
    what was before is known when it is asked for. Of held-out windows every answer counts once.
    """
    one, two = total * 3 // 5, total * 4 // 5
    counted, reach = length - washout, length - 1 + ahead
    return {
        "train": np.arange(one - reach),
        "validation": np.arange(one - washout, two - reach, counted),
        "test": np.arange(two - washout, total - reach, counted),
    }

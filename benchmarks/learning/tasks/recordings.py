"""Classification of recordings of speech and movements, from the package aeon."""

from collections.abc import Sequence

import numpy as np

from braintrace._optional import optional_import

from .draws import Examples, most_frequent, of_examples
from .task import Split, Task


def japanese_vowels() -> Task:
    """Which of nine speakers said a vowel: 12 coefficients of speech at each of 7 to 29 steps."""
    return _task("load_japanese_vowels", threshold=0.85, truncations=(4, 14), updates=300)


def basic_motions() -> Task:
    """Standing, running, walking or badminton: acceleration and rotation of a wrist."""
    return _task("load_basic_motions", threshold=0.8, truncations=(12, 50), updates=200)


def gun_point() -> Task:
    """A gun drawn or a finger pointed: the height of a hand, every second value."""
    return _task("load_gunpoint", threshold=0.8, truncations=(9, 37), updates=300, every=2)


def _task(
    loader: str, threshold: float, truncations: tuple[int, int], updates: int, every: int = 1
) -> Task:
    load = getattr(optional_import("aeon.datasets", "evidence"), loader)
    splits = split(load(split="train"), load(split="test"), every)
    return Task(
        *of_examples(splits),
        outputs=int(splits["train"].labels.max()) + 1,
        chance=most_frequent(splits),
        threshold=threshold,
        truncations=truncations,
        batch=16,
        updates=updates,
    )


Loaded = tuple[Sequence[np.ndarray], np.ndarray]
"""Recordings ``(channels, steps)`` and what they are called."""


def split(train: Loaded, test: Loaded, every: int = 1) -> dict[Split, Examples]:
    """Return padded recordings, every third of each class of those for training as validation.

    The mean and the deviation of each channel, by which all are scaled, are those of training.
    """
    is_validation = np.zeros(len(train[1]), bool)
    for name in np.unique(train[1]):
        is_validation[np.flatnonzero(train[1] == name)[2::3]] = True
    names = np.unique(train[1])
    length = max(recording.shape[1] for recording in [*train[0], *test[0]])
    parts: dict[Split, Loaded] = {
        "train": _chosen(train, ~is_validation),
        "validation": _chosen(train, is_validation),
        "test": test,
    }
    seen = np.concatenate([recording.T for recording in parts["train"][0]])
    mean, deviation = seen.mean(axis=0), seen.std(axis=0)
    found: dict[Split, Examples] = {}
    for key, (recordings, labels) in parts.items():
        steps = [((recording.T - mean) / deviation)[::every] for recording in recordings]
        inputs = np.zeros((len(steps), -(-length // every), len(mean)), np.float32)
        for row, own in zip(inputs, steps, strict=True):
            row[: len(own)] = own
        lengths = np.array([len(own) for own in steps], np.int32)
        found[key] = Examples(inputs, np.searchsorted(names, labels).astype(np.int32), lengths)
    return found


def _chosen(found: Loaded, which: np.ndarray) -> Loaded:
    return [found[0][int(i)] for i in np.flatnonzero(which)], found[1][which]

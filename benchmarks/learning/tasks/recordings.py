"""Classification of recordings of speech, from the package aeon (it takes no NumPy of 2.4)."""

from collections.abc import Sequence

import numpy as np

from .draws import Examples, most_frequent, of_examples
from .task import Split, Task


def japanese_vowels() -> Task:
    """Which of nine speakers said a vowel: 12 coefficients of speech at each of 7 to 29 steps."""
    from aeon.datasets import load_japanese_vowels

    splits = split(load_japanese_vowels(split="train"), load_japanese_vowels(split="test"))
    return Task(
        *of_examples(splits),
        outputs=9,
        chance=most_frequent(splits),
        threshold=0.85,
        truncations=(4, 14),
        batch=16,
        updates=300,
    )


Loaded = tuple[Sequence[np.ndarray], np.ndarray]
"""Recordings ``(channels, steps)`` and what they are called."""


def split(train: Loaded, test: Loaded) -> dict[Split, Examples]:
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
        steps = [(recording.T - mean) / deviation for recording in recordings]
        inputs = np.zeros((len(steps), length, len(mean)), np.float32)
        for row, own in zip(inputs, steps, strict=True):
            row[: len(own)] = own
        lengths = np.array([len(own) for own in steps], np.int32)
        found[key] = Examples(inputs, np.searchsorted(names, labels).astype(np.int32), lengths)
    return found


def _chosen(found: Loaded, which: np.ndarray) -> Loaded:
    return [found[0][int(i)] for i in np.flatnonzero(which)], found[1][which]

"""Handwritten digits, one row or one pixel at a step; the answer is given at the last one."""

import numpy as np

from .draws import Examples, most_frequent, of_examples
from .task import Split, Task

SOURCE = "1,797 images of the UCI Optical Recognition of Handwritten Digits (scikit-learn)"


def by_rows() -> Task:
    """Eight pixels at a step."""
    return _digits("digits by rows", steps=8, threshold=0.8, truncations=(2, 4), updates=500)


def by_pixels() -> Task:
    """One pixel at a step."""
    return _digits("digits by pixels", steps=64, threshold=0.5, truncations=(8, 32), updates=600)


def _digits(
    name: str, steps: int, threshold: float, truncations: tuple[int, int], updates: int
) -> Task:
    # Images stand in the order in which they were written: blocks keep most writers apart.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32).reshape(len(images), steps, -1)
    lengths = np.full(len(images), steps, np.int32)
    everything = images, labels.astype(np.int32), lengths
    first, second = len(images) * 3 // 5, len(images) * 4 // 5
    splits: dict[Split, Examples] = {
        "train": Examples(*(array[:first] for array in everything)),
        "validation": Examples(*(array[first:second] for array in everything)),
        "test": Examples(*(array[second:] for array in everything)),
    }
    sample, held_out = of_examples(splits)
    return Task(
        name=name,
        source=SOURCE,
        features=images.shape[-1],
        outputs=10,
        length=steps,
        kind="classes",
        counted=1.0,
        chance=most_frequent(splits),
        threshold=threshold,
        truncations=truncations,
        batch=32,
        updates=updates,
        sample=sample,
        held_out=held_out,
    )

"""Handwritten digits, one row at a step; the answer is given at the last one."""

import numpy as np

from .draws import Examples, most_frequent, of_examples
from .task import Split, Task


def by_rows() -> Task:
    """Eight pixels at a step."""
    steps = 8
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
    return Task(
        *of_examples(splits),
        outputs=10,
        chance=most_frequent(splits),
        threshold=0.8,
        truncations=(2, 4),
        updates=500,
    )

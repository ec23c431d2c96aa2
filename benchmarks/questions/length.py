"""Time and memory over the length of a sequence.

At a fixed chunk size, time should be ``a + b T``; the table has the largest deviation from this
line, fitted to relative errors. Peak memory should be constant. All inputs exist before the first
gradient, and sequences run from the shortest to the longest.
"""

from functools import partial
from typing import Any

import numpy as np

from .. import subjects
from ..case import Case, Measurements, Prepared, Subject, Target
from ..networks import dense
from ..subjects import Task

STEPS = (64, 512, 4096, 65536)
QUICK = (64, 128, 256)
HIDDEN, BATCH, CHUNK = 128, 4, 16
DEVIATION = "largest relative deviation from a + b T"
GROWTH = "peak memory at the longest T / at the shortest"


def line(steps: Any, seconds: Any) -> tuple[float, float]:
    """Return ``a`` and ``b`` of the line that is nearest in relative terms."""
    steps, seconds = np.asarray(steps, float), np.asarray(seconds)
    matrix = np.stack([np.ones_like(steps), steps], axis=1) / seconds[:, None]
    a, b = np.linalg.lstsq(matrix, np.ones_like(steps), rcond=None)[0]
    return float(a), float(b)


def growth(found: Measurements) -> dict[str, float]:
    """Return how time and memory depend on the number of steps."""
    steps = [int(label.removeprefix("T=")) for label in found.seconds]
    seconds = list(found.seconds.values())
    a, b = line(steps, seconds)
    fitted = a + b * np.asarray(steps)
    peaks = list(found.peaks.values())
    return {
        "a (seconds)": a,
        "b (seconds per step)": b,
        DEVIATION: float(np.max(np.abs(seconds / fitted - 1))),
        GROWTH: peaks[-1] / peaks[0],
    }


def prepare(lengths: tuple[int, ...], hidden: int, batch: int, chunk: int) -> Prepared:
    """Return sequence gradients of all lengths."""
    tasks = {f"T={steps}": Task(dense(hidden=hidden), steps, batch) for steps in lengths}
    for task in tasks.values():
        for sequence in task.data:
            sequence.block_until_ready()

    def subject(task: Task) -> Subject:
        return subjects.online(task, "d_rtrl", chunk)

    return Prepared(
        {label: partial(subject, task) for label, task in tasks.items()},
        derive=growth,
    )


def case(
    lengths: tuple[int, ...],
    hidden: int = HIDDEN,
    batch: int = BATCH,
    chunk: int = CHUNK,
) -> Case:
    """Return the case of some lengths."""
    return Case(
        name=f"length/T={lengths[0]} to {lengths[-1]}",
        parameters={
            "hidden": hidden,
            "batch": batch,
            "chunk": chunk,
            "lengths": list(lengths),
        },
        build=lambda: prepare(lengths, hidden, batch, chunk),
        targets=(Target(DEVIATION, None, 0.1), Target(GROWTH, None, 1.1)),
        quick=lengths == QUICK,
        full=lengths == STEPS,
    )


def cases(platform: str) -> list[Case]:
    """Return the lengths of the targets, and short ones."""
    return [case(STEPS), case(QUICK)]

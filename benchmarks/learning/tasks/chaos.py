"""A chaotic series of one number, of which a later value is to be said."""

import numpy as np

from .draws import of_windows, windows_in_time
from .task import Task

SAMPLES, LENGTH, WASHOUT, AHEAD = 6000, 60, 20, 5


def lorenz() -> Task:
    """The first coordinate of the Lorenz system alone, seen every 0.05 of time, 0.25 ahead."""
    series = lorenz_series(SAMPLES, every=5)[:, 0]
    starts = windows_in_time(len(series), LENGTH, WASHOUT, AHEAD)
    seen = series[: starts["train"][-1] + LENGTH]
    scaled = ((series - seen.mean()) / seen.std()).astype(np.float32)[:, None]
    targets = np.roll(scaled, -AHEAD, axis=0)
    draws = of_windows(scaled, targets, starts, LENGTH, WASHOUT)
    return Task(
        *draws,
        outputs=1,
        kind="values",
        counted=float(LENGTH - WASHOUT),
        threshold=0.95,
        truncations=(8, 30),
        batch=16,
        updates=300,
    )


def lorenz_series(samples: int, every: int, step: float = 0.01) -> np.ndarray:
    """Return ``samples`` points ``(samples, 3)`` after a transient, one of ``every`` steps.

    A step is one of the method of Runge and Kutta of fourth order.
    """
    points = [np.ones(3)]
    for _ in range(1000 + samples * every):
        point = points[-1]
        first = _lorenz(point)
        second = _lorenz(point + 0.5 * step * first)
        third = _lorenz(point + 0.5 * step * second)
        fourth = _lorenz(point + step * third)
        points.append(point + step * ((first + 2 * second + 2 * third + fourth) / 6))
    return np.array(points[1000:-1:every])


def _lorenz(point: np.ndarray) -> np.ndarray:
    x, y, z = point
    return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

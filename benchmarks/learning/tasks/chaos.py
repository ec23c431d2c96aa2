"""Chaotic series of one number, of which a later value is to be said; its past has to be known."""

from collections.abc import Callable

import numpy as np

from .draws import of_windows, windows_in_time
from .task import Task

SAMPLES, LENGTH, WASHOUT = 6000, 60, 20


def mackey_glass(ahead: int = 5, length: int = LENGTH) -> Task:
    """The Mackey-Glass equation with delay 17, seen every 3 units of time, 15 units ahead."""
    return _prediction(mackey_glass_series(SAMPLES, every=30), ahead, length)


def lorenz(ahead: int = 5, length: int = LENGTH) -> Task:
    """The first coordinate of the Lorenz system alone, seen every 0.05 of time, 0.25 ahead."""
    return _prediction(lorenz_series(SAMPLES, every=5)[:, 0], ahead, length)


def _prediction(series: np.ndarray, ahead: int, length: int) -> Task:
    starts = windows_in_time(len(series), length, WASHOUT, ahead)
    seen = series[: starts["train"][-1] + length]
    scaled = ((series - seen.mean()) / seen.std()).astype(np.float32)[:, None]
    targets = np.roll(scaled, -ahead, axis=0)
    draws = of_windows(scaled, targets, starts, length, WASHOUT)
    return Task(
        *draws,
        outputs=1,
        kind="values",
        counted=float(length - WASHOUT),
        threshold=0.95,
        truncations=(8, 30),
        batch=16,
        updates=300,
    )


def mackey_glass_series(
    samples: int, every: int, delay: float = 17.0, step: float = 0.1
) -> np.ndarray:
    """Return ``samples`` values after a transient, one of ``every`` steps of Heun's method.

    The delay is a multiple of the step, so both values of the past that a step needs are on its
    grid, and the method keeps its second order.
    """
    lag, skipped = round(delay / step), round(500 / step)
    values = [1.2] * (lag + 1)
    for t in range(lag, lag + skipped + samples * every):
        x, before, after = values[t], values[t - lag], values[t + 1 - lag]
        slope = 0.2 * before / (1 + before**10) - 0.1 * x
        then = 0.2 * after / (1 + after**10) - 0.1 * (x + step * slope)
        values.append(x + step / 2 * (slope + then))
    return np.array(values[-samples * every :: every])


def lorenz_series(samples: int, every: int, step: float = 0.01) -> np.ndarray:
    """Return ``samples`` points ``(samples, 3)`` after a transient, one of ``every`` steps."""
    points: list[Point] = []
    point: Point = (1.0, 1.0, 1.0)
    for t in range(1000 + samples * every):
        if t >= 1000 and (t - 1000) % every == 0:
            points.append(point)
        point = runge_kutta(_lorenz, point, step)
    return np.array(points)


Point = tuple[float, ...]


def _lorenz(point: Point) -> Point:
    x, y, z = point
    return 10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z


def runge_kutta(slope: Callable[[Point], Point], point: Point, step: float) -> Point:
    """Return the point one step later, by the method of fourth order."""

    def moved(by: Point, part: float) -> Point:
        return tuple(p + part * step * b for p, b in zip(point, by, strict=True))

    first = slope(point)
    second = slope(moved(first, 0.5))
    third = slope(moved(second, 0.5))
    fourth = slope(moved(third, 1.0))
    slopes = zip(first, second, third, fourth, strict=True)
    return moved(tuple((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in slopes), 1.0)

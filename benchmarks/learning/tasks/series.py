"""Real series, bundled with statsmodels: how will the next value differ from the last?"""

from typing import NamedTuple

import numpy as np
import pandas

from .draws import of_windows, windows_in_time
from .task import Split, Task

LENGTH, WASHOUT = 60, 24


def next_values() -> Task:
    """Sunspots by year, carbon dioxide by week and the Pacific's temperature by month, as one task.

    Changes are in units of their deviation while learning, so that chance, which is to expect the
    mean change, is about what the forecast "the last value" achieves.
    """
    parts = [_part(series, place) for place, series in enumerate(load_series())]
    widest = max(len(part.starts["train"]) for part in parts)
    before = np.cumsum([0, *(len(part.inputs) for part in parts)])
    found = [
        {split: starts + begin for split, starts in part.starts.items()}
        for part, begin in zip(parts, before, strict=False)
    ]
    starts: dict[Split, np.ndarray] = {
        # As often a window of one series as of another.
        "train": np.concatenate([np.resize(own["train"], widest) for own in found]),
        "validation": np.concatenate([own["validation"] for own in found]),
        "test": np.concatenate([own["test"] for own in found]),
    }
    draws = of_windows(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        starts,
        LENGTH,
        WASHOUT,
        measured=np.concatenate([part.measured for part in parts]),
    )
    return Task(
        *draws,
        outputs=1,
        kind="values",
        counted=float(LENGTH - WASHOUT),
        threshold=0.4,
        truncations=(8, 30),
        batch=16,
        updates=200,
    )


class Series(NamedTuple):
    """Values ``(T,)``, NaN where none was measured, and the steps of a season."""

    values: np.ndarray
    season: int


def load_series() -> list[Series]:
    from statsmodels.datasets import co2, elnino, sunspots

    return [
        Series(sunspots.load_pandas().data.SUNACTIVITY.to_numpy(float), 11),
        Series(co2.load_pandas().data.co2.to_numpy(float), 52),
        Series(elnino.load_pandas().data.to_numpy(float)[:, 1:].ravel(), 12),
    ]


class _Part(NamedTuple):
    inputs: np.ndarray
    targets: np.ndarray
    measured: np.ndarray
    starts: dict[Split, np.ndarray]


def _part(series: Series, place: int, series_count: int = 3) -> _Part:
    """Return inputs and targets of one series, scaled by its training part."""
    filled = pandas.Series(series.values).ffill()
    values = filled.to_numpy()
    change = np.diff(values, prepend=values[0])
    level = values - filled.rolling(series.season, min_periods=1).mean().to_numpy()
    starts = windows_in_time(len(values), LENGTH, WASHOUT, 1, first=series.season)
    seen = slice(series.season, starts["train"][-1] + LENGTH)
    one_hot = np.tile(np.eye(series_count)[place], (len(values), 1))
    columns = [_scaled(level, seen)[:, None], _scaled(change, seen)[:, None], one_hot]
    targets = np.roll(_scaled(change, seen), -1)[:, None]
    is_known = ~np.isnan(series.values)
    measured = is_known & np.roll(is_known, -1)
    inputs = np.concatenate(columns, axis=1).astype(np.float32)
    return _Part(inputs, targets.astype(np.float32), measured, starts)


def _scaled(values: np.ndarray, seen: slice) -> np.ndarray:
    return (values - values[seen].mean()) / values[seen].std()

"""The CSV file of the runs: frozen dataclasses of plain values, one a row."""

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "results" / "learning.csv"
DIGITS = 4
POINTS = 20
"""Points of training at which a score is computed, besides the start."""

COSINES = 8
"""Points of training at which gradients are compared."""

Numbers = tuple[float | None, ...]
"""Numbers in one entry, separated by spaces; ``None`` (written nan) where one is not finite."""


def points_of(updates: int) -> tuple[int, ...]:
    """Return after how many updates scores are computed, the start among them."""
    return tuple(range(0, updates + 1, max(1, -(-updates // POINTS))))


def spread_out(count: int, chosen: int) -> list[int]:
    """Return some of ``count`` places, the first and the last among them."""
    places = {round(i * (count - 1) / (chosen - 1)) for i in range(chosen)}
    return sorted(places)


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one seed.

    The first four entries are its key. ``refused`` has the reason if the library refuses the method
    on this network; all that follows is then empty. ``rate`` has the best mean score in validation
    over the first seeds, ``score`` is that on the test set (``None``: not finite). ``validation``
    has the last score at every rate of the grid, empty for later seeds, which run at the chosen
    one; ``curve`` scores at the chosen rate, by `points`. From ``cosine`` on (to BPTT, over the
    cell's parameters, by `cosine_points`), entries are of the first seed; costs are those of a
    sequence's gradient.
    """

    task: str
    cell: str
    method: str
    seed: int
    units: int
    batch: int
    updates: int
    steps: int
    window: int | None
    chance: float
    threshold: float
    measured: str
    machine: str
    versions: str
    refused: str = ""
    rate: float | None = None
    score: float | None = None
    validation: Numbers = ()
    curve: Numbers = ()
    cosine: Numbers = ()
    trace_bytes: int | None = None
    peak_bytes: int | None = None
    step_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.cell, self.method

    @property
    def points(self) -> tuple[int, ...]:
        """Updates of the entries of `curve`."""
        return points_of(self.updates)

    @property
    def cosine_points(self) -> tuple[int, ...]:
        """Updates of the entries of `cosine`."""
        return tuple(self.points[i] for i in spread_out(len(self.points), COSINES))


def finite(value: Any) -> float | None:
    """Return a number as a Python float; ``None`` if it is not finite."""
    return float(value) if math.isfinite(value) else None


def number(text: str) -> float | None:
    """Return a number; ``None`` for an empty text and for nan."""
    return finite(float(text or "nan"))


_PARSERS: dict[Any, Any] = {
    str: str,
    int: int,
    float: float,
    int | None: lambda text: int(text) if text else None,
    float | None: number,
    Numbers: lambda text: tuple(map(number, text.split())),
}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(_text(entry) or "nan" for entry in value)
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}" if math.isfinite(value) else ""
    return "" if value is None else str(value)


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none if there is no file."""
    if not path.exists():
        return []
    parsers = {field.name: _PARSERS[field.type] for field in dataclasses.fields(Row)}
    with path.open(newline="") as file:
        return [
            Row(**{name: parsers[name](text) for name, text in found.items()})
            for found in csv.DictReader(file)
        ]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows: the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    with draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Row))
        writer.writerows(map(_text, vars(row).values()) for row in rows)
    draft.replace(path)


def add(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file, instead of the rows with the same keys."""
    stored = {(row.key, row.seed): row for row in read(path)}
    write(path, (stored | {(row.key, row.seed): row for row in rows}).values())

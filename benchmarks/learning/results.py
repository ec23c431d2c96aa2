"""Numbers that the tables and figures derive from the rows.

The *gain* of a run is its mean score on the test set minus chance. The *relative gain* is the gain
over the mean gain of reference runs, at most 1. It exists only if a reference has learned: if it is
at least `LEARNED` of the way from chance to the threshold of the task. The references are the
methods with the exact gradient. They differ by rounding alone, yet their scores differ, so that a
single one would be a matter of chance.

A difference of means is clear if it is larger than `ERRORS` times its standard error, pooled over
the seeds of both sides (`is_positive`), and undecided otherwise.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from . import tasks
from .methods import BY_NAME
from .rows import Row
from .runs import WIDE_CELLS

METHODS = list(BY_NAME)
LEARNED = 0.5
REFERENCE = "bptt"
EXACT = ("bptt", "rtrl", "ostl-recurrent")
"""Methods with the gradient of BPTT, up to rounding, in one recurrent layer."""

PART = 0.9
"""Relative gain from which a method counts as equal to its reference."""

ERRORS = 2.0


@dataclasses.dataclass(frozen=True)
class Run:
    """All seeds of a task, a cell and a method."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """The first seed, with the costs and the cosine."""
        return self.rows[0]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.first.key

    @property
    def ran(self) -> bool:
        """Whether the library supports the method on this network."""
        return not self.first.refused

    @cached_property
    def scores(self) -> list[float]:
        """Finite scores on the test set."""
        return [row.score for row in self.rows if row.score is not None]

    @property
    def lost(self) -> int:
        """Number of seeds that diverged at the chosen rate."""
        return len(self.rows) - len(self.scores)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def error(self) -> float:
        """Standard error of the mean score."""
        return standard_error(self.scores)

    @property
    def gain(self) -> float | None:
        """Mean score minus chance; ``None`` if a seed diverged."""
        return None if self.mean is None or self.lost else self.mean - self.first.chance

    @property
    def learned(self) -> bool:
        """Whether the gain is large enough for a reference."""
        least = LEARNED * (self.first.threshold - self.first.chance)
        return self.gain is not None and self.gain >= least

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Mean score in validation by updates, where all seeds have one."""
        means = [mean_of(values) for values in zip(*(row.curve for row in self.rows), strict=True)]
        return _finite(self.first.points, means)

    @property
    def cosine(self) -> list[tuple[int, float]]:
        """Cosine to BPTT by updates."""
        return _finite(self.first.cosine_points, self.first.cosine)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return a mean; ``None`` if there is no value or one is not finite."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _finite(points: Sequence[int], values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(at, value) for at, value in zip(points, values, strict=False) if value is not None]


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def is_positive(difference: float, error: float) -> bool | None:
    """Return whether a difference is positive; ``None`` if its error leaves that open."""
    return None if abs(difference) <= ERRORS * error else difference > 0


def relative_gain(run: Run | None, *references: Run | None) -> float | None:
    """Return the gain of a run over the mean gain of references; 0 if a seed diverged."""
    known = [other for other in references if other is not None and other.gain is not None]
    if run is None or not run.ran or not any(other.learned for other in known):
        return None
    gain = statistics.fmean(other.gain for other in known if other.gain is not None)
    return 0.0 if run.gain is None else min(1.0, run.gain / gain)


def gains_more(run: Run, *references: Run | None, part: float = 1.0) -> bool | None:
    """Return whether a run gains more than a part of the references' mean gain.

    ``None`` if the difference is within its error.
    """
    if run.gain is None:
        return False
    known = [other for other in references if other is not None and other.gain is not None]
    gain = statistics.fmean(other.gain for other in known if other.gain is not None)
    error = math.hypot(*(other.error for other in known)) / len(known)
    return is_positive(run.gain - part * gain, math.hypot(run.error, part * error))


@dataclasses.dataclass(frozen=True)
class Gains:
    """The relative gain of a method over pairs of task and cell.

    ``parts`` are in rising order, ``matched`` says whether each is at least `PART` (``None``:
    undecided), ``reached`` counts pairs above the threshold, ``seeds`` those of each pair.
    """

    parts: list[tuple[float, str, str]]
    matched: list[bool | None]
    reached: int
    seeds: list[int]

    @property
    def median(self) -> float | None:
        return statistics.median(part for part, *_ in self.parts) if self.parts else None


@dataclasses.dataclass(frozen=True)
class Results:
    """Runs in the order of the catalogues."""

    runs: tuple[Run, ...]

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, str], Run]:
        return {run.key: run for run in self.runs}

    def find(self, task: str, cell: str, method: str) -> Run | None:
        """Return a run, or ``None`` if there is none."""
        return self._by_key.get((task, cell, method))

    def where(self, belongs: Callable[[Run], bool]) -> "Results":
        """Return the runs that fulfil a condition, in the same order."""
        return Results(tuple(run for run in self.runs if belongs(run)))

    def _names(self, place: int) -> list[str]:
        return list(dict.fromkeys(run.key[place] for run in self.runs))

    @property
    def tasks(self) -> list[str]:
        return self._names(0)

    @property
    def cells(self) -> list[str]:
        return self._names(1)

    @property
    def methods(self) -> list[str]:
        """Names of methods, in their order even if the first tasks lack some."""
        return sorted(self._names(2), key=METHODS.index)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every pair of task and cell with a run."""
        yield from dict.fromkeys(run.key[:2] for run in self.runs)

    def exact(self, task: str, cell: str) -> list[Run | None]:
        return [self.find(task, cell, method) for method in EXACT]

    def gain(self, task: str, cell: str, method: str) -> float | None:
        """Return the gain of a method relative to the exact gradient."""
        return relative_gain(self.find(task, cell, method), *self.exact(task, cell))

    def gains(self, method: str) -> Gains:
        """Return the relative gains of a method over all pairs."""
        parts, matched, reached, seeds = [], [], 0, []
        for task, cell in self.pairs():
            run = self.find(task, cell, method)
            if run is None or not run.ran:
                continue
            seeds.append(len(run.rows))
            reached += run.mean is not None and run.mean >= run.first.threshold
            part = self.gain(task, cell, method)
            if part is not None:
                parts.append((part, task, cell))
                matched.append(gains_more(run, *self.exact(task, cell), part=PART))
        return Gains(sorted(parts), matched, reached, seeds)

    def relative_cost(self, task: str, cell: str, method: str, *fields: str) -> float | None:
        """Return the sum of some fields of `Row` over that of BPTT."""
        pair = self.find(task, cell, method), self.find(task, cell, REFERENCE)
        own, base = (
            sum(getattr(run.first, field) or 0.0 for field in fields) if run else None
            for run in pair
        )
        return own / base if own and base else None

    def median_cost(self, method: str, field: str) -> float | None:
        """Return the median over pairs of a cost relative to BPTT."""
        found = (self.relative_cost(*pair, method, field) for pair in self.pairs())
        known = [value for value in found if value is not None]
        return statistics.median(known) if known else None


def place_of(key: Sequence[Any]) -> tuple[int, ...]:
    """Return the place of a task, a cell and a method in the catalogues."""
    orders = tasks.STORED, WIDE_CELLS, METHODS
    return tuple(order.index(name) for order, name in zip(orders, key, strict=False))


def sort(rows: Iterable[Row]) -> Results:
    """Return runs by task, cell and method."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (*place_of(row.key), row.seed)):
        groups.setdefault(row.key, []).append(row)
    return Results(tuple(Run(tuple(own)) for own in groups.values()))

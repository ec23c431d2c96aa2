"""What the records say, as numbers that tables, plots and statements share.

The *gain* of a run is its mean score on the test set less that of chance. The *part that is kept*
is its gain over that of other runs, in their mean, and at most 1. It is told only where one of them
has learned something: where it went at least `LEARNED` of the way from chance to the threshold of
the task. The others are the ways with the exact gradient, which differ by rounding alone and end
apart: a single one of them would let luck decide what everybody else keeps.

A difference of means *counts* where it is larger than `ERRORS` times its standard error, pooled
over the seeds of both sides (`counts`); whatever is smaller is left undecided.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from .record import Price, Record

LEARNED = 0.5
REFERENCE = "bptt"
EXACT = ("bptt", "rtrl", "ostl-recurrent")
"""The ways whose gradient is that of backpropagation but for rounding, in one recurrent layer."""

PART = 0.9
"""Who keeps this part of another's gain over chance has matched it."""

ERRORS = 2.0
"""A difference counts that is larger than so many times its standard error."""

TWINS = {"eprop": "d_rtrl", "rflo": "d_rtrl-feedback"}
"""Ways of one program by another name; those that differ in the optimizer are others."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One record, and what follows from it."""

    record: Record

    @property
    def key(self) -> tuple[str, str, str]:
        """Task, cell and way."""
        settings = self.record.settings
        return settings.task, settings.cell, settings.way

    @cached_property
    def scores(self) -> list[float]:
        """Those of the seeds that ended in finite numbers, at the best rate, on the test set."""
        return [score for score in self.record.test if score is not None]

    @property
    def lost(self) -> int:
        """How many seeds ended in numbers that are not finite, at the best rate."""
        return len(self.record.settings.seeds) - len(self.scores)

    @property
    def ran(self) -> bool:
        """Whether the library takes the rule for this network."""
        return self.record.refused is None

    @property
    def mean(self) -> float | None:
        """The mean score over seeds."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def spread(self) -> float:
        """The standard deviation of the score over seeds."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean score."""
        return self.spread / math.sqrt(len(self.scores)) if self.scores else 0.0

    @property
    def gain(self) -> float | None:
        """The mean score less that of chance; ``None`` where a seed was lost."""
        if self.mean is None or self.lost:
            return None
        return self.mean - self.record.settings.chance

    @property
    def learned(self) -> bool:
        """Whether enough was learned for others to be measured by it."""
        settings = self.record.settings
        return self.gain is not None and self.gain >= LEARNED * (
            settings.threshold - settings.chance
        )

    @property
    def at_edge(self) -> int:
        """-1 where the best rate is the lowest that was tried, 1 where it is the highest."""
        rates, best = self.record.settings.rates, self.record.best_rate
        return (best == max(rates)) - (best == min(rates))

    @property
    def leads_at_edge(self) -> bool:
        """Whether the best rate is at an edge, and clearly better than the one next to it."""
        record = self.record
        if not self.at_edge or record.curves is None or record.best_rate is None:
            return False
        ordered = sorted(record.settings.rates)
        beside = ordered[-2 if self.at_edge > 0 else 1]
        own, other = (_last(record, rate) for rate in (record.best_rate, beside))
        if own is None or other is None:
            return own is not None
        difference = statistics.fmean(own) - statistics.fmean(other)
        return counts(difference, math.hypot(*map(standard_error, (own, other)))) is True

    @property
    def at_threshold(self) -> list[int]:
        """Updates after which the threshold was reached, of the seeds that reached it."""
        return [count for count in self.record.updates_to_threshold if count is not None]

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The mean score on the validation set at the best rate, where all seeds have one."""
        record = self.record
        if record.curves is None or record.best_rate is None:
            return []
        lanes = record.curves.scores[record.settings.rates.index(record.best_rate)]
        means = [_mean(values) for values in zip(*lanes, strict=True)]
        return finite(zip(record.curves.updates, means, strict=True))

    @property
    def cosine(self) -> list[tuple[int, float]]:
        """The cosine of the gradient of the cell's parameters to that of BPTT."""
        found = self.record.cosine
        return [] if found is None else finite(zip(found.updates, found.recurrent, strict=True))

    @property
    def mean_cosine(self) -> float | None:
        """Over all points at which there is one."""
        return statistics.fmean(value for _, value in self.cosine) if self.cosine else None


def _last(record: Record, rate: float) -> list[float] | None:
    """Return the last validation scores at a rate; ``None`` where one of them is not finite."""
    if record.curves is None:
        return None
    lanes = record.curves.scores[record.settings.rates.index(rate)]
    known = [lane[-1] for lane in lanes if lane[-1] is not None]
    return known if len(known) == len(lanes) else None


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def counts(difference: float, error: float) -> bool | None:
    """Return whether a difference is above zero; ``None`` where its error leaves that open."""
    return None if abs(difference) <= ERRORS * error else difference > 0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def finite(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Return the points whose value is a number."""
    return [(place, value) for place, value in points if value is not None]


def kept(run: Run | None, *references: Run | None) -> float | None:
    """Return the part of the references' mean gain that a run keeps; lost seeds keep nothing."""
    known = [other for other in references if other is not None and other.gain is not None]
    if run is None or not run.ran or not any(other.learned for other in known):
        return None
    gain = statistics.fmean(other.gain for other in known if other.gain is not None)
    return 0.0 if run.gain is None else min(1.0, run.gain / gain)


def beyond(run: Run, *references: Run | None, part: float = 1.0) -> bool | None:
    """Return whether a run gains more than a part of the references' mean gain.

    ``None`` where the difference is within `ERRORS` standard errors; lost seeds gain nothing.
    """
    if run.gain is None:
        return False
    known = [other for other in references if other is not None and other.gain is not None]
    gain = statistics.fmean(other.gain for other in known if other.gain is not None)
    error = math.hypot(*(other.error for other in known)) / len(known)
    return counts(run.gain - part * gain, math.hypot(run.error, part * error))


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a way keeps of the gain of the exact gradient, over pairs of task and cell.

    Attributes
    ----------
    parts
        ``(part, task, cell)``, in rising order.
    matched
        Whether each of them is at least `PART`; ``None`` where the spread leaves it open.
    reached
        How many of the pairs it was tried on end above the threshold.
    tried
        Pairs of task and cell that it was tried on.
    """

    parts: list[tuple[float, str, str]]
    matched: list[bool | None]
    reached: int
    tried: int

    @property
    def median(self) -> float | None:
        """The median part."""
        return statistics.median(part for part, *_ in self.parts) if self.parts else None


@dataclasses.dataclass(frozen=True)
class Findings:
    """All runs, in the order of the catalogues."""

    runs: tuple[Run, ...]

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, str], Run]:
        return {run.key: run for run in self.runs}

    def find(self, task: str, cell: str, way: str) -> Run | None:
        """Return a run, or ``None`` where there is none."""
        return self._by_key.get((task, cell, way))

    def of(self, table: str, optimizer: str = "adam") -> "Findings":
        """Return the runs of one table that one optimizer made."""

        def belongs(run: Run) -> bool:
            settings = run.record.settings
            return (settings.table, settings.optimizer) == (table, optimizer)

        return self.where(belongs)

    def where(self, belongs: Callable[[Run], bool]) -> "Findings":
        """Return the runs of which something is true, in the same order."""
        return Findings(tuple(run for run in self.runs if belongs(run)))

    def of_cell(self, cell: str) -> "Findings":
        """Return the runs of one cell."""
        return self.where(lambda run: run.key[1] == cell)

    def complete(self) -> "Findings":
        """Return the runs of the pairs of task and cell on which every way has been tried."""
        ways = self.ways
        pairs = {pair for pair in self.pairs() if all(self.find(*pair, way) for way in ways)}
        return self.where(lambda run: run.key[:2] in pairs)

    @property
    def tasks(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(run.key[0] for run in self.runs))

    @property
    def cells(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(run.key[1] for run in self.runs))

    @property
    def ways(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(run.key[2] for run in self.runs))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every task and cell that something ran on."""
        yield from dict.fromkeys(run.key[:2] for run in self.runs)

    def part(self, task: str, cell: str, way: str) -> float | None:
        """Return what a way keeps of the gain of the exact gradient, on one task and cell."""
        return kept(self.find(task, cell, way), *self._exact(task, cell))

    def _exact(self, task: str, cell: str) -> list[Run | None]:
        return [self.find(task, cell, way) for way in EXACT]

    def kept(self, way: str) -> Kept:
        """Return what a way keeps of the gain of the exact gradient, over tasks and cells."""
        parts, matched, reached, tried = [], [], 0, 0
        for task, cell in self.pairs():
            run = self.find(task, cell, way)
            if run is None or not run.ran:
                continue
            tried += 1
            reached += run.mean is not None and run.mean >= run.record.settings.threshold
            part = self.part(task, cell, way)
            if part is not None:
                parts.append((part, task, cell))
                matched.append(beyond(run, *self._exact(task, cell), part=PART))
        return Kept(sorted(parts), matched, reached, tried)

    def ratios(self, way: str, what: str) -> list[float]:
        """Return a price of a way over that of backpropagation, by task and cell.

        ``what`` is a field of `record.Price`.
        """
        found = []
        for task, cell in self.pairs():
            price = price_of(self.find(task, cell, way), what)
            base = price_of(self.find(task, cell, REFERENCE), what)
            if price is not None and base:
                found.append(price / base)
        return found


def price_of(run: Run | None, what: str) -> float | None:
    """Return one field of the price of a run, where there is one."""
    price: Price | None = None if run is None else run.record.price
    return None if price is None else getattr(price, what)


def twin_ratios(findings: Findings) -> list[float]:
    """Return the time of a program over that of the same program, taken another time, sorted."""
    found = []
    for run in findings.runs:
        task, cell, way = run.key
        twin = TWINS.get(way, way.removesuffix("-rmsprop"))
        if twin != way:
            own, other = (
                price_of(one, "seconds_per_step") for one in (run, findings.find(task, cell, twin))
            )
            if own and other:
                found.append(own / other)
    return sorted(found)


def sort(records: Iterable[Record], orders: Sequence[Sequence[str]]) -> Findings:
    """Return runs by task, cell and way in the order of catalogues; unknown names come last."""

    def place(run: Run) -> list[tuple[int, str]]:
        return [
            (order.index(name) if name in order else len(order), name)
            for name, order in zip(run.key, orders, strict=True)
        ]

    return Findings(tuple(sorted(map(Run, records), key=place)))

"""The tables of the evidence, as lines of Markdown."""

import statistics
from collections.abc import Callable, Iterable

from ..markdown import table
from . import formats
from .formats import MISSING, digits
from .results import (
    PART,
    REFERENCE,
    Results,
    Run,
    cost,
    gains_more,
    is_positive,
    relative_gain,
    standard_error,
)
from .rows import StreamRow

Entry = Callable[[Run | None], str]
TIME, MEMORY = "step_seconds", "peak_bytes"
COMPARISONS = (
    ("immediate-rmsprop", "rtrl-rmsprop", ("leaky", "gru")),
    ("immediate", "rtrl", ("leaky", "gru")),
    ("d_rtrl", "bptt", ("alif",)),
    ("d_rtrl-feedback", "d_rtrl", ("leaky", "gru")),
    ("bptt-feedback", "bptt", ("leaky", "gru")),
    ("uoro", "snap-1", ("leaky", "gru")),
    ("d_rtrl", "immediate", ("leaky", "gru")),
    ("d_rtrl", "tbptt-short", ("leaky", "gru")),
    ("d_rtrl", "tbptt-long", ("leaky", "gru")),
    ("d_rtrl-short", "tbptt-short", ("leaky", "gru")),
    ("d_rtrl-long", "tbptt-long", ("leaky", "gru")),
)
"""A method, its reference, and the cells of both."""


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _answers(found: list[bool | None]) -> str:
    return "/".join(str(found.count(answer)) for answer in (True, None, False))


def _seeds(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{len(counts)} × {low}" if low == high else f"{len(counts)} × {low} to {high}"


def summary(core: Results) -> list[str]:
    """Return relative gain and cost of each method over the pairs of the core table."""
    rows = []
    for method in core.methods:
        gains = core.gains(method)
        if not gains.seeds:
            continue
        worst = MISSING
        if gains.parts:
            part, task, cell = gains.parts[0]
            worst = f"{digits(part)} ({formats.pair(task, cell)})"
        rows.append(
            [
                formats.method(method),
                _seeds(gains.seeds),
                digits(gains.median),
                worst,
                _answers(gains.matched),
                f"{gains.reached} of {len(gains.seeds)}",
                *(formats.times(_median(core.costs(method, what))) for what in (TIME, MEMORY)),
                formats.traces(_median(core.costs(method, "trace_bytes", relative=False))),
            ]
        )
    head = ["method", "pairs × seeds", "relative gain", "worst case"]
    head += [f"at least {PART}: yes/undecided/no", "reaches the threshold"]
    return table([*head, "time of a step", "temporary memory", "traces"], rows)


def by_task(results: Results, cell: str, entry: Entry) -> list[str]:
    """Return one table of a cell: a row per method, a column per task."""
    own = results.of_cell(cell)
    rows = [
        [formats.method(method), *(entry(own.find(task, cell, method)) for task in own.tasks)]
        for method in own.methods
    ]
    return table(
        [formats.cell(cell), *own.tasks], [row for row in rows if set(row[1:]) != {MISSING}]
    )


def by_method(results: Results, cell: str) -> list[str]:
    """Return the scores of a cell: a row per task, a column per method."""
    own = results.of_cell(cell)
    rows = (
        [task, *(formats.score(own.find(task, cell, method)) for method in results.methods)]
        for task in own.tasks
    )
    return table(["task", *map(formats.method, results.methods)], rows)


def costs(
    results: Results, what: str, text: Callable[[float | None], str], base: str = ""
) -> Entry:
    """Return the entries of a cost, with the ratio to BPTT in brackets."""

    def entry(run: Run | None) -> str:
        value = cost(run, what)
        if run is None or value is None:
            return MISSING if run is None or run.ran else formats.REFUSED
        task, cell, method = run.key
        least = cost(results.find(task, cell, REFERENCE), base or what)
        if not least or method == REFERENCE:
            return text(value)
        return f"{text(value)} ({formats.times(value / least)})"

    return entry


def of_cells(results: Results) -> list[str]:
    """Return one row per cell: of each method the relative gain, and the answers to `PART`."""
    methods = [method for method in results.methods if method != REFERENCE]
    rows = []
    for cell in results.cells:
        own = results.of_cell(cell)
        bptt = own.gains(REFERENCE)
        learned = f"{len(bptt.parts)} of {len(bptt.seeds)}"
        rows.append([formats.cell(cell), learned, *(_gain(own, method) for method in methods)])
    return table(["cell", "BPTT learns", *map(formats.method, methods)], rows)


def _gain(own: Results, method: str) -> str:
    gains = own.gains(method)
    if not gains.parts:
        return MISSING
    worst = digits(gains.parts[0][0])
    return f"{digits(gains.median)} ({worst}), {_answers(gains.matched)}"


def comparisons(results: Results) -> list[str]:
    """Return how often a method gains at least `PART` of a reference's gain, and more than it."""
    rows = []
    for method, other, cells in COMPARISONS:
        pairs = [
            (run, reference)
            for task, cell in results.pairs()
            if cell in cells
            and (run := results.find(task, cell, method))
            and (reference := results.find(task, cell, other))
        ]
        known = [pair for pair in pairs if relative_gain(*pair) is not None]
        if known:
            answers = (
                _answers([gains_more(*pair, part=part) for pair in known]) for part in (PART, 1.0)
            )
            names = formats.method(method), formats.method(other)
            cells_named = ", ".join(map(formats.cell, cells))
            rows.append([*names, cells_named, *answers, str(len(pairs) - len(known))])
    head = ["method", "reference", "cells", f"at least {PART} of the gain", "more", "left out"]
    return table(head, rows)


def failures(runs: Iterable[Run]) -> list[str]:
    """Return the runs with diverged networks."""
    rows = []
    for run in runs:
        if run.diverged:
            seeds = sum(bool(row.validation) for row in run.rows)
            found = (f"{count} of {seeds} at {rate:g}" for rate, count in run.diverged.items())
            task, cell, method = run.key
            rows.append([formats.method(method), task, formats.cell(cell), ", ".join(found)])
    return table(["method", "task", "cell", "diverged seeds, by learning rate"], rows)


def refusals(runs: Iterable[Run]) -> list[str]:
    """Return each unsupported method and cell with the reason."""
    reasons = {run.key[1:]: run.first.refused for run in runs if not run.ran}
    rows = [[formats.method(m), formats.cell(cell), why] for (cell, m), why in reasons.items()]
    return table(["method", "cell", "reason"], rows)


# --- updates during a sequence ---------------------------------------------------------------


class Streams:
    """Means over seeds of the rows of `online_updates`."""

    def __init__(self, rows: Iterable[StreamRow]) -> None:
        self.rows = tuple(rows)
        self.pairs = list(dict.fromkeys((row.task, row.cell) for row in self.rows))
        self.methods = list(dict.fromkeys(row.method for row in self.rows))
        self.every = sorted({row.every for row in self.rows})
        self.rates = sorted({row.rate for row in self.rows})

    def values(self, what: str, *place: object) -> list[float | None]:
        """Return a field by seed, at ``(task, cell, method, every, rate)``."""
        return [getattr(row, what) for row in self.rows if row.identity[:-1] == place]

    def mean(self, what: str, *place: object) -> float | None:
        """Return the mean of a field over seeds; ``None`` if one is not finite."""
        found = self.values(what, *place)
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known and len(known) == len(found) else None

    def best(self, task: str, cell: str, every: int) -> float | None:
        """Return the learning rate with the lowest loss."""
        losses = [
            (loss, rate)
            for rate in self.rates
            if (loss := self.mean("loss", task, cell, "rtrl", every, rate)) is not None
        ]
        return min(losses)[1] if losses else None

    def entry(self, *place: object) -> str:
        """Return the cosine to the exact gradient, and in brackets the cosine to RTRL."""
        both, own = self.mean("to_bptt", *place), self.mean("to_rtrl", *place)
        text = digits(both) if both is not None else "undefined"
        return text if place[2] == "rtrl" or own is None else f"{text} ({digits(own)})"


def at_best_rate(streams: Streams) -> list[str]:
    """Return the cosines of each rule at the best learning rate.

    The last column says whether stale traces turn the gradient by less than `D_RTRL` does.
    """
    rows = []
    for task, cell in streams.pairs:
        for every in streams.every:
            best = streams.best(task, cell, every)
            if best is not None:
                entries = [
                    streams.entry(task, cell, method, every, best) for method in streams.methods
                ]
                head = [formats.pair(task, cell), str(every), f"{best:g}"]
                rows.append([*head, *entries, _stale_is_less(streams, task, cell, every, best)])
    methods = map(formats.method, streams.methods)
    return table(["", "steps per update", "best rate", *methods, "stale traces are less"], rows)


def _stale_is_less(streams: Streams, task: str, cell: str, every: int, rate: float) -> str:
    stale = streams.values("to_bptt", task, cell, "rtrl", every, rate)
    bent = streams.values("to_rtrl", task, cell, "d_rtrl", every, rate)
    pairs = zip(stale, bent, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if rate == 0 or len(differences) < len(stale):
        return MISSING
    answer = is_positive(statistics.fmean(differences), standard_error(differences))
    return {True: "yes", None: "undecided", False: "no"}[answer]


def by_rate(streams: Streams, every: int) -> list[str]:
    """Return all cosines of an update schedule: a column per learning rate."""
    rows = [
        [
            formats.pair(task, cell),
            formats.method(method),
            *(streams.entry(task, cell, method, every, rate) for rate in streams.rates),
        ]
        for task, cell in streams.pairs
        for method in streams.methods
    ]
    return table(["", "", *(f"{rate:g}" for rate in streams.rates)], rows)

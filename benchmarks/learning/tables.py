"""The tables of the evidence, as lines of Markdown."""

import statistics
from collections.abc import Iterable

from ..markdown import seconds, table
from . import formats
from .formats import MISSING, digits
from .results import (
    PART,
    REFERENCE,
    Results,
    Run,
    gains_more,
    is_positive,
    mean_of,
    relative_gain,
    standard_error,
)
from .rows import StreamRow

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


def _answers(found: list[bool | None]) -> str:
    return "/".join(str(found.count(answer)) for answer in (True, None, False))


def _seeds(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{len(counts)} × {low}" if low == high else f"{len(counts)} × {low} to {high}"


def summary(core: Results) -> list[str]:
    """Return relative gain and cost of each method over the pairs of the core table."""
    rows = []
    for method in core.methods:
        own = [run for run in core.runs if run.key[2] == method and run.ran]
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
                *(formats.times(core.median_cost(method, what)) for what in (TIME, MEMORY)),
                formats.size(statistics.median(run.first.trace_bytes or 0 for run in own) or None),
            ]
        )
    head = ["method", "pairs × seeds", "relative gain", "worst case"]
    head += [f"at least {PART}: yes/undecided/no", "reaches the threshold"]
    return table([*head, "time of a step", "temporary memory", "traces"], rows)


def of_task(results: Results, task: str) -> list[str]:
    """Return one row per run of a task: its score, cosine and costs, with ratios to BPTT."""
    head = ["cell", "method", "score", "cosine to BPTT, start → end", "time of a step"]
    head += ["of a single step", "temporary memory", "of single steps", "traces", "notes"]
    rows = []
    for run in results.runs:
        if run.key[0] == task:
            _, cell, method = run.key
            bptt = results.find(task, cell, REFERENCE)
            row, base = run.first, (bptt or run).first
            rows.append(
                [
                    formats.cell(cell),
                    formats.method(method),
                    formats.score(run),
                    formats.cosine(run),
                    _with_ratio(seconds, row.step_seconds, base.step_seconds),
                    _with_ratio(seconds, row.single_step_seconds, base.step_seconds),
                    _with_ratio(formats.size, row.peak_bytes, base.peak_bytes),
                    _with_ratio(formats.size, row.single_peak_bytes, base.peak_bytes),
                    formats.size(row.trace_bytes or None),
                    _notes(run),
                ]
            )
    return table(head, rows)


def _with_ratio(text: formats.Text, value: float | None, base: float | None) -> str:
    ratio = f" ({formats.times(value / base)})" if value is not None and base else ""
    return text(value) + ratio


def _notes(run: Run) -> str:
    """Return why the library refuses a run, or how many networks diverged."""
    seeds = sum(bool(row.validation) for row in run.rows)
    lost = (f"{count} of {seeds} diverged at {rate:g}" for rate, count in run.diverged.items())
    return run.first.refused or ", ".join(lost)


def of_cells(results: Results) -> list[str]:
    """Return one row per cell: of each method the relative gain, and the answers to `PART`."""
    methods = [method for method in results.methods if method != REFERENCE]
    rows = []
    for cell in results.cells:
        own = Results(tuple(run for run in results.runs if run.key[1] == cell))
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
        return mean_of(self.values(what, *place))

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

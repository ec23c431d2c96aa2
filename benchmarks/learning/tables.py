"""The tables of the page, as lines of Markdown."""

import statistics
from collections.abc import Callable, Iterable

from ..markdown import table
from . import words
from .findings import PART, REFERENCE, Findings, Run, price_of
from .statements import Case, Outcome, Statement, tally, verdict


def tasks(findings: Findings) -> list[str]:
    """Return what each task is."""
    rows = []
    for name in findings.tasks:
        runs = [run for run in findings.runs if run.key[0] == name]
        settings = runs[0].record.settings
        windows = sorted(
            {run.record.settings.window for run in runs} - {None}, key=lambda w: w or 0
        )
        rows.append(
            [
                name,
                f"{settings.length}",
                f"{settings.features} → {settings.outputs}",
                words.digits(settings.chance),
                words.digits(settings.threshold),
                f"{settings.updates:,} × {settings.batch}",
                words.listed([str(window) for window in windows]),
                settings.source,
            ]
        )
    head = ["task", "steps", "inputs → outputs", "chance", "threshold", "updates × samples"]
    return table([*head, "windows of BPTT", "source"], rows)


def summary(findings: Findings) -> list[str]:
    """Return the relative gain and the cost of each method, over all pairs."""
    rows = []
    for way in findings.ways:
        kept = findings.kept(way)
        if not kept.tried:
            continue
        worst = words.MISSING
        if kept.parts:
            part, task, cell = kept.parts[0]
            worst = f"{words.digits(part)} ({words.pair(task, cell)})"
        rows.append(
            [
                words.way(way),
                words.digits(kept.median),
                worst,
                _answers(kept.matched),
                f"{kept.reached} of {kept.tried}",
                *(words.times(_median(findings.ratios(way, what))) for what in PRICES),
                words.traces(_median(_prices(findings, way, "trace_bytes"))),
            ]
        )
    head = [
        "method",
        "relative gain",
        "worst case",
        f"at least {PART}: yes/undecided/no",
        "reaches the threshold",
    ]
    return table([*head, "time of a step", "temporary memory", "traces"], rows)


PRICES = ("seconds_per_step", "peak_bytes")


def _prices(findings: Findings, way: str, what: str) -> list[float]:
    found = (price_of(run, what) for run in findings.runs if run.key[2] == way)
    return [price for price in found if price is not None]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def by_task(findings: Findings, cell: str, entry: Callable[[Run | None], str]) -> list[str]:
    """Return one table of a cell: a row per method with entries, a column per task."""
    tasks = [
        task for task in findings.tasks if any(run.key[:2] == (task, cell) for run in findings.runs)
    ]
    ways = [
        way for way in findings.ways if any(run.key[1:] == (cell, way) for run in findings.runs)
    ]
    rows = [
        [words.way(way), *(entry(findings.find(task, cell, way)) for task in tasks)] for way in ways
    ]
    filled = [row for row in rows if set(row[1:]) != {words.MISSING}]
    return table([words.cell(cell), *tasks], filled)


def cosine(run: Run | None) -> str:
    """Return the cosine to BPTT at the start, and at the end of learning."""
    if run is None or not run.ran:
        return words.score(run)
    if not run.cosine:
        return words.MISSING
    return f"{words.digits(run.cosine[0][1])} → {words.digits(run.cosine[-1][1])}"


def price(
    findings: Findings,
    what: str,
    text: Callable[[float | None], str],
    base: str | None = None,
) -> Callable[[Run | None], str]:
    """Return how a price is written: with its ratio to that of BPTT, or to its price ``base``."""

    def entry(run: Run | None) -> str:
        value = price_of(run, what)
        if run is None or value is None:
            return words.MISSING if run is None or run.ran else words.REFUSED
        task, cell, way = run.key
        least = price_of(findings.find(task, cell, REFERENCE), base or what)
        return words.with_ratio(text(value), value / least if least and way != REFERENCE else None)

    return entry


def by_way(findings: Findings, cell: str) -> list[str]:
    """Return the scores of a cell: a row a task, a column a way."""
    tasks = [task for task, other in findings.pairs() if other == cell]
    rows = (
        [task, *(words.score(findings.find(task, cell, way)) for way in findings.ways)]
        for task in tasks
    )
    return table(["task", *map(words.way, findings.ways)], rows)


def of_cells(findings: Findings, entry: Callable[[Findings, str], str]) -> list[str]:
    """Return a row a cell with what there is of each way, but for the reference."""
    ways = [way for way in findings.ways if way != REFERENCE]
    rows = []
    for cell in findings.cells:
        found = findings.of_cell(cell)
        tried = sum(run.key[2] == REFERENCE for run in found.runs)
        learned = f"{len(found.kept(REFERENCE).parts)} of {tried}"
        rows.append([words.cell(cell), learned, *(entry(found, way) for way in ways)])
    return table(["cell", f"{words.way(REFERENCE)} learns", *map(words.way, ways)], rows)


def part_of_cell(findings: Findings, way: str) -> str:
    """Return what is kept in the median and at worst, and in how many tasks it matches."""
    kept = findings.kept(way)
    if not kept.parts:
        return words.MISSING
    worst = words.digits(kept.parts[0][0])
    return f"{words.digits(kept.median)} ({worst}), {_answers(kept.matched)}"


def _answers(found: list[bool | None]) -> str:
    """Return how often the answer is yes, how often it is open, and how often it is no."""
    return "/".join(str(found.count(answer)) for answer in (True, None, False))


def price_of_cell(findings: Findings, way: str) -> str:
    """Return time and memory over those of backpropagation, in the median over tasks."""
    return ", ".join(words.times(_median(findings.ratios(way, what))) for what in PRICES)


def failures(runs: Iterable[Run]) -> list[str]:
    """Return every run that lost a lane, with its rates and seeds."""
    rows = []
    for run in runs:
        lost: dict[float, int] = {}
        for rate, _ in run.record.failed:
            lost[rate] = lost.get(rate, 0) + 1
        if lost:
            task, cell, way = run.key
            seeds = len(run.record.settings.seeds)
            where = ", ".join(f"{count} of {seeds} at {rate:g}" for rate, count in lost.items())
            rows.append([words.way(way), task, words.cell(cell), where])
    return (
        table(["method", "task", "cell", "diverged seeds, by learning rate"], rows) if rows else []
    )


def refusals(runs: Iterable[Run]) -> list[str]:
    """Return each unsupported method and cell with the reason."""
    reasons = {run.key[1:]: run.record.refused for run in runs if run.record.refused}
    rows = [[words.way(way), words.cell(cell), why] for (cell, way), why in reasons.items()]
    return table(["method", "cell", "reason"], rows) if rows else []


def verdicts(judged: Iterable[tuple[Statement, list[Case]]]) -> list[str]:
    """Return the verdict on each statement."""
    rows = []
    for count, (statement, cases) in enumerate(judged, start=1):
        found = tally(cases)
        numbers = (str(found[outcome]) for outcome in Outcome)
        rows.append([str(count), statement.claim, f"**{verdict(cases)}**", *numbers])
    return table(["", "statement", "verdict", "yes", "undecided", "no", "left out"], rows)


def criteria(judged: Iterable[tuple[Statement, list[Case]]]) -> list[str]:
    """Return source, criterion and omitted cases of each statement."""
    rows = (
        [str(count), statement.source, statement.criterion, left_out(cases)]
        for count, (statement, cases) in enumerate(judged, start=1)
    )
    return table(["", "source", "criterion of a case", "left out"], rows)


def left_out(cases: list[Case]) -> str:
    """Return the number of omitted cases, by reason."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case.outcome is Outcome.LEFT_OUT:
            reasons.setdefault(case.why, []).append(case.name)
    texts = [f"{why} ({len(names)}: {'; '.join(names)})" for why, names in reasons.items()]
    return ". ".join(texts) or "none"


def cases(judged: Iterable[tuple[Statement, list[Case]]]) -> list[str]:
    """Return all cases of each statement."""
    rows = (
        [str(count), case.name, case.numbers, case.outcome.value]
        for count, (_, found) in enumerate(judged, start=1)
        for case in found
    )
    return table(["statement", "case", "numbers", "holds"], rows)

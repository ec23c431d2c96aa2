"""Advice for a choice of rule, as sentences computed from the records."""

import dataclasses
import statistics

from . import words
from .findings import TWINS, Findings, beyond

CHEAP = 2.0
"""Largest time and memory of a cheap rule, relative to backpropagation."""

CLOSE = 0.02
"""Relative gains that differ by less count as equal."""

PAST, NO_PAST = "d_rtrl", "immediate"
WINDOWS = ("tbptt-short", "tbptt-long")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Medians of a forward method over pairs of task and cell."""

    way: str
    median: float
    worst: float
    time: float
    memory: float

    @property
    def is_cheap(self) -> bool:
        """Whether its cost is similar to backpropagation."""
        return max(self.time, self.memory) <= CHEAP


def lines(findings: Findings) -> list[str]:
    """Return the advice, as items of a list."""
    ways = (way for way in findings.ways if way not in TWINS)
    rules = [rule for way in ways if (rule := _rule(findings, way)) is not None]
    texts = (
        _best(
            f"At a cost of at most {CHEAP:g} times the time and temporary memory of BPTT",
            [rule for rule in rules if rule.is_cheap],
        ),
        _best("At a higher cost", [rule for rule in rules if not rule.is_cheap]),
        _worth_of_traces(findings),
        *(_against_windows(findings, window) for window in WINDOWS),
    )
    return [f"- {line}" for line in texts if line is not None]


def _rule(findings: Findings, way: str) -> Rule | None:
    found = findings.kept(way)
    time, memory = (findings.ratios(way, what) for what in ("seconds_per_step", "peak_bytes"))
    goes_back = "bptt" in way
    if goes_back or found.median is None or not time or not memory:
        return None
    prices = statistics.median(time), statistics.median(memory)
    return Rule(way, found.median, found.parts[0][0], *prices)


def _best(cost: str, rules: list[Rule]) -> str | None:
    """Return the rules with the largest gain, in the median and at worst, and their cost."""
    if not rules:
        return None
    median, worst = max(rule.median for rule in rules), max(rule.worst for rule in rules)
    first = [rule for rule in rules if rule.median >= median - CLOSE]
    second = [rule for rule in rules if rule.worst >= worst - CLOSE]
    times = words.between([rule.time for rule in first])
    memory = words.between([rule.memory for rule in first])
    have = "has" if len(first) == 1 else "have"
    return (
        f"{cost}, {_named(first)} {have} the largest median relative gain ({words.digits(median)}; "
        f"{times} times the time, {memory} times the memory), and {_named(second)} the best worst "
        f"case ({words.digits(worst)})."
    )


def _named(rules: list[Rule]) -> str:
    return words.listed([words.way(rule.way) for rule in rules])


def _parts(findings: Findings, way: str) -> dict[tuple[str, str], float]:
    found = {(task, cell): findings.part(task, cell, way) for task, cell in findings.pairs()}
    return {pair: part for pair, part in found.items() if part is not None}


def _worth_of_traces(findings: Findings) -> str | None:
    """Return the largest and the smallest value of traces."""
    own, without = _parts(findings, PAST), _parts(findings, NO_PAST)
    gains = sorted((own[pair] - without[pair], *pair) for pair in own if pair in without)
    if not gains:
        return None
    texts = []
    for _, task, cell in (gains[-1], gains[0]):
        pair = f"{words.digits(own[task, cell])} and {words.digits(without[task, cell])}"
        texts.append(f"{task}, {words.cell(cell)} ({pair})")
    clear = sum(_is_more(findings, pair, PAST, NO_PAST) for pair in own if pair in without)
    return (
        f"{words.way(PAST)} is clearly better than {words.way(NO_PAST)}, which has no traces, in "
        f"{clear} of {words.counted(len(gains), 'pair')}. The difference is largest on {texts[0]}, "
        f"and smallest on {texts[1]}."
    )


def _against_windows(findings: Findings, window: str) -> str | None:
    """Return the number of pairs in which a rule is better than truncated backpropagation."""
    parts = _parts(findings, PAST), _parts(findings, window)
    pairs = [pair for pair in parts[0] if pair in parts[1]]
    if not pairs:
        return None
    more = sum(_is_more(findings, pair, PAST, window) for pair in pairs)
    less = sum(_is_more(findings, pair, window, PAST) for pair in pairs)
    return (
        f"{words.way(PAST)} is clearly better than {words.way(window)} in {more} of "
        f"{words.counted(len(pairs), 'pair')}, and clearly worse in {less}."
    )


def _is_more(findings: Findings, pair: tuple[str, str], way: str, other: str) -> bool:
    """Return whether a method is better by more than `CLOSE` and the standard error."""
    run, reference = (findings.find(*pair, name) for name in (way, other))
    own, theirs = (findings.part(*pair, name) for name in (way, other))
    if run is None or reference is None or own is None or theirs is None:
        return False
    if reference.gain is None:
        return run.gain is not None
    return own > theirs + CLOSE and beyond(run, reference) is True

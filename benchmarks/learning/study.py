"""The page on gradients while parameters change under the traces: see `online_updates`."""

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..markdown import table
from . import words
from .findings import counts, standard_error
from .tasks import ALL as TASKS

EXACT, APPROXIMATE = "rtrl", "d_rtrl"
OWN, OLD = "cosine_to_rtrl", "cosine_to_bptt"
"""What the approximation costs, and what it and the updates cost together."""

Place = tuple[str, str]
"""A rule and a measure."""

TEXT = """# Evidence: gradients while the parameters change

A part of [the evidence](evidence.md), written with it from the same records; do not edit.

Whoever updates the parameters during a sequence leaves terms of old parameters in the traces: then
even RTRL, which is exact otherwise, has not the gradient of the loss at the parameters of now. Here
a network of {units} units goes on in a stream of {steps} steps, with an update by RTRL and Adam
every {every} steps, and all rules look on. Their gradients of the cell's parameters for the loss of
a step are compared with that of BPTT through the whole stream, recomputed from its beginning with
the parameters of that step (the approximation and the updates together), and in brackets with that
of RTRL, whose trace is as old as theirs (the approximation alone). All are cosines, in the mean
over steps and {seeds} seeds, by the learning rate; at 0 nothing is old. *Best* is the rate with
the lowest loss in the second half of the stream, in the mean over seeds.
*undefined* is an angle of which one gradient is zero or not finite, at one step of one seed.
"""
DRAWN = "Cosine to the recomputed gradient (lines) and to RTRL (dotted), by learning rate"


@dataclasses.dataclass(frozen=True)
class Study:
    """One network on one task."""

    found: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for."""
        settings: dict[str, Any] = self.found["settings"]
        return settings

    @property
    def name(self) -> str:
        """Task and cell."""
        return f"{self.settings['task']}, {words.cell(self.settings['cell'])}"

    def mean(self, rule: str, measure: str, every: int, rate: float) -> float | None:
        """Return a measure in the mean over seeds; ``None`` where one of them has none."""
        return self._mean(self.found["gradients"][rule][measure], every, rate)

    def best(self, every: int) -> float | None:
        """Return the learning rate with the lowest loss."""
        losses = [
            (loss, rate)
            for rate in self.settings["rates"]
            if (loss := self._mean(self.found["loss"], every, rate)) is not None
        ]
        return min(losses)[1] if losses else None

    def is_larger(self, one: Place, other: Place, every: int, rate: float) -> bool | None:
        """Return whether a rule's measure is larger; ``None`` where the seeds leave that open."""
        own, theirs = (
            self._seeds(self.found["gradients"][rule][measure], every, rate)
            for rule, measure in (one, other)
        )
        differences = [a - b for a, b in zip(own, theirs, strict=True)]
        return counts(statistics.fmean(differences), standard_error(differences))

    def _seeds(self, values: Any, every: int, rate: float) -> list[Any]:
        row = self.settings["every"].index(every)
        found: list[Any] = values[row][self.settings["rates"].index(rate)]
        return found

    def _mean(self, values: Any, every: int, rate: float) -> float | None:
        found = self._seeds(values, every, rate)
        return None if any(value is None for value in found) else statistics.fmean(found)


def load(folder: Path) -> list[Study]:
    """Return all studies of a folder, by task and cell in the order of the page."""
    paths = folder.glob("online-updates-*.json")
    found = (Study(json.loads(path.read_text())) for path in paths)
    return sorted(found, key=lambda study: _place(study.settings))


def _place(settings: dict[str, Any]) -> tuple[int, int]:
    return TASKS.index(settings["task"]), list(words.CELLS).index(settings["cell"])


def page(studies: list[Study]) -> list[str]:
    """Return the page."""
    settings = studies[0].settings
    text = TEXT.format(
        units=settings["units"],
        steps=settings["steps"],
        every=" or ".join(map(str, settings["every"])),
        seeds=len(settings["seeds"]),
    )
    lines = [text, *_at_best(studies), *words.picture("online_updates", DRAWN)]
    for every in settings["every"]:
        lines += [f"## An update every {'step' if every == 1 else f'{every} steps'}", ""]
        lines += table(_head(studies), _rows(studies, every))
    return lines


def summary(studies: list[Study]) -> list[str]:
    """Return what the evidence says of it, with a link."""
    settings = studies[0].settings
    text = (
        "Who updates the parameters during a sequence leaves old ones in the traces. In streams of "
        f"{settings['steps']} steps with an update every {' or '.join(map(str, settings['every']))}"
        f" steps ({words.counted(len(studies), 'network')}), gradients are compared with exact ones"
        " for the parameters of now: [all numbers](online_updates.md). They are of angles, not of "
        "what is learned."
    )
    return ["## Updates while the sequence runs", "", text, "", *_compared(studies)]


def _at_best(studies: list[Study]) -> list[str]:
    """Return what RTRL and each rule have at the best rate."""
    rows = []
    for study in studies:
        for every in study.settings["every"]:
            best = study.best(every)
            if best is not None:
                entries = (_entry(study, rule, every, best) for rule in study.settings["rules"])
                rows.append([study.name, str(every), f"{best:g}", *entries])
    rules = map(words.way, studies[0].settings["rules"])
    head = ["", "update every", "best", *rules]
    return ["## At the best rate", "", *table(head, rows), *_compared(studies)]


def _compared(studies: list[Study]) -> list[str]:
    """Return whether age or approximation costs more, at the best rate where anything ages."""
    ages: list[float] = []
    answers: list[bool | None] = []
    for study in studies:
        for every in study.settings["every"]:
            best = study.best(every)
            age = study.mean(EXACT, OLD, every, best) if best else None
            other = study.mean(APPROXIMATE, OWN, every, best) if best else None
            if best and age is not None and other is not None:
                ages.append(age)
                places = (EXACT, OLD), (APPROXIMATE, OWN)
                answers.append(study.is_larger(*places, every, best))
    if not ages:
        return []
    return [
        "At the rate with the lowest loss, where that is not 0, the cosine of `RTRL` to the "
        f"recomputed gradient is {words.digits(min(ages))} to {words.digits(max(ages))}: the age "
        f"of its trace turns the gradient by less than the approximation of "
        f"{words.way(APPROXIMATE)} in {answers.count(True)} of "
        f"{words.counted(len(ages), 'case')}, by more in {answers.count(False)}; in "
        f"{answers.count(None)} the seeds leave it open.",
        "",
    ]


def _head(studies: list[Study]) -> list[str]:
    return ["", "", *(f"{rate:g}" for rate in studies[0].settings["rates"])]


def _rows(studies: list[Study], every: int) -> Iterator[list[str]]:
    for study in studies:
        for rule in study.settings["rules"]:
            entries = (_entry(study, rule, every, rate) for rate in study.settings["rates"])
            yield [study.name, words.way(rule), *entries]


def _entry(study: Study, rule: str, every: int, rate: float) -> str:
    both, own = (study.mean(rule, measure, every, rate) for measure in (OLD, OWN))
    text = words.digits(both) if both is not None else "undefined"
    return text if rule == EXACT or own is None else f"{text} ({words.digits(own)})"

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
"""Effect of the approximation, and of approximation and updates together."""

Place = tuple[str, str]
"""A rule and a measure."""

TEXT = """# Evidence: gradients while the parameters change

This page belongs to [the evidence](evidence.md) and is generated with it; do not edit.

Online updates make traces stale: they contain derivatives with respect to earlier parameters, so
even RTRL deviates from the exact gradient at the current parameters. This page measures the size of
the effect.

A network of {units} units trains on a stream of {steps} steps, with an update by RTRL and Adam
every {every} steps. All rules compute a gradient of the cell's parameters for the loss of a step.
Each entry is a mean cosine over steps and {seeds} seeds, by learning rate:

| Entry | Cosine to | Measures |
|---|---|---|
| before brackets | BPTT through the whole stream, recomputed with the current parameters | \
approximation and stale traces together |
| in brackets | RTRL, whose trace is equally stale | approximation alone |
| at learning rate 0 | both | no stale traces |
| *undefined* | | a gradient is zero or not finite, at one step of one seed |

*Best* is the learning rate with the lowest mean loss in the second half of the stream.
"""
DRAWN = "Cosine to the recomputed gradient (lines) and to RTRL (dotted), by learning rate"


@dataclasses.dataclass(frozen=True)
class Study:
    """One network on one task."""

    found: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the study."""
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
    """Return the section of the first page, with a link."""
    settings = studies[0].settings
    text = (
        "Online updates make traces stale: they contain derivatives with respect to earlier "
        f"parameters. In streams of {settings['steps']} steps with an update every "
        f"{' or '.join(map(str, settings['every']))} steps "
        f"({words.counted(len(studies), 'network')}), gradients are compared with exact ones at "
        "the current parameters ([all numbers](online_updates.md)). The comparison covers cosines, "
        "not final scores."
    )
    return ["## Updates during a sequence", "", text, "", *_compared(studies)]


def _at_best(studies: list[Study]) -> list[str]:
    """Return the cosines of RTRL and each rule at the best learning rate."""
    rows = []
    for study in studies:
        for every in study.settings["every"]:
            best = study.best(every)
            if best is not None:
                entries = (_entry(study, rule, every, best) for rule in study.settings["rules"])
                rows.append([study.name, str(every), f"{best:g}", *entries])
    rules = map(words.way, studies[0].settings["rules"])
    head = ["", "steps per update", "best", *rules]
    return ["## Best learning rate", "", *table(head, rows), *_compared(studies)]


def _compared(studies: list[Study]) -> list[str]:
    """Compare stale traces and approximation, at best learning rates above 0."""
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
        "At the best learning rate, if it is above 0, the cosine of `RTRL` to the recomputed "
        f"gradient is {words.digits(min(ages))} to {words.digits(max(ages))}. Stale traces turn "
        f"the gradient by less than the approximation of {words.way(APPROXIMATE)} in "
        f"{answers.count(True)} of {words.counted(len(ages), 'case')}, and by more in "
        f"{answers.count(False)}; {answers.count(None)} are undecided.",
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

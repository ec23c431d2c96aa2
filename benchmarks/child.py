"""Run one case in this process and write what it found: ``python -m benchmarks.child --help``."""

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from . import timing
from .case import Case, Measurements, NotOffered, Subject, Target

LIBRARY = "braintrace"


def is_missing_name(error: Exception) -> bool:
    """Whether an error says that the library has no public name that a case uses."""
    if isinstance(error, AttributeError):
        return getattr(error.obj, "__name__", None) == LIBRARY
    return isinstance(error, NotOffered)


def first_line(error: Exception) -> str:
    """Return what an error is and says, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Findings:
    """What a case has given so far.

    Parameters
    ----------
    case
        The case.
    lenient
        Count everything that raises as not offered: another library may refuse anything.
    """

    def __init__(self, case: Case, lenient: bool) -> None:
        self._lenient = lenient
        self._times: dict[str, list[float]] = {}
        self.case = case
        self.missing: dict[str, str] = {}
        self.deviations: dict[str, dict[str, float]] = {}
        self.facts: dict[str, float] = {}
        self.error: str | None = None

    def attempt(self, label: str, call: Callable[[], Any]) -> Any:
        """Return what a call gives; ``None``, and a note, where the library lacks something."""
        try:
            return call()
        except Exception as error:
            if not (self._lenient or is_missing_name(error)):
                raise
            self.missing[label] = first_line(error)
            return None

    def run(self, rounds: int, budget: float) -> None:
        """Run the case; an error ends it and is kept."""
        try:
            self._run(rounds, budget)
        except Exception as error:
            self.error = f"{first_line(error)}\n\n{traceback.format_exc()}"

    def _run(self, rounds: int, budget: float) -> None:
        prepared = self.attempt("everything", self.case.build)
        if prepared is None:
            return
        subjects, peaks = self._first_calls(prepared.subjects)
        for label, check in prepared.checks.items():
            found = self.attempt(label, check)
            if found is not None:
                self._agreement(label, *found)
        for label, fact in prepared.facts.items():
            value = self.attempt(label, fact)
            if value is not None:
                self.facts[label] = value
        self._times = timing.in_turn(subjects, rounds, budget) if subjects else {}
        derive = prepared.derive
        if derive is not None and len(subjects) == len(prepared.subjects):
            medians = {label: spread["median"] for label, spread in self.seconds().items()}
            measured = Measurements(medians, peaks)
            self.facts.update(self.attempt("derived", lambda: derive(measured)) or {})

    def _first_calls(
        self, makers: Mapping[str, Callable[[], Subject]]
    ) -> tuple[dict[str, Subject], dict[str, int]]:
        """Make and warm up the functions; their results are compared after all of them ran.

        An oracle may take more memory than what it judges.
        """
        subjects: dict[str, Subject] = {}
        results, peaks = {}, {}
        for label, make in makers.items():
            found = self.attempt(label, partial(_first_call, make))
            if found is not None:
                subjects[label], results[label] = found
                peaks[label] = timing.peak_bytes()
        for label, subject in subjects.items():
            judge, result = subject.deviation, results.pop(label)
            if judge is not None:
                value = self.attempt(label, partial(judge, result))
                self._agreement(label, math.nan if value is None else value, subject.tolerance)
        return subjects, peaks

    def _agreement(self, label: str, value: float, tolerance: float) -> None:
        self.deviations[label] = {"value": value, "tolerance": tolerance}

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return median and quartiles of the seconds per unit of work."""
        return {label: timing.spread(series) for label, series in self._times.items()}

    def disagreeing(self) -> list[str]:
        """Return what differs from its oracle."""
        return [
            label
            for label, entry in self.deviations.items()
            if not entry["value"] <= entry["tolerance"]
        ]

    def row(self, target: Target) -> dict[str, Any]:
        """Return a target with what was found."""
        value = self._value(target)
        return {
            "name": target.name,
            "label": target.label,
            "over": target.over,
            "limit": target.limit,
            "equal": target.equal,
            "value": value,
            "holds": None if value is None else target.holds(value),
        }

    def _value(self, target: Target) -> float | None:
        times, facts = self._times, self.facts
        if target.over is None:
            return facts.get(target.label)
        if target.label in times and target.over in times:
            return timing.ratio(times[target.label], times[target.over])
        if target.label in facts and target.over in facts:
            return facts[target.label] / facts[target.over]
        return None

    def plain(self) -> dict[str, Any]:
        """Return everything as data for JSON."""
        return {
            "name": self.case.name,
            "parameters": dict(self.case.parameters),
            "seconds": self.seconds(),
            "facts": self.facts,
            "deviations": self.deviations,
            "disagrees": self.disagreeing(),
            "missing": self.missing,
            "targets": [self.row(target) for target in self.case.targets],
            "error": self.error,
            "peak_rss_bytes": timing.process_peak_bytes(),
        }


def _first_call(make: Callable[[], Subject]) -> tuple[Subject, Any]:
    subject = make()
    if subject.before is not None:
        subject.before()
    return subject, jax.block_until_ready(subject.run())


def run(case: Case, rounds: int, budget: float, lenient: bool = False) -> dict[str, Any]:
    """Run a case and return its results as data for JSON."""
    start = time.perf_counter()
    findings = Findings(case, lenient)
    findings.run(rounds, budget)
    found = findings.plain() | {"wall_seconds": time.perf_counter() - start}
    plain: dict[str, Any] = without_special_numbers(found)
    return plain


def without_special_numbers(value: Any) -> Any:
    """Return data with the numbers that JSON does not know as text."""
    if isinstance(value, dict):
        return {key: without_special_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_special_numbers(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def main() -> None:
    """Run the case that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.child", description=__doc__)
    parser.add_argument("case", help="name of the case")
    parser.add_argument("--platform", default="cpu", help="of the device: cpu, gpu or tpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="after which no round begins")
    parser.add_argument("--lenient", action="store_true", help="whatever raises is not offered")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()

    from .catalogue import find  # imports the library that is timed

    case = find(options.case, options.platform)
    found = run(case, options.rounds, options.seconds, options.lenient)
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

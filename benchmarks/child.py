"""Run one case in this process and write its results: ``python -m benchmarks.child --help``."""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import timing
from .case import Case, NotOffered, Prepared, Subject, Target


def run(case: Case, rounds: int, budget: float) -> dict[str, Any]:
    """Run a case and return its results as data for JSON; an error ends it and is kept."""
    start = time.perf_counter()
    found: dict[str, Any] = {"name": case.name, "parameters": dict(case.parameters)}
    found |= {"seconds": {}, "facts": {}, "missing": {}, "targets": [], "error": None}
    try:
        _run(case, found, rounds, budget)
    except Exception as error:
        found["error"] = f"{first_line(error)}\n\n{traceback.format_exc()}"
    return found | {"wall_seconds": time.perf_counter() - start}


def _run(case: Case, found: dict[str, Any], rounds: int, budget: float) -> None:
    missing = found["missing"]
    prepared: Prepared = case.build()
    subjects = {
        label: subject
        for label, make in prepared.subjects.items()
        if (subject := _attempt(missing, label, partial(_warm, make))) is not None
    }
    for label, fact in prepared.facts.items():
        value = _attempt(missing, label, fact)
        if value is not None:
            found["facts"][label] = value
    times = timing.in_turn(subjects, rounds, budget) if subjects else {}
    found["seconds"] = {label: timing.spread(series) for label, series in times.items()}
    if prepared.derive is not None and not missing:
        medians = {label: spread["median"] for label, spread in found["seconds"].items()}
        found["facts"] |= prepared.derive(medians)
    found["targets"] = [row(target, times, found["facts"]) for target in case.targets]


def _attempt(missing: dict[str, str], label: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call; ``None``, and a note, if something is not installed."""
    try:
        return call()
    except (ImportError, NotOffered) as error:
        missing[label] = first_line(error)
        return None


def _warm(make: Callable[[], Subject]) -> Subject:
    subject = make()
    timing.time_once(subject)
    return subject


def first_line(error: Exception) -> str:
    """Return the type and message of an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def row(target: Target, times: dict[str, Any], facts: dict[str, float]) -> dict[str, Any]:
    """Return a target with its value."""
    value = None
    if target.over is None:
        value = facts.get(target.label)
    elif target.label in times and target.over in times:
        value = timing.ratio(times[target.label], times[target.over])
    elif target.label in facts and target.over in facts:
        value = facts[target.label] / facts[target.over]
    holds = None if value is None else target.holds(value)
    return {"name": target.name, "limit": target.limit, "value": value, "holds": holds}


def main() -> None:
    """Run the case that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.child", description=__doc__)
    parser.add_argument("case", help="name of the case")
    parser.add_argument("--platform", default="cpu", help="of the device: cpu, gpu or tpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="after which no round begins")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()

    from .catalogue import find

    found = run(find(options.case, options.platform), options.rounds, options.seconds)
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

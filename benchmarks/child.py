"""Run one case in this process and write its results: ``python -m benchmarks.child --help``."""

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

from . import timing
from .case import Case, Target


def run(case: Case, rounds: int, budget: float) -> dict[str, Any]:
    """Run a case and return its results as data for JSON; an error ends it and is kept."""
    found: dict[str, Any] = {"name": case.name, "error": None}
    try:
        return found | _run(case, rounds, budget)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return found | {"error": f"{first}\n\n{traceback.format_exc()}"}


def _run(case: Case, rounds: int, budget: float) -> dict[str, Any]:
    subjects = {label: make() for label, make in case.subjects.items()}
    for subject in subjects.values():
        timing.time_once(subject)
    facts = {label: fact() for label, fact in case.facts.items()}
    times = timing.in_turn(subjects, rounds, budget) if subjects else {}
    seconds = {label: timing.spread(series) for label, series in times.items()}
    facts |= case.derive({label: spread["median"] for label, spread in seconds.items()})
    targets = [row(target, times, facts) for target in case.targets]
    return {"seconds": seconds, "facts": facts, "targets": targets}


def row(target: Target, times: dict[str, Any], facts: dict[str, float]) -> dict[str, Any]:
    """Return a target with its value; ``None`` if the case does not have it."""
    value = None
    if target.over is None:
        value = facts.get(target.label)
    elif target.label in times:
        value = timing.ratio(times[target.label], times[target.over])
    elif target.label in facts:
        value = facts[target.label] / facts[target.over]
    holds = None if value is None or target.limit is None else value <= target.limit
    return {"name": target.name, "limit": target.limit, "value": value, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.child", description=__doc__)
    parser.add_argument("case", help="name of the case")
    parser.add_argument("--platform", default="cpu", help="of the device: cpu, gpu or tpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="after which no round begins")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()

    from .catalogue import all_cases

    (case,) = (case for case in all_cases(options.platform) if case.name == options.case)
    options.out.write_text(json.dumps(run(case, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()

"""Times of functions that are called in turn, so that a busy machine slows all of them alike."""

import gc
import statistics
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .case import Case, Subject, Target


def time_once(subject: Subject) -> float:
    """Return the seconds of one call, until its results are there."""
    if subject.before is not None:
        subject.before()
    start = time.perf_counter()
    jax.block_until_ready(subject.run())
    return time.perf_counter() - start


def in_turn(
    subjects: Mapping[str, Subject], rounds: int, budget: float, least: int = 3
) -> dict[str, list[float]]:
    """Call all functions once a round and return the seconds per unit of work of every call.

    They have run once. After ``budget`` seconds no further round begins, once there are ``least``.
    """
    labels = list(subjects)
    times: dict[str, list[float]] = {label: [] for label in labels}
    start = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for count in range(rounds):
            if count >= least and time.perf_counter() - start > budget:
                break
            first = count % max(1, len(labels))  # no function always follows the same one
            for label in labels[first:] + labels[:first]:
                times[label].append(time_once(subjects[label]) / subjects[label].work)
    finally:
        gc.enable()
    return times


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def spread(times: Sequence[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": statistics.median(times), "low": low, "high": high, "rounds": len(times)}


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
        time_once(subject)
    facts = {label: fact() for label, fact in case.facts.items()}
    times = in_turn(subjects, rounds, budget) if subjects else {}
    seconds = {label: spread(series) for label, series in times.items()}
    facts |= case.derive({label: spread["median"] for label, spread in seconds.items()})
    targets = [row(target, times, facts) for target in case.targets]
    return {"seconds": seconds, "facts": facts, "targets": targets}


def row(target: Target, times: dict[str, Any], facts: dict[str, float]) -> dict[str, Any]:
    """Return a target with its value; ``None`` if the case does not have it."""
    value = None
    if target.over is None:
        value = facts.get(target.label)
    elif target.label in times:
        value = ratio(times[target.label], times[target.over])
    elif target.label in facts:
        value = facts[target.label] / facts[target.over]
    holds = None if value is None or target.limit is None else value <= target.limit
    return {"name": target.name, "limit": target.limit, "value": value, "holds": holds}


def run_named(name: str, platform: str, rounds: int, budget: float) -> dict[str, Any]:
    """Run the case with a name, of those for a platform."""
    from .catalogue import all_cases

    (case,) = (case for case in all_cases(platform) if case.name == name)
    return run(case, rounds, budget)

"""Times of functions that are called in turn, so that a busy machine slows all of them alike."""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence

import jax

from .case import Subject


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

"""Timed calls: one after the other in turn, since a shared machine is never quiet."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Call(NamedTuple):
    """A function to time, and its program, whose temporary memory XLA knows."""

    run: Callable[[], Any]
    lower: Callable[[], Any] | None = None
    starts_cold: bool = False


def time_once(call: Call) -> float:
    """Return the seconds until the results of a call are there."""
    if call.starts_cold:
        jax.clear_caches()
        gc.collect()
    start = time.perf_counter()
    jax.block_until_ready(call.run())
    return time.perf_counter() - start


def time_in_turn(calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each call by round; at least three rounds, then within the budget."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        time_once(call)
    begin, names = time.perf_counter(), list(calls)
    for count in range(rounds):
        if count >= 3 and time.perf_counter() - begin > seconds:
            break
        first = count % len(names)  # no call always follows the same one
        for name in names[first:] + names[:first]:
            times[name].append(time_once(calls[name]))
    return times


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def temporary_mebibytes(call: Call) -> float | None:
    """Return the temporary memory of a call's program; ``None`` if it has no single program."""
    if call.lower is None:
        return None
    return float(call.lower().compile().memory_analysis().temp_size_in_bytes) / 2**20

"""What a long run has to hold, judged by what its processes have written about themselves."""

import statistics
from collections.abc import Sequence
from typing import Any

Samples = Sequence[dict[str, Any]]
Verdict = dict[str, Any]

START = 8
"""In so many parts of a process everything happens once that ever does; a tenth of it counts as
start too."""

MEMORY = 0.02
"""Part of the memory by which it may have grown between the first tenth and the last."""

THROUGHPUT = 0.05
"""Part by which the last tenth may be slower or faster than the first."""

MINUTE = 60.0


def of_process(samples: Samples) -> list[Verdict]:
    """Return whether one process keeps its memory, and compiles nothing after its start."""
    later = after_the_start(samples)
    before, after = ends([sample["resident"] for sample in later])
    compiled = later[-1]["compilations"] - later[0]["compilations"]
    before_the_last = [s for s in samples if s["compilations"] < later[-1]["compilations"]]
    second = before_the_last[-1]["processor_seconds"] if before_the_last else 0.0
    return [
        verdict("memory of the last tenth over the first", after / before, 1 + MEMORY),
        verdict("live arrays more than at the start", _more(later, "arrays"), 0),
        verdict("bytes of them more than at the start", _more(later, "array_bytes"), 0),
        verdict("threads more than at the start", _more(later, "threads"), 0),
        verdict("open files more than at the start", _more(later, "files"), 0),
        verdict("programs compiled after the start", compiled, 0),
        verdict("seconds on a processor before the last of them", second, MINUTE),
    ]


def of_throughput(samples: Samples, load: float, cores: int) -> list[Verdict]:
    """Return whether a process is as fast at its end as at its beginning.

    Where others use the machine as well, only the time on a processor is judged, over that of a
    loop of plain JAX, which they slow down as well.
    """
    later = after_the_start(samples)
    seconds = [sample["call"] / sample["steps"] for sample in later]
    beside = [s["processor"] / s["steps"] / s["control"] for s in later]
    of_clock = _alike("seconds of a step, last tenth over first", seconds)
    if load > cores:
        of_clock |= {"holds": True, "note": f"not judged: {load:.1f} processes on {cores} cores"}
    return [of_clock, _alike("the same over that of a plain loop beside it", beside)]


def _alike(what: str, values: Sequence[float]) -> Verdict:
    first, last = ends(values)
    holds = 1 - THROUGHPUT <= last / first <= 1 + THROUGHPUT
    return verdict(what, last / first, 1 + THROUGHPUT) | {"holds": holds}


def of_outcomes(alone: dict[str, Any], stopped: dict[str, Any]) -> list[Verdict]:
    """Return whether two runs have come to the same."""
    return [
        verdict(f"{what} differ from those of the run left alone", int(stopped[what] != value), 0)
        for what, value in alone.items()
    ]


def verdict(what: str, value: float, limit: float) -> Verdict:
    """Return whether a number is at most a limit."""
    return {"what": what, "value": value, "limit": limit, "holds": bool(value <= limit)}


def after_the_start(samples: Samples) -> Samples:
    """Return the samples of a process that is warm; the last one where there are too few."""
    return samples[max(START, len(samples) // 10) :] or samples[-1:]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth of some numbers."""
    tenth = max(1, len(values) // 10)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def _more(samples: Samples, what: str) -> float:
    first, last = ends([sample[what] for sample in samples])
    return last - first

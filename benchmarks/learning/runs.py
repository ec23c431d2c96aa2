"""The catalogue of runs: the core table first, then the wide one."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch

from . import methods, tasks
from .rows import Row

UNITS = 32
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (0, 1, 2)
"""Seeds that choose the learning rate; later seeds run at the chosen one."""

CORE_CELLS = ("leaky", "gru")
WIDE_CELLS = ("leaky", "gru", "lstm", "indrnn", "lru", "rtu", "alif")
WINDOWED = ("d_rtrl", "es_d_rtrl")
WIDE_METHODS = (
    *("bptt", "tbptt-short"),
    *(f"{rule}{window}" for rule in WINDOWED for window in ("", "-short", "-long")),
    "immediate",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """Training of all rates and seeds of a task, a cell and a method, in one program."""

    task: str
    cell: str
    method: str
    seeds: tuple[int, ...] = SEEDS
    rates: tuple[float, ...] = RATES
    units: int = UNITS
    updates: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.cell, self.method

    @property
    def name(self) -> str:
        """The name that a pattern on the command line is compared with."""
        return "--".join(self.key).replace(" ", "-")


def is_core(task: str, cell: str) -> bool:
    """Return whether all methods run on a task and a cell."""
    return task in tasks.CORE and cell in CORE_CELLS


def all_jobs() -> Iterator[Job]:
    """Yield all runs from the beginning."""
    for chosen in (methods.ALL, methods.RMSPROP):
        for task, cell in itertools.product(tasks.CORE, CORE_CELLS):
            yield from (Job(task, cell, method.name) for method in chosen)
    for cell, task in itertools.product(WIDE_CELLS, tasks.ALL):
        if not is_core(task, cell):
            yield from (Job(task, cell, name) for name in WIDE_METHODS)


def quick_jobs() -> Iterator[Job]:
    """Yield a run of few updates for each task and some methods."""
    for task, method in itertools.product(tasks.ALL, ("bptt", "d_rtrl", "immediate")):
        yield Job(task, "leaky", method, SEEDS[:1], RATES[2:3], updates=40)


def matching(jobs: Iterable[Job], pattern: str | None) -> list[Job]:
    """Return the jobs whose name contains or matches a pattern."""
    return [j for j in jobs if pattern is None or pattern in j.name or fnmatch(j.name, pattern)]


def remaining(job: Job, rows: Iterable[Row], seeds: int) -> Job | None:
    """Return the part of a job without rows; ``None`` if all seeds have one."""
    own = [row for row in rows if row.key == job.key]
    if not own:
        return job
    missing = tuple(sorted(set(range(seeds)) - {row.seed for row in own}))
    rate = own[0].rate
    if not missing or rate is None:  # refused, and refused again
        return None
    return dataclasses.replace(job, seeds=missing, rates=(rate,))

"""The runs there are, in the order in which they are made: the core table first, task by task."""

from collections.abc import Iterator
from fnmatch import fnmatch

from braintrace import MissingPackageError

from . import online_updates, tasks, ways
from .record import Asked, Settings
from .ways import Way

UNITS = 32
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (0, 1, 2)
CORE_CELLS = ("leaky", "gru")
WIDE_CELLS = (("gru", "rtu"), ("lru", "lstm"), ("alif", "indrnn", "leaky"))
"""In turns: who stops after one of them has a whole table of some cells."""

WIDE_WAYS = tuple(
    ways.BY_NAME[name] for name in ("bptt", "tbptt-short", "d_rtrl", "es_d_rtrl", "immediate")
)
OF_QUICK = ("bptt", "tbptt-short", "d_rtrl", "uoro", "immediate", "rflo")
QUICK_UPDATES = 200


def all_runs(missing: dict[str, str]) -> Iterator[Asked]:
    """Yield all runs; tasks whose data are not installed are noted, with the reason."""
    for task in tasks.CORE:
        yield from _of("core", task, CORE_CELLS, ways.ALL, missing)
    for task in tasks.CORE:
        yield from _of("core", task, CORE_CELLS, ways.RMSPROP, missing)
    yield from online_updates.all_studies()
    for cells in WIDE_CELLS:
        for task in tasks.ALL:
            others = tuple(c for c in cells if task in tasks.WIDE or c not in CORE_CELLS)
            yield from _of("wide", task, others, WIDE_WAYS, missing)


def quick_runs(missing: dict[str, str]) -> Iterator[Asked]:
    """Yield a cut through all runs: short ones, of two tasks and three cells."""
    chosen = [ways.BY_NAME[name] for name in OF_QUICK]
    for task, cell in ((tasks.CORE[0], "leaky"), (tasks.CORE[1], "gru"), (tasks.CORE[1], "lru")):
        yield from _of("core", task, (cell,), chosen, missing, QUICK_UPDATES, SEEDS[:2])


def matching(runs: Iterator[Asked], pattern: str | None) -> list[Asked]:
    """Return the runs whose name contains or matches a pattern."""
    if pattern is None:
        return list(runs)
    return [run for run in runs if pattern in run.name or fnmatch(run.name, pattern)]


def _of(
    table: str,
    task: str,
    cells: tuple[str, ...],
    chosen: tuple[Way, ...] | list[Way],
    missing: dict[str, str],
    most_updates: int | None = None,
    seeds: tuple[int, ...] = SEEDS,
) -> Iterator[Settings]:
    try:
        found = tasks.load(task)
    except MissingPackageError as error:
        missing[task] = str(error)
        return
    updates = min(found.updates, most_updates or found.updates)
    for cell in cells:
        for way in chosen:
            yield settings_of(table, found, cell, way, updates, seeds)


def settings_of(
    table: str,
    task: tasks.Task,
    cell: str,
    way: Way,
    updates: int,
    seeds: tuple[int, ...] = SEEDS,
    units: int = UNITS,
) -> Settings:
    """Return the settings of a run."""
    return Settings(
        table=table,
        task=task.name,
        cell=cell,
        way=way.name,
        units=units,
        batch=task.batch,
        updates=updates,
        length=task.length,
        features=task.features,
        outputs=task.outputs,
        optimizer=way.optimizer,
        window=way.window(task),
        rates=RATES,
        seeds=seeds,
        chance=task.chance,
        threshold=task.threshold,
        source=task.source,
    )

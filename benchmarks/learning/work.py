"""Processes that make runs, each on a processor of its own."""

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..machine import describe
from .record import Asked, Found, Settings, of, write

ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}

Outcome = tuple[Asked, Found | None, str]
"""A run, what it found, and (where it did not end) why."""

Job = Callable[[Any, Path, dict[str, Any]], Found]
"""What is done about a run: `train` or `price`."""


def make(job: Job, runs: Iterable[Asked], folder: Path, workers: int) -> Iterator[Outcome]:
    """Do a job for runs in their order, and yield them as they end, their records written."""
    os.environ.update(ONE_THREAD)
    machine = describe()  # here, where all of its processors are seen
    pool = workers_of(workers)
    try:
        futures = {pool.submit(_one, job, settings, folder, machine): settings for settings in runs}
        for future in concurrent.futures.as_completed(futures):
            record, reason = future.result()
            yield futures[future], record, reason
    finally:
        pool.shutdown(cancel_futures=True)


def workers_of(count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return processes that end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(count):
        numbers.put(number)
    return concurrent.futures.ProcessPoolExecutor(
        count, mp_context=context, initializer=_begin, initargs=(numbers,)
    )


def _begin(numbers: Any) -> None:
    """Stay on one processor, that of this worker's number, and end with the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number = numbers.get()
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[number % len(allowed)]})


def _end_with_parent() -> None:
    # A parent that is killed tells nobody: its workers would go on with what they have begun.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def train(settings: Any, folder: Path, machine: dict[str, Any]) -> Found:
    """Make a run."""
    # They import JAX: after the process knows where it runs.
    from . import measure, online_updates

    if isinstance(settings, online_updates.Settings):
        return online_updates.run(settings, machine)
    return measure.run(settings, machine)


def price(settings: Settings, folder: Path, machine: dict[str, Any]) -> Found:
    """Ask for the prices of a run that is done."""
    from . import measure

    return measure.priced(of(folder, settings))


def _one(
    job: Job, settings: Asked, folder: Path, machine: dict[str, Any]
) -> tuple[Found | None, str]:
    _forget_other_networks(settings.task, settings.cell)
    try:
        record = job(settings, folder, machine)
        write(folder, record)
        return record, ""
    except Exception:
        return None, traceback.format_exc()


@functools.lru_cache(maxsize=1)
def _forget_other_networks(task: str, cell: str) -> None:
    """Free the programs of other runs, but for those of the same task and cell: they share some.

    Twenty megabytes are left of each.
    """
    import jax

    jax.clear_caches()
    gc.collect()

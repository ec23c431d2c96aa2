"""Worker processes, each on a processor of its own."""

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .machine import describe

ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}

Work = Callable[[Any, dict[str, Any]], list[Any]]
"""``(job, description of the machine) -> rows``."""

Outcome = tuple[Any, list[Any], str]
"""A job, its rows, and the traceback if it failed."""


def make(work: Work, jobs: Iterable[Any], workers: int) -> Iterator[Outcome]:
    """Work on jobs in their order, and yield the outcomes as they arrive."""
    os.environ.update(ONE_THREAD)
    machine = describe()  # here, where all processors are visible
    pool = workers_of(workers)
    try:
        futures = {pool.submit(_one, work, job, machine): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def workers_of(count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return processes that end with this one, even if it is killed."""
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(count):
        numbers.put(number)
    return concurrent.futures.ProcessPoolExecutor(
        count, mp_context=context, initializer=_begin, initargs=(numbers,)
    )


def _begin(numbers: Any) -> None:
    """Stay on the processor of this worker's number, and end with the parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number = numbers.get()
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[number % len(allowed)]})


def _end_with_parent() -> None:
    # A killed parent sends no message, so its workers would continue.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(work: Work, job: Any, machine: dict[str, Any]) -> tuple[list[Any], str]:
    _free_other_networks(job.task, job.cell)
    try:
        return work(job, machine), ""
    except Exception:
        return [], traceback.format_exc()


@functools.lru_cache(maxsize=1)
def _free_other_networks(task: str, cell: str) -> None:
    """Free the programs of other tasks and cells, about 20 MB each."""
    import jax

    jax.clear_caches()
    gc.collect()

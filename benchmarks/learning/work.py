"""Worker processes, each with one thread."""

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator

from .rows import Row
from .runs import Job

ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1"}

Work = Callable[[Job], list[Row]]
Outcome = tuple[Job, list[Row], str]
"""A job, its rows, and the traceback if it failed."""


def make(work: Work, jobs: Iterable[Job], workers: int) -> Iterator[Outcome]:
    """Work on jobs in their order, and yield the outcomes as they arrive."""
    os.environ.update(ONE_THREAD)
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        futures = {pool.submit(_one, work, job): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process with its parent: one that is killed sends no message."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one(work: Work, job: Job) -> tuple[list[Row], str]:
    _free_other_networks(job.task, job.cell)
    try:
        return work(job), ""
    except Exception:
        return [], f"FAILED\n{traceback.format_exc()}"


@functools.lru_cache(maxsize=1)
def _free_other_networks(task: str, cell: str) -> None:
    """Free the programs of other tasks and cells, about 20 MB each."""
    import jax

    jax.clear_caches()
    gc.collect()

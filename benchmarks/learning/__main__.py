"""Train networks by every rule, and print a table of their scores.

Each seed is a row of a CSV file. A row that exists is not computed again. Exits with 1 if a run
fails.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from . import formats, measure, results, rows, runs, tasks, work
from .rows import Row
from .runs import Job


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few updates, and nothing is stored")
    parser.add_argument("--only", metavar="PATTERN", help="runs whose name contains or matches it")
    parser.add_argument("--seeds", type=int, default=len(runs.SEEDS), help="seeds of each run")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=rows.FILE, help="the CSV file")
    return parser.parse_args()


def main() -> int:
    options = options_of()
    if options.quick:
        jobs = runs.matching(runs.quick_jobs(), options.only)
        found, status = train(jobs, options.workers, None)
    else:
        wanted = runs.matching(runs.all_jobs(), options.only)
        status = 0
        for _ in range(2):  # later seeds need the learning rate of the first
            stored = rows.read(options.out)
            jobs = [j for job in wanted if (j := runs.remaining(job, stored, options.seeds))]
            status |= train(jobs, options.workers, options.out)[1]
        keys = {job.key for job in wanted}
        found = [row for row in rows.read(options.out) if row.key in keys]
    print(formats.scores(results.sort(found)))
    return status


def train(jobs: Sequence[Job], workers: int, path: Path | None) -> tuple[list[Row], int]:
    """Run jobs whose data are there, and store rows as they arrive; return them and the status."""
    available = {task for task in dict.fromkeys(job.task for job in jobs) if _has_data(task)}
    jobs = [job for job in jobs if job.task in available]
    begin, status, everything = time.perf_counter(), 0, []
    for count, (job, found, failure) in enumerate(work.make(measure.run, jobs, workers), start=1):
        minutes = (time.perf_counter() - begin) / 60
        print(f"[{count}/{len(jobs)}] {minutes:5.1f} min  {job.name} {failure}", flush=True)
        status |= bool(failure)
        everything += found
        if found and path:
            rows.add(path, found)
    return everything, status


def _has_data(task: str) -> bool:
    try:
        tasks.load(task)
    except ModuleNotFoundError as error:
        print(f"not available: {task}: {error}")
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())

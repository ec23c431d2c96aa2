"""Train networks by every rule, and write a row for each seed to a CSV file.

A row that exists is not computed again. Exits with 1 if a run fails.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import measure, online_updates, rows, runs, tasks, work
from .rows import Row, StreamRow


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="runs whose name contains or matches it")
    parser.add_argument("--seeds", type=int, default=len(runs.SEEDS), help="seeds of each run")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--costs", action="store_true", help="time the gradients of stored rows")
    parser.add_argument("--streams", action="store_true", help="updates during a sequence instead")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing")
    parser.add_argument("--out", type=Path, default=rows.FOLDER, help="folder of the CSV files")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    if options.streams:
        return _streams(options)
    path = options.out / rows.FILE.name
    if options.costs:
        stored = [row for row in rows.read(path, Row) if not row.refused and row.cosine]
        chosen = [row for row in stored if runs.matching([runs.Job(*row.key)], options.only)]
        return store(measure.timed_row, chosen, path, options.workers)
    status = 0
    for _ in range(2):  # later seeds need the learning rate of the first
        stored = rows.read(path, Row)
        wanted = runs.matching(runs.all_jobs(), options.only)
        jobs = [j for job in wanted if (j := runs.remaining(job, stored, options.seeds))]
        if options.list:
            print(*(f"{job.name}: {len(job.seeds)} seeds" for job in jobs), sep="\n")
            break
        jobs = [job for job in jobs if _has_data(job.task)]
        status |= store(measure.run, jobs, path, options.workers)
    return status


def _has_data(task: str) -> bool:
    try:
        tasks.load(task)
    except ModuleNotFoundError as error:
        print(f"not available: {task}: {error}")
        return False
    return True


def _streams(options: argparse.Namespace) -> int:
    path = options.out / online_updates.FILE.name
    stored = {(row.task, row.cell) for row in rows.read(path, StreamRow)}
    studies = [s for s in online_updates.all_studies() if (s.task, s.cell) not in stored]
    return store(online_updates.run, studies, path, options.workers)


def store(do: work.Work, jobs: Sequence[Any], path: Path, workers: int) -> int:
    """Work on jobs, and write the rows of each as it ends; return the exit status."""
    begin, status = time.perf_counter(), 0
    for count, (job, found, failure) in enumerate(work.make(do, jobs, workers), start=1):
        minutes = (time.perf_counter() - begin) / 60
        print(f"[{count}/{len(jobs)}] {minutes:5.1f} min  {line(job, found, failure)}", flush=True)
        status |= bool(failure)
        if found:
            rows.add(path, found)
    return status


def line(job: Any, found: Sequence[Any], failure: str) -> str:
    name = f"{job.task}, {job.cell}, {getattr(job, 'method', 'all rules')}"
    if failure:
        return f"FAILED {name}: {failure.strip().splitlines()[-1]}\n{failure}"
    if isinstance(found[0], StreamRow):
        return name
    if found[0].refused:
        return f"{name}: refused"
    scores = " ".join("nan" if row.score is None else f"{row.score:.3f}" for row in found)
    return f"{name}: {scores} at {found[0].rate:g}"

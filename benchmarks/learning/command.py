"""What `python -m benchmarks learning` does."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import record, runs, work
from .record import Asked, Record, Settings


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks learning",
        description="Train networks by every rule, and write a record of each run. A run whose "
        "record is there is not made again. Exits with 1 where a run does not end.",
    )
    parser.add_argument("--quick", action="store_true", help="a cut through all: three minutes")
    parser.add_argument("--only", metavar="PATTERN", help="runs whose name contains or matches it")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument(
        "--prices",
        action="store_true",
        help="take the prices of runs that are done anew, of the core table's step by step as well",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--page", action="store_true", help="write the page from the records")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run what the command line asks for; return the exit status."""
    options = options_of(arguments)
    quick = record.FOLDER.with_name(f"{record.FOLDER.name}-quick")
    folder = options.out or (quick if options.quick else record.FOLDER)
    if options.page:
        from . import page

        for path in page.write(folder):
            print(f"written: {path}")
        return 0
    missing: dict[str, str] = {}
    wanted = runs.matching(
        (runs.quick_runs if options.quick else runs.all_runs)(missing), options.only
    )
    for task, reason in missing.items():
        print(f"not available: {task}: {reason}")
    if options.list:
        print(*(settings.name for settings in wanted), sep="\n")
        return 0
    done = [settings for settings in wanted if record.is_done(folder, settings)]
    print(f"{len(done)} of {len(wanted)} runs are done")
    if options.prices:
        taken = [settings for settings in done if isinstance(settings, Settings)]
        taken = [settings for settings in taken if record.of(folder, settings).refused is None]
        return make(work.price, taken, folder, options.workers)
    open_runs = [settings for settings in wanted if settings not in done]
    return make(work.train, open_runs, folder, options.workers)


def make(job: work.Job, chosen: Sequence[Asked], folder: Path, workers: int) -> int:
    """Do a job for runs and print a line for each; return the exit status."""
    begin, status = time.perf_counter(), 0
    for count, outcome in enumerate(work.make(job, chosen, folder, workers), start=1):
        status |= outcome[1] is None
        minutes = (time.perf_counter() - begin) / 60
        print(f"[{count}/{len(chosen)}] {minutes:5.1f} min  {line(outcome)}")
        sys.stdout.flush()
    return status


def line(outcome: work.Outcome) -> str:
    """Return what a run found, in one line."""
    settings, found, reason = outcome
    if found is None:
        return f"FAILED {settings.name}: {reason.strip().splitlines()[-1]}\n{reason}"
    if isinstance(found, Record) and found.refused is not None:
        return f"{settings.name}: refused"
    seconds = ", ".join(f"{name} {number:.1f} s" for name, number in found.seconds.items())
    if not isinstance(found, Record):
        return f"{settings.name}: {seconds}"
    scores = [score for score in found.test if score is not None]
    mean = sum(scores) / len(scores) if scores else float("nan")
    return f"{settings.name}: {mean:.3f} at {found.best_rate:g}; {seconds}"

"""Learn from a stream for a million steps, twice: ``python -m benchmarks.soak --help``.

The stream has resets of single samples, masked steps and NaN inputs. One run is undisturbed. The
other is interrupted and killed, and resumes each time from its last checkpoint. Memory must stay
constant, no program may be compiled after the start, the last tenth must be as fast as the first,
and both runs must end with equal bits.
"""

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import machine, results
from ..processes import PACKAGE, run_apart
from . import run

ENDS = {"interrupted": signal.SIGINT, "killed": signal.SIGKILL}
"""How the disturbed run is ended, in thirds of its steps."""

START = 8
"""In these parts of a process, all that happens once has happened; at least a tenth of it."""

MEMORY, THROUGHPUT = 0.02, 0.05
"""How much memory and time of a step may change between the first tenth and the last."""

STEADY = ("arrays", "array_bytes", "threads", "files")

Samples = Sequence[dict[str, Any]]
Verdict = dict[str, Any]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=f"{__doc__} Writes results/soak/<machine>.json; exits with 1 if one fails.",
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the stream")
    parser.add_argument("--part", type=int, default=1000, help="steps of a call")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "soak", help="of the results")
    return parser.parse_args(arguments)


def process(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Return a process that continues a run."""
    command = [sys.executable, "-m", "benchmarks.soak.run", str(folder)]
    sizes = ["--steps", str(options.steps), "--part", str(options.part)]
    return subprocess.Popen([*command, *sizes], cwd=PACKAGE.parent)


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes of a run have written so far; the last line may be incomplete."""
    path = folder / run.LINES
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def end_after(process: subprocess.Popen[bytes], folder: Path, step: int, how: int) -> int:
    """Send a signal to a process when its run has come to a step; return its exit status."""
    while process.poll() is None:
        found = samples(folder)
        if found and found[-1]["process"] == process.pid and found[-1]["step"] >= step:
            process.send_signal(how)
            break
        time.sleep(0.02)
    return process.wait()


def run_stopped(folder: Path, options: argparse.Namespace) -> list[Verdict]:
    """Run a stream that is ended twice and resumed; return whether it was ended in the middle."""
    rows = []
    for third, (what, how) in enumerate(ENDS.items(), start=1):
        status = end_after(process(folder, options), folder, third * options.steps // 3, how)
        done = samples(folder)[-1]["step"]
        print(f"{what} after {done:,} steps: exit status {status}", flush=True)
        is_so = status == (0 if how == signal.SIGINT else -how) and done < options.steps
        rows.append(verdict(f"{what} and not ended so", int(not is_so), 0))
    finish(folder, options)
    return rows


def finish(folder: Path, options: argparse.Namespace) -> None:
    status = process(folder, options).wait()
    if status:
        raise RuntimeError(f"a process of the run ended with {status}")


def verdict(what: str, value: float, limit: float) -> Verdict:
    """Return whether a number is at most a limit."""
    return {"what": what, "value": value, "limit": limit, "holds": bool(value <= limit)}


def ends(samples: Samples, what: str) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth."""
    values = [sample[what] for sample in samples]
    tenth = max(1, len(values) // 10)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def of_process(samples: Samples) -> list[Verdict]:
    """Return whether one process keeps its memory and speed, and compiles nothing after its start.

    Other programs slow a step, and the loop of plain JAX to which its time is relative.
    """
    later = samples[max(START, len(samples) // 10) :] or samples[-1:]
    (before, after), (first, last) = ends(later, "resident"), ends(later, "relative_time")
    rows = [
        verdict("memory of the last tenth over the first", after / before, 1 + MEMORY),
        verdict("change of the time of a step", max(last / first, first / last), 1 + THROUGHPUT),
    ]
    for what in STEADY:
        least, most = ends(later, what)
        rows.append(verdict(f"{what} more than at the start", most - least, 0))
    compiled = later[-1]["compilations"] - later[0]["compilations"]
    return [*rows, verdict("programs compiled after the start", compiled, 0)]


def of_outcomes(alone: dict[str, Any], stopped: dict[str, Any]) -> list[Verdict]:
    """Return whether two runs have come to the same."""
    return [
        verdict(f"{what} differ from those of the run left alone", int(stopped[what] != value), 0)
        for what, value in alone.items()
    ]


def judge(folders: dict[str, Path]) -> dict[str, list[Verdict]]:
    found = {}
    for name, folder in folders.items():
        groups = itertools.groupby(samples(folder), key=lambda sample: sample["process"])
        for number, (_, own) in enumerate(groups, start=1):
            found[f"{name}, process {number}"] = of_process(list(own))
    outcomes = (results.load(folder / run.OUTCOME) for folder in folders.values())
    return found | {"outcomes": of_outcomes(*outcomes)}


def show(judged: dict[str, list[Verdict]]) -> bool:
    """Print verdicts; return whether all hold."""
    for about, rows in judged.items():
        for row in rows:
            word = "holds" if row["holds"] else "FAILS"
            line = f"{row['what']}: {row['value']:.4g}, at most {row['limit']:.4g}"
            print(f"{word}  {about}: {line}")
    return all(row["holds"] for rows in judged.values() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    this = run_apart(machine.describe)
    with tempfile.TemporaryDirectory() as name:
        folders = {"left alone": Path(name) / "alone", "stopped": Path(name) / "stopped"}
        finish(folders["left alone"], options)
        judged = {"stopped": run_stopped(folders["stopped"], options)} | judge(folders)
        found = {
            "machine": this,
            "steps": options.steps,
            "verdicts": judged,
            "outcome": results.load(folders["left alone"] / run.OUTCOME),
        }
    path = options.out / f"{machine.file_name(this['name'])}.json"
    results.save(path, found)
    print(f"written: {path}")
    return int(not show(judged))


if __name__ == "__main__":
    raise SystemExit(main())

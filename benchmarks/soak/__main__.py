"""Run the long run, and say what holds: ``python -m benchmarks.soak --help``."""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .. import machine, results
from ..processes import PACKAGE, run_module
from . import run, verdicts

POINTS = 40
"""So many samples of a process are kept."""

ENDS = {"interrupted": signal.SIGINT, "killed": signal.SIGKILL}
"""How the run that is not left alone is ended, in thirds of its steps."""


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description="Learn from a stream for a million steps, once left alone and once "
        "interrupted and killed; write results/soak/<machine>.json. Exits with 1 where something "
        "does not hold.",
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the stream")
    parser.add_argument("--part", type=int, default=1000, help="steps of a call")
    parser.add_argument("--out", type=Path, default=results.FOLDER / "soak", help="of the results")
    return parser.parse_args(arguments)


def process(folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Return a process that goes on with a run."""
    command = [sys.executable, "-m", "benchmarks.soak.run", str(folder)]
    sizes = ["--steps", str(options.steps), "--part", str(options.part)]
    return subprocess.Popen([*command, *sizes], cwd=PACKAGE.parent)


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes of a run have written so far; a line may be written just now."""
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


def run_stopped(folder: Path, options: argparse.Namespace) -> list[verdicts.Verdict]:
    """Run a stream that is ended twice, and goes on; return whether it was ended in the middle."""
    rows = []
    for third, (what, how) in enumerate(ENDS.items(), start=1):
        status = end_after(process(folder, options), folder, third * options.steps // 3, how)
        expected = 0 if how == signal.SIGINT else -how
        done = samples(folder)[-1]["step"]
        print(f"{what} after {done:,} steps: exit status {status}", flush=True)
        is_so = status == expected and done < options.steps
        rows.append(verdicts.verdict(f"{what} and not ended so", int(not is_so), 0))
    finish(folder, options)
    return rows


def finish(folder: Path, options: argparse.Namespace) -> None:
    """Run a stream to its end."""
    status = process(folder, options).wait()
    if status:
        raise RuntimeError(f"a process of the run ended with {status}")


def outcome(folder: Path) -> dict[str, Any]:
    """Return what has come of a run."""
    found: dict[str, Any] = json.loads((folder / run.OUTCOME).read_text())
    return found


def judge(
    folders: dict[str, Path], ended: list[verdicts.Verdict], load: float
) -> dict[str, list[verdicts.Verdict]]:
    """Return verdicts by what they are about."""
    alone, stopped = folders["left alone"], folders["stopped"]
    found = {"throughput": verdicts.of_throughput(samples(alone), load, machine.cores())}
    for name, folder in folders.items():
        for number, (_, own) in enumerate(by_process(samples(folder)), start=1):
            found[f"{name}, process {number}"] = verdicts.of_process(own)
    found["stopped"] = ended + verdicts.of_outcomes(outcome(alone), outcome(stopped))
    return found


def by_process(found: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the samples of every process."""
    groups = itertools.groupby(found, key=lambda sample: sample["process"])
    return [(own, list(members)) for own, members in groups]


def thinned(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return some of the samples, and the last."""
    return [*found[: -1 : max(1, len(found) // POINTS)], found[-1]]


def show(judged: dict[str, list[verdicts.Verdict]]) -> bool:
    """Print verdicts; return whether all hold."""
    for about, rows in judged.items():
        for row in rows:
            word = "holds" if row["holds"] else "FAILS"
            note = f" ({row['note']})" if "note" in row else ""
            line = f"{about}: {row['what']}: {row['value']:.4g}, at most {row['limit']:.4g}{note}"
            print(f"{word}  {line}")
    return all(row["holds"] for rows in judged.values() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    options = options_of(arguments)
    this = run_module("machine")
    with tempfile.TemporaryDirectory() as name:
        folders = {"left alone": Path(name) / "alone", "stopped": Path(name) / "stopped"}
        start = time.perf_counter()
        finish(folders["left alone"], options)
        load = os.getloadavg()[1]
        ended = run_stopped(folders["stopped"], options)
        judged = judge(folders, ended, load)
        found = {
            "machine": this,
            "steps": options.steps,
            "seconds": time.perf_counter() - start,
            "load": load,
            "verdicts": judged,
            "outcome": outcome(folders["left alone"]),
            "samples": {what: thinned(samples(folder)) for what, folder in folders.items()},
        }
    path = options.out / f"{machine.file_name(this['name'])}.json"
    results.save(path, found)
    print(f"written: {path}")
    return int(not show(judged))


if __name__ == "__main__":
    raise SystemExit(main())

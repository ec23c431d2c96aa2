"""Speed of two checkouts, in turn: ``python -m benchmarks.compare BASE [HERE]``.

Two processes, one for each checkout, run the same rows of `speed` in the order ABBA, BAAB, …, so
that a busy machine slows both alike. The ratio of a row is the median over its rounds of this
checkout's time over the base's. The exit status is 1 if the median of all rows or a single row is
above its limit.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
SHORTEST = 0.05
"""Seconds that a measurement takes at least, by repeated calls."""


class Process:
    """A process with the library of a checkout and a copy of these benchmarks."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        path = os.pathsep.join([str(folder), str(checkout)])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.compare", "--serve"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        to.write(json.dumps(command) + "\n")
        to.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError("a process has ended; its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Answer commands on standard input; everything that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from .speed import METHODS, MORE, ROWS
    from .timing import Call, time_once

    call = Call(lambda: None)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "row" in command:
                import jax

                jax.clear_caches()
                call = METHODS[command["method"]]((ROWS | MORE)[command["row"]])
                first = time_once(call)
                answer: dict[str, Any] = {"wall": first if call.starts_cold else time_once(call)}
            else:
                cpu = time.process_time()
                wall = statistics.mean(time_once(call) for _ in range(command["calls"]))
                cpu = (time.process_time() - cpu) / command["calls"]
                answer = {"wall": wall, "cpu": cpu}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def measure(
    base: Process, here: Process, row: str, method: str, seconds: float, clock: str
) -> list[float]:
    """Return the ratios of here over base, one a round; at least three rounds."""
    built = [side.ask(row=row, method=method) for side in (base, here)]
    for name, answer in zip(("base", "here"), built, strict=True):
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
    calls = max(1, min(300, round(SHORTEST / min(answer["wall"] for answer in built))))
    ratios: list[float] = []
    end = time.perf_counter() + seconds
    while len(ratios) < 3 or (time.perf_counter() < end and len(ratios) < 15):
        times: dict[Process, list[float]] = {base: [], here: []}
        for side in (base, here, here, base) if len(ratios) % 2 else (here, base, base, here):
            times[side].append(side.ask(calls=calls)[clock])
        ratios.append(min(times[here]) / min(times[base]))
    return ratios


@contextlib.contextmanager
def checkout_of(base: str) -> Iterator[Path]:
    """Offer a folder with the base: the one that is given, or a commit's."""
    if (Path(base) / "braintrace").is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        git, path = ["git", "-C", str(PACKAGE), "worktree"], Path(folder) / "base"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), base], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


@contextlib.contextmanager
def processes(*checkouts: Path) -> Iterator[list[Process]]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            PACKAGE,
            Path(folder) / "benchmarks",
            ignore=shutil.ignore_patterns("results", "learning", "__pycache__"),
        )
        running = [Process(checkout, Path(folder)) for checkout in checkouts]
        try:
            yield running
        finally:
            for process in running:
                process.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", nargs="?", help="a commit, or the folder of a checkout")
    parser.add_argument("here", nargs="?", type=Path, default=PACKAGE.parent)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", metavar="PATTERNS", help="names of rows, with *, between |")
    parser.add_argument("--all", action="store_true", help="further sizes and methods")
    parser.add_argument("--seconds", type=float, default=4, help="of a row; default 4")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="default: wall")
    parser.add_argument("--median-limit", type=float, default=1.03)
    parser.add_argument("--row-limit", type=float, default=1.25)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.base is None:
        parser.error("name a commit or the folder of a checkout")
    from .speed import MORE, ROWS, select

    rows = select(ROWS | (MORE if options.all else {}), options.rows)
    medians: dict[str, float] = {}
    with checkout_of(options.base) as base, processes(base, options.here.resolve()) as (old, new):
        for name, row in rows.items():
            for method in row.methods:
                title = f"{name}: {method}"
                try:
                    ratios = measure(old, new, name, method, options.seconds, options.clock)
                except RuntimeError as error:
                    print(f"{title:48} {error}", flush=True)
                    medians[title] = float("inf")
                    continue
                medians[title] = statistics.median(ratios)
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds"
                print(f"{title:48} {medians[title]:6.3f}   {spread}", flush=True)
    median = statistics.median(medians.values())
    slow = [title for title, ratio in medians.items() if ratio > options.row_limit]
    print(f"\nmedian {median:.3f} (limit {options.median_limit})")
    print(f"above {options.row_limit}: {', '.join(slow) or 'none'}")
    return int(median > options.median_limit or bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())

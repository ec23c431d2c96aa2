"""Compare the speed of this checkout with another one: ``python -m benchmarks.golden_speed``.

Two processes, one for each checkout, are alive at once and compute in turn, so that what slows the
machine slows both. They are timed in the order ABBA, then BAAB, and so on. Each such round gives
one ratio: the shorter time of this checkout over the shorter one of the base. The ratio of a row is
the median over its rounds. Rows above their limit are measured once more in fresh processes, and
all rounds count. The exit status is 1 if the median of the rows or a single row is above its limit,
or if a row fails.

``BRAINTRACE_MODELS=tests/support`` adds a row for the compilation of each model of the tests:
``--rows 'compile all models' --clock cpu`` compares all of them together in a few minutes.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .processes import ENVIRONMENT, PACKAGE

BASE = "d1c19eb"
HERE = PACKAGE.parent
SAMPLE, MOST_CALLS = 0.05, 300
"""Seconds that a time takes at least, by repeated calls, and how many of them at most."""
LEAST_ROUNDS = 5
AGAIN = 1.5
"""Rounds of a row in the second look, over those of the first."""


Timer = Any
"""An object that answers commands: a `Remote`, or in tests a `golden_worker.Worker`."""


class Remote:
    """A process with the library of a checkout and the rows of this one.

    The folder has a copy of this package, and takes bytecode and what the process prints.
    """

    def __init__(self, checkout: Path, folder: Path) -> None:
        handle, path = tempfile.mkstemp(dir=folder)
        self._printed = Path(path)
        own = {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        models = {k: os.path.abspath(v) for k, v in os.environ.items() if k == "BRAINTRACE_MODELS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE.name}.golden_worker"],
            cwd=folder,
            env=os.environ | ENVIRONMENT | own | models,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
        )
        os.close(handle)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            to.write(json.dumps(command) + "\n")
            to.flush()
            line = answers.readline()
        if not line:
            printed = self._printed.read_text().strip().splitlines()
            raise RuntimeError(f"a process has ended: {printed[-1] if printed else 'no message'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclasses.dataclass
class Measured:
    """Seconds of a call of a row and temporary bytes, by the base and by this checkout."""

    name: str
    rounds: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    bytes: tuple[int | None, int | None] = (None, None)
    error: str | None = None

    @property
    def ratios(self) -> list[float]:
        return [own / base for base, own in self.rounds]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios) if self.rounds else math.nan

    def line(self) -> str:
        if self.error is not None:
            return f"{self.name:42} {self.error}"
        low, _, high = statistics.quantiles(self.ratios, n=4)
        base, own = (1e3 * statistics.median(side) for side in zip(*self.rounds, strict=True))
        memory = "  ".join("       –" if b is None else f"{b / 2**20:8.2f}" for b in self.bytes)
        return (
            f"{self.name:42} {self.ratio:6.3f}  {low:6.3f}..{high:<6.3f} "
            f"{min(self.ratios):6.3f}..{max(self.ratios):<6.3f} {len(self.rounds):3} "
            f"{base:10.3f} {own:10.3f}  {memory}"
        )


HEAD = (
    f"{'':42} {'ratio':>6}  {'quartiles':^14} {'smallest, largest':^14} {'n':>3} "
    f"{'base, ms':>10} {'here, ms':>10}  temporary MiB: base, here"
)


def ask(timers: Sequence[Timer], **command: Any) -> list[dict[str, Any]]:
    """Give all the same command, one after the other."""
    return [timer.answer(dict(command)) for timer in timers]


def measure(
    name: str, timers: Sequence[Timer], rounds: int, seconds: float, clock: str = "wall"
) -> Measured:
    """Return the times of a row, of as many rounds as fit into some seconds."""
    end, found = time.perf_counter() + seconds, Measured(name)
    try:
        built = ask(timers, do="build", row=name)
        for where, answer in zip(("base", "this checkout"), built, strict=True):
            if "error" in answer:
                found.error = f"{where}: {answer['error']}"
                return found
        found.bytes = (built[0]["bytes"], built[1]["bytes"])
        once = min(answer["seconds"] for answer in built)
        calls = min(MOST_CALLS, max(1, math.ceil(SAMPLE / once)))
        for count in range(rounds):
            if count >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            times: tuple[list[float], list[float]] = ([], [])
            for side in (0, 1, 1, 0) if count % 2 == 0 else (1, 0, 0, 1):
                answer = timers[side].answer({"do": "time", "calls": calls})
                times[side].append(answer[clock])
            found.rounds.append((min(times[0]), min(times[1])))
    finally:
        ask(timers, do="drop")
    return found


@contextlib.contextmanager
def processes(checkouts: Iterable[Path]) -> Iterator[list[Timer]]:
    """Offer a process for each checkout."""
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        ignored = shutil.ignore_patterns("results", "learning", "__pycache__")
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=ignored)
        remotes = [Remote(checkout, folder) for checkout in checkouts]
        for remote in remotes:
            ends.callback(remote.close)
        ask(remotes, do="drop")  # answered when everything has been imported
        yield remotes


@contextlib.contextmanager
def checkout_of(base: str) -> Iterator[Path]:
    """Offer a folder with the base: the one that is given, or a commit's."""
    if (Path(base) / "braintrace").is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        path, git = Path(folder) / "base", ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), base], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def run_all(
    names: Sequence[str], timers: Sequence[Timer], rounds: int, end: float, clock: str
) -> dict[str, Measured]:
    """Measure rows, each for its share of the time that is left, and print them."""
    found = {}
    for count, name in enumerate(names):
        share = (end - time.perf_counter()) / (len(names) - count)
        found[name] = measure(name, timers, rounds, share, clock)
        print(found[name].line(), flush=True)
    return found


def verdict(found: dict[str, Measured], options: argparse.Namespace) -> int:
    """Print what holds, and return the exit status."""
    failed = [row.name for row in found.values() if row.error is not None]
    ratios = [row.ratio for row in found.values() if row.error is None]
    median = statistics.median(ratios) if ratios else math.nan
    slow = [row.name for row in found.values() if row.ratio > options.row_limit]
    print(f"\nmedian of {len(ratios)} rows: {median:.3f}, at most {options.median_limit}")
    for what, names in ((f"above {options.row_limit}", slow), ("failed", failed)):
        print(f"{what}: {', '.join(names) or 'none'}")
    return int(not median <= options.median_limit or bool(slow or failed))


def chosen(rows: Any, options: argparse.Namespace) -> list[str]:
    if options.rows is not None:
        patterns = options.rows.split("|")
        return [n for n in rows if any(p in n or fnmatch(n, p) for p in patterns)]
    return [n for n, row in rows.items() if row.quick or not options.quick]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.golden_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", default=BASE, help=f"a checkout or a commit; {BASE}")
    parser.add_argument("--here", type=Path, default=HERE, help="the checkout that is judged")
    parser.add_argument("--rows", metavar="PATTERNS", help="names or parts of them, between |")
    parser.add_argument("--quick", action="store_true", help="few rows: two minutes")
    parser.add_argument("--minutes", type=float, help="for everything; 15, with --quick 2")
    parser.add_argument("--rounds", type=int, default=15, help="of a row, if there is time")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="default: wall")
    parser.add_argument("--median-limit", type=float, default=1.05, help="of all rows")
    parser.add_argument("--row-limit", type=float, default=1.15, help="of a single row")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, names: list[str], base: Path) -> dict[str, Measured]:
    """Measure all rows, and once more those above the limit."""
    minutes = options.minutes or (2.0 if options.quick else 15.0)
    start, checkouts = time.perf_counter(), (base, options.here.resolve())
    print(f"base: {base}\nhere: {checkouts[1]}\n\n{HEAD}", flush=True)
    with processes(checkouts) as timers:
        found = run_all(names, timers, options.rounds, start + 0.85 * 60 * minutes, options.clock)
    slow = [row.name for row in found.values() if row.ratio > options.row_limit]
    if slow:
        print("\nonce more, in fresh processes")
        end = max(start + 60 * minutes, time.perf_counter() + 10)
        with processes(checkouts) as timers:
            more = run_all(slow, timers, math.ceil(AGAIN * options.rounds), end, options.clock)
        for name in slow:
            found[name].rounds += more[name].rounds
    return found


def main(arguments: list[str] | None = None) -> int:
    from .golden_rows import ROWS

    options = options_of(arguments)
    names = chosen(ROWS, options)
    if options.list:
        print(*names, sep="\n")
        return 0
    with checkout_of(options.base) as base:
        found = compare(options, names, base)
    return verdict(found, options)


if __name__ == "__main__":
    raise SystemExit(main())

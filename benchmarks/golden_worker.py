"""Time rows of one checkout in this process: commands and answers are lines of JSON."""

import gc
import json
import os
import sys
import time
from typing import Any

import jax

from .case import Subject
from .golden_rows import ROWS, Row
from .subjects import temporary_bytes


def settle() -> None:
    gc.collect()
    gc.freeze()  # no later collection looks at what has been built


def forget() -> None:
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()


class Worker:
    """The row that is being timed, with its compiled programs."""

    def __init__(self) -> None:
        self._row: Row | None = None
        self._call: Subject | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run a command; an error is part of the answer."""
        try:
            do = command.pop("do")
            if do == "build":
                return self.build(**command)
            return self.time(**command) if do == "time" else self.drop()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}

    def build(self, row: str) -> dict[str, Any]:
        """Build a row and run it once; return its temporary bytes and the seconds of a call."""
        self._row = ROWS[row]
        self._call = self._row.build()
        lower = self._call.lower
        found = None if lower is None else temporary_bytes(lower())
        first = self._seconds()
        again = first if self._row.is_first else self._seconds()
        settle()
        return {"bytes": found, "seconds": again}

    def time(self, calls: int) -> dict[str, Any]:
        """Return the seconds of a call, and those of the processor; the means of several.

        Short ones warm up first.
        """
        gc.disable()
        if calls > 1:
            self._seconds()
        try:
            before = time.process_time()
            total = sum(self._seconds() for _ in range(calls))
            cpu = time.process_time() - before
        finally:
            gc.enable()
        return {"wall": total / calls, "cpu": cpu / calls}

    def drop(self) -> dict[str, Any]:
        self._row = self._call = None
        forget()
        return {}

    def _seconds(self) -> float:
        assert self._row is not None and self._call is not None, "no row has been built"
        if self._row.is_first:
            jax.clear_caches()
            gc.collect()
        start = time.perf_counter()
        jax.block_until_ready(self._call.run())
        return time.perf_counter() - start


def main() -> None:
    """Answer on standard output; what others print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

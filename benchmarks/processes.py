"""Processes that run one module of this package each."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
ENVIRONMENT = {
    # A first call compiles, whatever ran before.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Freed memory stays with the process. The page faults of a function would otherwise depend on
    # the sizes that other functions free. The arenas of other threads always return arrays of more
    # than 64 MiB.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
}


def run_module(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this package that writes JSON, and return its content.

    If the process fails, a `RuntimeError` has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        process = subprocess.run(
            [sys.executable, "-m", f"{PACKAGE.name}.{module}", *arguments, "--out", str(out)],
            cwd=PACKAGE.parent,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if process.returncode or not out.exists():
            printed = (process.stdout + process.stderr).strip()[-4000:] or "no output"
            last = printed.splitlines()[-1]
            raise RuntimeError(f"exit status {process.returncode}: {last}\n\n{printed}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found

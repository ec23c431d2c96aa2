"""Processes that run one case each, under this interpreter or another one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
ENVIRONMENT = {
    # A first call compiles, whatever ran before.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Freed memory stays with the process. What a function pays for page faults would otherwise
    # depend on the sizes that its neighbours free. The arenas of other threads always give arrays
    # of more than 64 MiB back.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
}


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that runs cases.

    Attributes
    ----------
    executable
        Its path.
    folder
        Where the processes start, and find this package (and, in the repository, the library).
    foreign
        Whether the library is another one, which may lack or refuse anything.
    """

    executable: str
    folder: Path
    foreign: bool


OWN = Interpreter(sys.executable, PACKAGE.parent, foreign=False)


@contextmanager
def other(executable: str) -> Iterator[Interpreter]:
    """Offer another interpreter.

    It works on a copy of this package: next to the original it would import the library of this
    repository instead of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=ignored)
        yield Interpreter(str(Path(executable).absolute()), Path(folder), foreign=True)


def run_module(
    interpreter: Interpreter, module: str, *arguments: str, devices: int = 1
) -> dict[str, Any]:
    """Run a module of this package that writes JSON, and return that.

    Parameters
    ----------
    interpreter, module, *arguments
        Who runs what.
    devices
        How many devices a processor is shown as.

    Raises
    ------
    RuntimeError
        If the process fails; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [interpreter.executable, "-m", f"{PACKAGE.name}.{module}", *arguments]
        environment = os.environ | ENVIRONMENT
        if devices > 1:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        if interpreter.foreign:
            environment.pop("PYTHONPATH", None)
        process = subprocess.run(
            [*command, "--out", str(out)],
            cwd=interpreter.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if process.returncode or not out.exists():
            printed = (process.stdout + process.stderr).strip()[-4000:] or "nothing printed"
            last = printed.splitlines()[-1]
            raise RuntimeError(f"exit status {process.returncode}: {last}\n\n{printed}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def run_case(
    interpreter: Interpreter, name: str, platform: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Run a case in a process of its own.

    One that dies is a case with an error, or, where the library is another one, one that it does
    not offer.
    """
    arguments = [
        "--platform",
        platform,
        "--rounds",
        str(rounds),
        "--seconds",
        str(seconds),
    ]
    if interpreter.foreign:
        arguments.append("--lenient")
    try:
        return run_module(interpreter, "child", name, *arguments)
    except RuntimeError as error:
        if interpreter.foreign:
            return {"name": name, "missing": {"everything": str(error).splitlines()[0]}}
        return {"name": name, "error": str(error)}

"""Copies of the repository with a fault in them, and the tests that run there."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("braintrace", "tests", "benchmarks", "docs/examples", "pyproject.toml", "README.md")
NOT_COPIED = (".git", ".*_cache", "__pycache__", "build", "dist", ".venv", "venv", ".hypothesis")
PASSED, FAILED = 0, 1


def copy_repository(folder, names=COPIED):
    for name in names:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def copy_everything(folder):
    """Copy all that tests read, so that all of them run."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)


def _take_interrupts():
    """Let Ctrl-C arrive as tests of it need, where a shell in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_pytest(folder, arguments, timeout=None, **environment):
    """Return pytest's exit status, `None` after the timeout, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    known = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    known.setdefault("JAX_PLATFORMS", "cpu")
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**known, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its workers end with it
        preexec_fn=_take_interrupts,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed


def run_tests(folder, tests):
    """Return pytest's exit status and the end of what it printed, for some tests."""
    status, printed = run_pytest(folder, ["-n0", "-q", "-x", *tests])
    return status, printed[-2000:]

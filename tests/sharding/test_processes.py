"""A learner whose devices belong to several processes learns as in one, and is never waited for."""

import os
import socket
import subprocess
import sys
import threading
import time

import example_scripts
import jax
import numpy as np
import places
import pytest

import braintrace

LAUNCHER = [sys.executable, str(example_scripts.FOLDER / "processes.py"), "2"]
PATIENCE = 60
"""Seconds after which nobody may wait for a process that has been lost."""


def environment():
    folders = [places.SEARCHED, example_scripts.FOLDER, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }


def program(case, folder):
    return [str(places.SUPPORT / "processes_program.py"), case, str(folder)]


def run(case, folder):
    """Run a case in two processes of two devices each; return what they print."""
    folder.mkdir(exist_ok=True)
    command = [*LAUNCHER, *program(case, folder)]
    run = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(example_scripts.FOLDER))
    return example_scripts.load("multi_host")


def check_restored(learner, folder):
    """Restore what processes have saved in this one; they say what they had."""
    braintrace.restore(folder, learner)
    leaves = jax.tree.leaves(jax.device_get(learner.functional().state()))
    with np.load(folder / "state.npz") as found:
        for number, leaf in enumerate(leaves):
            np.testing.assert_array_equal(leaf, found[f"arr_{number}"])
        return found["losses"]


WRONG_OPTIONS = {
    "--parts 0": "--parts: expected a whole number of 1 or more, got '0'",
    "--devices=-2": "--devices: expected a whole number of 1 or more, got '-2'",
    "--processes 2": "belong together",
    "--coordinator a:1 --processes 2": "belong together",
    "--coordinator a:1 --processes 2 --process 2": "counted from 0 to 1, got 2",
    "--coordinator a --processes 2 --process 0": "expected ADDRESS:PORT, got 'a'",
    "--coordinator a:65536 --processes 2 --process 0": "expected ADDRESS:PORT, got 'a:65536'",
    "--coordinator a:1 --processes 2 --process 0 --wait 0": "--wait: expected a whole number",
    "--cluster --processes 2": "--cluster asks the scheduler",
}


@pytest.mark.parametrize("given", WRONG_OPTIONS)
def test_wrong_options_are_told(given, example, capsys):
    with pytest.raises(SystemExit):
        example.parse_options(["stream", *given.split()])
    assert WRONG_OPTIONS[given] in capsys.readouterr().err


def test_a_cluster_without_a_scheduler_is_told(example, monkeypatch):
    def without_scheduler(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", without_scheduler)
    with pytest.raises(SystemExit, match="JAX finds no scheduler"):
        example.connect(example.parse_options(["stream", "--cluster"]))


def options_of(example, port, process):
    together = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(process)]
    return example.parse_options(["stream", *together, "--wait", "1"])


@pytest.fixture
def taken():
    """A port at which another program listens."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_of_another_program_is_told(example, taken):
    with pytest.raises(SystemExit, match=rf"cannot listen at port {taken} .*another port"):
        example.connect(options_of(example, taken, 0))


def test_processes_that_find_each_other_go_on(example, taken, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("ended"))
    running = set(threading.enumerate())
    example.connect(options_of(example, taken, 1))
    for timer in set(threading.enumerate()) - running:
        timer.join(timeout=0.5)  # one that is cancelled ends at once
        assert not timer.is_alive()


def test_the_launcher_tells_how_it_is_called():
    launcher = example_scripts.load("processes")
    for arguments in [[], ["2"], ["0", "a.py"], ["-1", "a.py"], ["two", "a.py"]]:
        assert launcher.main(arguments) == launcher.USAGE


@pytest.mark.core
def test_the_launcher_says_who_has_failed_and_ends_the_others():
    code = "import sys, time; number = int(sys.argv[-1]); number or time.sleep(60); sys.exit(3)"
    started = time.perf_counter()
    run = subprocess.run([*LAUNCHER, "-c", code], capture_output=True, text=True, check=False)
    assert time.perf_counter() - started < 30
    assert run.returncode == 1
    assert "process 1 of 2 has ended with status 3" in run.stderr
    assert "Start the same command again" in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot end with their parent")
def test_nothing_is_left_of_a_launcher_that_is_killed():
    code = "import os, time; os.write(1, b'begun'); time.sleep(60)"
    with subprocess.Popen([*LAUNCHER, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.read(10) == b"begunbegun"
        launcher.kill()
        assert launcher.stdout.read() == b""  # ends when nobody can write to it any more

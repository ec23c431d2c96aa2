"""The long run, as a short one: it goes on where it was ended, and what does not hold is told."""

import json
import signal

import pytest
from drivers import compiled_once

from benchmarks.soak import __main__ as soak
from benchmarks.soak import run, stream, verdicts

LENGTH = 12


class Killed(BaseException):
    """In the place of the end of a process, which leaves what it has saved and nothing else."""


def stop_by(stop, after):
    """Return what stops a run, called for the first, second ... time."""
    calls = []

    def on_log(step, metrics):
        calls.append(step)
        if len(calls) == after:
            stop()

    return on_log


def kill():
    raise Killed


def interrupt():
    signal.raise_signal(signal.SIGINT)


def steps_of(folder):
    return [sample["step"] for sample in soak.samples(folder)]


@pytest.fixture
def small(monkeypatch):
    """A stream for four units, whose learners are one that begins anew: it is compiled once."""
    monkeypatch.setattr(stream, "UNITS", 4)
    monkeypatch.setattr(run, "PARTS_OF_A_SAVE", 2)
    monkeypatch.setattr(stream, "learner", compiled_once(stream.learner))


@pytest.mark.nightly
def test_a_run_that_is_interrupted_and_killed_ends_as_one_that_is_not(small, tmp_path):
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    expected = run.learn(alone, 5 * LENGTH, LENGTH)
    assert run.learn(stopped, 5 * LENGTH, LENGTH, stop_by(interrupt, 6)) is None
    assert steps_of(stopped) == [LENGTH]
    with pytest.raises(Killed):  # in the fourth part, two parts after what has been saved
        run.learn(stopped, 5 * LENGTH, LENGTH, stop_by(kill, 7))
    found = run.learn(stopped, 5 * LENGTH, LENGTH)
    assert found == expected
    assert found["skipped updates"] > 0
    assert steps_of(stopped)[-1] == steps_of(alone)[-1] == 5 * LENGTH
    assert len(steps_of(stopped)) > len(steps_of(alone))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:unclosed")
def test_its_processes_are_ended_from_outside(tmp_path):
    soak.main(["--steps", "6000", "--part", "200", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert len(found["verdicts"]) == 1 + 1 + 3 + 1  # throughput, processes of both runs, outcomes
    assert all(row["holds"] for row in found["verdicts"]["stopped"])


def samples(count=100, **changes):
    """Return what a process writes that holds everything, but for some changes at its end."""
    steady = {"resident": 5e8, "arrays": 30, "array_bytes": 1000, "threads": 1, "files": 7}
    steady |= {"compilations": 60, "steps": 1000, "call": 0.05, "processor": 0.05, "control": 0.01}
    found = [{**steady, "processor_seconds": 0.1 * number} for number in range(count)]
    return [*found[:-20], *({**sample, **changes} for sample in found[-20:])]


@pytest.mark.parametrize(
    "changes",
    [
        {"resident": 5.2e8},
        {"arrays": 31},
        {"array_bytes": 1004},
        {"threads": 2},
        {"files": 8},
        {"compilations": 61},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_grows_does_not_hold(changes):
    assert all(row["holds"] for row in verdicts.of_process(samples()))
    assert not all(row["holds"] for row in verdicts.of_process(samples(**changes)))


def test_what_is_compiled_after_a_minute_does_not_hold():
    late = samples()
    late[-1]["compilations"] += 1
    late[-2]["processor_seconds"] = 61.0
    failed = [row["what"] for row in verdicts.of_process(late) if not row["holds"]]
    assert len(failed) == 2


@pytest.mark.parametrize("changed", [0.94, 1.06])
def test_another_throughput_does_not_hold(changed):
    def holds(load, **changes):
        rows = verdicts.of_throughput(samples(**changes), load, cores=2)
        return [row["holds"] for row in rows]

    assert holds(1.0) == [True, True]
    assert holds(1.0, call=0.05 * changed) == [False, True]
    assert holds(1.0, processor=0.05 * changed) == [True, False]
    assert holds(8.0, call=0.05 * changed) == [True, True]
    assert holds(8.0, processor=0.05 * changed, control=0.01 * changed) == [True, True]


def test_other_outcomes_do_not_hold():
    (same,) = verdicts.of_outcomes({"parameters": "a"}, {"parameters": "a"})
    (other,) = verdicts.of_outcomes({"parameters": "a"}, {"parameters": "b"})
    assert same["holds"]
    assert not other["holds"]
    assert not soak.show({"": [other]})

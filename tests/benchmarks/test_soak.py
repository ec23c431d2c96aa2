"""The long run, as a short one: it goes on where it was ended, and what does not hold is told."""

import json
import signal

import pytest
from drivers import compiled_once

from benchmarks.soak import __main__ as soak
from benchmarks.soak import run

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
    monkeypatch.setattr(run, "UNITS", 4)
    monkeypatch.setattr(run, "PARTS_OF_A_SAVE", 2)
    monkeypatch.setattr(run, "new_learner", compiled_once(run.new_learner))


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
    assert len(found["verdicts"]) == 1 + 1 + 3 + 1  # how it ended, processes of both runs, outcomes
    assert all(row["holds"] for row in found["verdicts"]["stopped"])
    assert all(row["holds"] for row in found["verdicts"]["outcomes"])


def samples(count=100, **changes):
    """Return what a process writes that holds everything, but for some changes at its end."""
    steady = {"resident": 5e8, "arrays": 30, "array_bytes": 1000, "threads": 1, "files": 7}
    steady |= {"compilations": 60, "relative_time": 0.05}
    return [steady] * (count - 20) + [steady | changes] * 20


@pytest.mark.parametrize(
    "changes",
    [
        {"resident": 5.2e8},
        {"arrays": 31},
        {"array_bytes": 1004},
        {"threads": 2},
        {"files": 8},
        {"compilations": 61},
        {"relative_time": 0.053},
        {"relative_time": 0.047},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_does_not_hold(changes):
    assert all(row["holds"] for row in soak.of_process(samples()))
    failed = [row for row in soak.of_process(samples(**changes)) if not row["holds"]]
    assert len(failed) == 1


def test_other_outcomes_do_not_hold():
    (same,) = soak.of_outcomes({"parameters": "a"}, {"parameters": "a"})
    (other,) = soak.of_outcomes({"parameters": "a"}, {"parameters": "b"})
    assert same["holds"]
    assert not other["holds"]
    assert not soak.show({"": [other]})

"""Two checkouts are compared row by row; the clock decides nothing here."""

import json
import subprocess
import sys

import pytest

from benchmarks import golden_rows, golden_speed, golden_worker
from benchmarks.golden_speed import HERE, Measured
from benchmarks.golden_worker import Worker

ROW = "smallest"


class Clock:
    """A process whose calls take as long as it is told, one number after the other."""

    def __init__(self, *seconds, **built):
        self.seconds, self.built, self.commands = list(seconds), built, []

    def answer(self, command):
        self.commands.append(command["do"])
        if command["do"] == "build":
            return {"bytes": 2**20, "seconds": 1.0, **self.built}
        if command["do"] == "time":
            seconds = self.seconds.pop(0)
            return {"wall": seconds, "cpu": 2 * seconds}
        return {}


@pytest.fixture(autouse=True)
def programs_of_other_tests_stay(monkeypatch):
    """A worker has its process for itself; here it has not."""
    for name in ("settle", "forget"):
        monkeypatch.setattr(golden_worker, name, lambda: None)


def options(*arguments):
    return golden_speed.options_of([*arguments])


def test_a_row_is_built_timed_in_turn_and_dropped():
    timer = Worker()
    found = golden_speed.measure(ROW, (timer, Worker()), 2, 60.0, "cpu")
    assert found.error is None
    assert len(found.rounds) == 2 and all(seconds > 0 for pair in found.rounds for seconds in pair)
    assert found.bytes[0] == found.bytes[1] > 0
    assert found.line().startswith(ROW)
    assert "error" in timer.answer({"do": "time", "calls": 1})


def test_the_ratio_of_a_round_is_that_of_the_shorter_times():
    base, here = Clock(1.0, 9.0, 2.0, 2.0, 1.0, 1.0), Clock(3.0, 2.0, 3.0, 3.0, 8.0, 1.5)
    found = golden_speed.measure("row", (base, here), 3, 60.0)
    assert found.rounds == [(1.0, 2.0), (2.0, 3.0), (1.0, 1.5)]
    assert (found.ratios, found.ratio) == ([2.0, 1.5, 1.5], 1.5)
    assert base.commands == here.commands == ["build", *["time"] * 6, "drop"]


def test_the_clock_is_an_option():
    found = golden_speed.measure("row", (Clock(1.0, 1.0), Clock(3.0, 3.0)), 1, 60.0, "cpu")
    assert found.rounds == [(2.0, 6.0)]


def test_without_time_a_row_still_gets_a_few_rounds():
    found = golden_speed.measure("row", (Clock(*[1.0] * 99), Clock(*[1.0] * 99)), 40, 0.0)
    assert len(found.rounds) == golden_speed.LEAST_ROUNDS


def measured(**ratios):
    return {name: Measured(name, [(1.0, ratio)] * 3) for name, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (measured(a=1.0, b=1.14, c=1.04), 0, "above 1.15: none"),
        (measured(a=1.0, b=1.16, c=1.0), 1, "above 1.15: b"),
        (measured(a=1.06, b=1.06, c=1.0), 1, "median of 3 rows: 1.060"),
        ({**measured(a=1.0), "b": Measured("b", error="base: it broke")}, 1, "failed: b"),
        ({}, 1, "median of 0 rows: nan"),
    ],
)
def test_a_slow_median_or_row_fails(found, status, said, capsys):
    assert golden_speed.verdict(found, options()) == status
    assert said in capsys.readouterr().out


def test_limits_are_options(capsys):
    limits = "--median-limit", "1.3", "--row-limit", "1.4"
    assert golden_speed.verdict(measured(a=1.2, b=1.35, c=1.3), options(*limits)) == 0
    assert golden_speed.verdict(measured(a=1.2, b=1.35, c=1.3), options()) == 1


def test_what_a_checkout_lacks_is_an_error_of_that_row():
    found = golden_speed.measure("row", (Clock(error="NameError: x"), Clock()), 3, 60.0)
    assert (found.error, found.rounds) == ("base: NameError: x", [])
    assert "NameError" in found.line()
    assert "KeyError" in Worker().answer({"do": "build", "row": "no such row"})["error"]


def test_rows_by_name_and_by_effort():
    rows = golden_rows.ROWS
    everything = golden_speed.chosen(rows, options())
    assert everything == list(rows)
    assert 5 <= len(golden_speed.chosen(rows, options("--quick"))) < len(everything)
    chosen = golden_speed.chosen(rows, options("--rows", "call, leaky|GRU x3, ES*"))
    assert sorted(chosen) == ["GRU x3, ES_D_RTRL", "first call, leaky"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", [ROW, "one step, functional", "first call, leaky"])
def test_two_checkouts_run_in_processes_of_their_own(name, capsys):
    arguments = ["--base", str(HERE), "--rows", name, "--rounds", "2", "--minutes", "0.1"]
    status = golden_speed.main([*arguments, "--median-limit", "1e9", "--row-limit", "1e9"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert f"\n{name} " in printed and "failed: none" in printed


@pytest.mark.nightly
def test_a_process_answers_on_its_standard_output_alone():
    commands = [{"do": "build", "row": "no such row"}, {"do": "drop"}]
    program = "import sys; from benchmarks.golden_worker import main; main(); print('after')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="".join(json.dumps(command) + "\n" for command in commands),
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [*map(json.loads, done.stdout.splitlines())] == [
        {"error": "KeyError: 'no such row'"},
        {},
    ]

"""The notebook of the evidence makes the tables that it stores, and they agree with the rows."""

import ast
import dataclasses
import json
import math

import matplotlib as mpl
import matplotlib.pyplot as plt
import places
import pytest

from benchmarks.learning import formats, methods, networks, results, rows, runs
from benchmarks.learning.rows import Row, StreamRow
from benchmarks.learning.streams import Streams

CELLS = {
    cell["id"]: cell
    for cell in json.loads((places.DOCS / "evidence.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
}

CHANCE, THRESHOLD = 0.125, 0.9
SEEDS = (-1, 0, 1)
RATES = runs.RATES


def run_of(method, mean=0.9, spread=0.0, cell="leaky", **changed):
    """The rows of a method with a mean and a standard deviation over three seeds."""
    own = Row(
        task="copy with lag",
        cell=cell,
        method=method,
        seed=0,
        units=32,
        batch=32,
        updates=400,
        steps=40,
        window=None,
        chance=CHANCE,
        threshold=THRESHOLD,
        measured="2026-01-01",
        machine="a machine",
        versions="jax 1",
        rate=RATES[2],
        validation=(0.5,) * len(RATES),
        curve=(0.2,) * 10 + (0.95,) * 11,
        cosine=(1.0,) * 7 + (0.5,),
        trace_bytes=1000,
        peak_bytes=2000,
        step_seconds=1e-3,
    )
    own = dataclasses.replace(own, **changed)
    return [dataclasses.replace(own, seed=i, score=mean + spread * x) for i, x in enumerate(SEEDS)]


def results_of(*found):
    return results.sort([row for rows_ in found for row in rows_])


def run_cell(name, names):
    """Run a cell of the notebook; return the value of its last expression."""
    *before, last = ast.parse("".join(CELLS[name]["source"])).body
    exec(compile(ast.Module(before, []), name, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), names)
    exec(compile(ast.Module([last], []), name, "exec"), names)
    return None


def lines_of(name, task="", **changed):
    """The lines of a table that a cell of the notebook makes of other rows."""
    names = {}
    run_cell("rows", names)
    names |= changed
    shown = run_cell(name, names)
    if task:
        shown = names["table_of"](task)
    return shown._repr_markdown_().splitlines()


def entries(lines, *first):
    """The further entries of the row that begins with the given ones."""
    split = [[entry.strip() for entry in line.split("|")[1:-1]] for line in lines]
    (found,) = [row for row in split if tuple(row[: len(first)]) == first]
    return found[len(first) :]


@mpl.rc_context()
def test_the_notebook_stores_the_tables_of_the_stored_rows():
    names, tables = {}, {}
    for name, cell in CELLS.items():
        shown = run_cell(name, names)
        plt.close("all")
        if not names["results"].runs:
            pytest.skip("A distribution of the sources has no rows.")
        kinds = [kind for output in cell["outputs"] for kind in output["data"]]
        if isinstance(shown, formats.Table):
            assert kinds == ["text/markdown"]
            (output,) = cell["outputs"]
            assert "".join(output["data"]["text/markdown"]) == shown._repr_markdown_(), name
            tables[name] = shown
        elif "image" in cell["metadata"].get("mystnb", ()):
            assert "image/png" in kinds
        else:
            assert not kinds
    found = names["results"]
    assert len(tables) == 4 + len(found.tasks) + len(names["streams"].every)
    for cell in runs.CORE_CELLS:  # the conclusion about copies in the text
        own, exact = (found.find("copy with lag", cell, name) for name in ("d_rtrl", "bptt"))
        assert exact.learned
        assert not own.learned


def test_rows_are_stored_without_loss(tmp_path):
    path = tmp_path / "rows.csv"
    lost = run_of("uoro", validation=(0.5, None, *(0.5,) * 4))
    lost[1] = dataclasses.replace(lost[1], score=None)
    refused = run_of("rflo", refused='needs "feedback", and more')[:1]
    rows.write(path, [*lost, *refused])
    assert rows.read(path, Row) == [*lost, *refused]
    again = [dataclasses.replace(lost[0], score=0.25), *run_of("bptt")]
    rows.add(path, again)
    assert rows.read(path, Row) == [again[0], *lost[1:], *refused, *again[1:]]
    stream = StreamRow("copy with lag", "gru", "rtrl", 8, 1e-5, 0, 0.5, None, 2.0)
    rows.add(tmp_path / "streams.csv", [stream])
    assert rows.read(tmp_path / "streams.csv", StreamRow) == [stream]


GAIN, SPREAD = 0.5, 0.05
ERROR = SPREAD / math.sqrt(3)


@pytest.mark.parametrize(
    ("above", "spread", "of_other", "expected"),
    [
        (2.05 * ERROR, SPREAD, 0.0, True),
        (1.95 * ERROR, SPREAD, 0.0, None),
        (-1.95 * ERROR, SPREAD, 0.0, None),
        (-2.05 * ERROR, SPREAD, 0.0, False),
        (1.95 * 0.9 * ERROR, 0.0, SPREAD, None),
        (2.05 * 0.9 * ERROR, 0.0, SPREAD, True),
        (2.05 * ERROR, SPREAD, SPREAD, None),
        (2.05 * math.hypot(1, 0.9) * ERROR, SPREAD, SPREAD, True),
    ],
)
def test_a_difference_is_clear_from_two_standard_errors_on(above, spread, of_other, expected):
    found = results_of(
        run_of("rtrl", CHANCE + GAIN, of_other),
        run_of("immediate", CHANCE + 0.9 * GAIN + above, spread),
    )
    exact, own = found.runs
    assert results.gains_more(own, exact, part=0.9) is expected
    count = {True: "1/0/0", None: "0/1/0", False: "0/0/1"}[expected]
    assert entries(lines_of("comparisons", results=found), "`Immediate`", "`RTRL`")[1] == count


def test_the_relative_gain_has_all_exact_methods_that_learn_as_reference():
    found = results_of(
        run_of("bptt", CHANCE + 0.6), run_of("rtrl", CHANCE + 0.4), run_of("d_rtrl", CHANCE + 0.25)
    )
    assert found.gain("copy with lag", "leaky", "d_rtrl") == pytest.approx(0.5)
    assert found.gain("copy with lag", "leaky", "bptt") == 1
    summary = lines_of("summary", core=found)
    first = ["1 × 3", "0.50", "0.50 (copy with lag, leaky tanh)", "0/0/1", "0 of 1"]
    assert entries(summary, "`D_RTRL`") == [*first, "1.00", "1.00", "1 kB"]
    unlearned = results_of(run_of("bptt", CHANCE + 0.1), run_of("d_rtrl", CHANCE + 0.25))
    assert unlearned.gain("copy with lag", "leaky", "d_rtrl") is None


def test_a_score_shows_lost_seeds_further_seeds_and_edges_of_the_grid():
    def score(found):
        return formats.score(results_of(found).runs[0])

    own = run_of("d_rtrl", 0.5, 0.1)
    assert score(own) == "0.50 ± 0.10"
    assert score([*own, dataclasses.replace(own[1], seed=3, validation=())]).endswith("(4 seeds)")
    assert score([dataclasses.replace(row, rate=RATES[0]) for row in own]) == "0.50 ± 0.10 ▾"
    assert score([dataclasses.replace(row, rate=RATES[-1]) for row in own]) == "0.50 ± 0.10 ▴"
    lost = [dataclasses.replace(own[0], score=None, validation=(None,) * 6), *own[1:]]
    assert score(lost) == "0.55 ± 0.07 (**1 of 3 diverged**) ✗6"
    table = lines_of("definitions", "copy with lag", results=results_of(lost))
    assert "| 1 of 3 diverged at 0.001, 1 of 3 diverged at 0.003" in table[2]
    nothing = [dataclasses.replace(row, score=None) for row in own]
    assert score(nothing) == "**diverged**"
    assert results_of(lost, run_of("bptt")).gain("copy with lag", "leaky", "d_rtrl") == 0
    refused = results_of(run_of("rflo", refused="why")[:1])
    assert score(run_of("rflo", refused="why")[:1]) == "refused"
    assert lines_of("definitions", "copy with lag", results=refused)[2].endswith("| why |")


def test_details_of_training_and_costs():
    later = run_of("d_rtrl", step_seconds=2e-3, single_step_seconds=3e-3)
    found = results_of(run_of("bptt"), later)
    own = found.runs[1]
    assert [point for point, _ in own.cosine] == [0, 60, 120, 180, 220, 280, 340, 400]
    assert own.curve[0] == (0, pytest.approx(0.2))
    table = lines_of("definitions", "copy with lag", results=found)
    costs = ["2 ms (2.00)", "3 ms (3.00)", "2 kB (1.00)", "–", "1 kB", ""]
    assert entries(table, "leaky tanh", "`D_RTRL`") == ["0.90 ± 0.00", "1.00 → 0.50", *costs]


def test_methods_without_runs_on_the_first_task_keep_their_place():
    found = results_of(run_of("bptt"), run_of("immediate"), run_of("d_rtrl-short", cell="gru"))
    assert found.methods == ["bptt", "d_rtrl-short", "immediate"]


def streams_of(old):
    made = []
    for method in ("rtrl", "d_rtrl"):
        for rate, loss, own, theirs in (
            (0.0, 0.7, (0.9, 0.8), (0.9, 0.8)),
            (0.1, 0.5, (0.7, 0.6), old),
        ):
            for seed in (0, 1):
                place = "copy with lag", "leaky", method, 1, rate, seed
                made.append(StreamRow(*place, own[seed], theirs[seed], loss))
    return Streams(made)


@pytest.mark.parametrize(
    ("old", "expected"),
    [((0.8, 0.7), "yes"), ((0.6, 0.5), "no"), ((0.8, 0.5), "undecided"), ((0.8, None), "–")],
)
def test_stale_traces_are_compared_at_the_best_rate(old, expected):
    lines = lines_of("streams", streams=streams_of(old))
    found = entries(lines, "copy with lag, leaky tanh", "1", "0.1")
    assert found[-1] == expected
    both = "undefined" if None in old else f"{sum(old) / 2:.2f}"
    assert found[:-1] == [both, f"{both} (0.65)"]


def test_every_name_is_in_the_catalogues():
    assert set(formats.METHODS) == {method.name for method in methods.ALL}
    assert set(runs.WIDE_METHODS) <= set(formats.METHODS)
    assert set(formats.CELLS) == set(networks.CELLS) == set(runs.WIDE_CELLS)

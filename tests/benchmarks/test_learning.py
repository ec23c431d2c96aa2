"""Networks are trained as the page of evidence says: they learn, and no seed runs twice."""

import dataclasses
import os
import signal
import subprocess
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks.__main__ as benchmarks_command
from benchmarks.learning import measure, methods, rows, runs, tasks, work
from benchmarks.learning.networks import CELLS, build, pure, values_of
from benchmarks.learning.tasks.draws import made_up

pytestmark = pytest.mark.nightly

STEPS, SIGNS = 4, 2


def make(key, size):
    """The sign of the first input is asked for at the last step."""
    inputs = jax.random.normal(key, (STEPS, size, 1))
    targets = jnp.broadcast_to((inputs[0, :, 0] > 0).astype(jnp.int32), (STEPS, size))
    weights = jnp.broadcast_to(jnp.arange(STEPS)[:, None] == STEPS - 1, (STEPS, size))
    return tasks.Batch(inputs, targets, weights.astype(jnp.float32))


TINY = tasks.Task(*made_up(make), SIGNS, 0.7, truncations=(1, 2), updates=60, chance=0.5, batch=16)
NAME = "first sign"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Let there be a task of its own for tests."""
    known = tasks.load
    monkeypatch.setattr(tasks, "load", lambda name: TINY if name == NAME else known(name))


MACHINE = {"name": "a machine", "versions": {"jax": "1"}}


def job_of(method, cell="leaky", **changed):
    job = runs.Job(NAME, cell, method, seeds=(0, 1), rates=(1e-9, 1e-2), units=8)
    return dataclasses.replace(job, **changed)


def gradient_of(name, cell="leaky", units=4):
    """The gradient of a method on a fixed batch, at the first weights."""
    method = methods.prepare(methods.BY_NAME[name], TINY, cell, units, batch=3)
    weights = values_of(build(TINY, cell, units, 0), brainstate.ParamState)
    batch = make(jax.random.key(0), 3)
    gradient = jax.jit(method.gradient)
    return gradient(weights, method.memory(0), batch)[0], weights, batch


def test_a_rule_learns():
    found = measure.run(job_of("rtrl"), MACHINE)
    assert [row.seed for row in found] == [0, 1]
    assert {row.rate for row in found} == {1e-2}
    assert min(row.score for row in found) > 0.75
    still, learned = np.array([row.validation for row in found]).T
    assert learned.min() > still.max() + 0.2
    assert found[0].points[-1] == found[0].cosine_points[-1] == TINY.updates
    assert all(len(row.curve) == len(row.points) for row in found)
    # The rule's gradient is exact, and BPTT is computed without the library.
    np.testing.assert_allclose(found[0].cosine, 1, atol=1e-4)
    assert found[0].trace_bytes > 0
    assert found[1].cosine == ()


def test_windows_over_the_whole_sequence_are_exact(monkeypatch):
    whole = dataclasses.replace(TINY, truncations=(1, STEPS))
    monkeypatch.setattr(tasks, "load", lambda name: whole)
    found = measure.run(job_of("es_d_rtrl-long", updates=2), MACHINE)
    assert found[0].window == STEPS
    np.testing.assert_allclose(found[0].cosine, 1, atol=1e-4)


def test_a_refused_rule_has_one_row_with_the_reason():
    (row,) = measure.run(job_of("ostl-feedforward"), MACHINE)
    assert "OSTLFeedforward" in row.refused
    assert "\n" not in row.refused
    assert "networks.py" not in row.refused


def test_lanes_that_are_lost_are_not_chosen():
    scores = np.full((2, 2, 3), 0.5)
    scores[1] = 0.9
    assert measure.best_rate(scores) == 1
    scores[1, 0, -1] = np.nan
    assert measure.best_rate(scores) == 0


@pytest.mark.parametrize(("name", "window"), [("tbptt-short", 1), ("tbptt-long", 2)])
def test_truncated_backpropagation_stops_between_windows(name, window):
    found, weights, batch = gradient_of(name)
    network = pure(build(TINY, "leaky", 4, 0), 3, TINY.features)

    def loss(weights):
        hidden, total = network.start, 0.0
        for t, (x, target, weight) in enumerate(zip(*batch, strict=True)):
            if t % window == 0:
                hidden = jax.lax.stop_gradient(hidden)
            hidden, answer = network.step({**weights, **hidden}, x)
            total += (TINY.losses(answer, target) * weight).sum() / 3
        return total

    expected = jax.jit(jax.grad(loss))(weights)
    for path, leaves in expected.items():
        for leaf, own in zip(*map(jax.tree.leaves, (leaves, found[path])), strict=True):
            np.testing.assert_allclose(own, leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.by_day("leaky")
@pytest.mark.parametrize("cell", ["leaky", "alif"])
def test_errors_go_back_by_the_random_matrix_from_every_readout(cell):
    found, weights, batch = gradient_of("bptt-feedback", cell)
    fixed = methods.prepare(methods.BY_NAME["bptt-feedback"], TINY, cell, 4, batch=3).memory(0)
    (matrix,) = fixed.values()
    (readout,) = (value for path, value in weights.items() if path[0] == "readout")
    back = {"weight": matrix, "bias": readout["bias"]}
    network = pure(build(TINY, cell, 4, 0), 3, TINY.features)

    def loss(own):
        """Answers are those of the readout; errors go back by another one."""
        through = {path: back if path[0] == "readout" else own[path] for path in weights}
        answers, others = (
            network.run(values, network.start, batch.inputs)[1] for values in (weights, through)
        )
        used = others + jax.lax.stop_gradient(answers - others)
        return (TINY.losses(used, batch.targets) * batch.weights).sum() / 3

    expected = jax.jit(jax.grad(loss))(weights)
    of_cell = [path for path in weights if path[0] == "cell"]
    assert (
        max(jnp.abs(leaf).max() for leaf in jax.tree.leaves([expected[p] for p in of_cell])) > 1e-3
    )
    for path in of_cell:
        for leaf, own in zip(*map(jax.tree.leaves, (expected[path], found[path])), strict=True):
            np.testing.assert_allclose(own, leaf, rtol=1e-4, atol=1e-6)


def test_seeds_with_a_row_do_not_run_again(tmp_path, monkeypatch):
    ran = []

    def pretend(do, jobs, workers):
        assert do is measure.run
        for job in jobs:
            ran.append((job.name, job.seeds, len(job.rates)))
            row = rows.Row(*job.key, 0, 1, 1, 1, 1, None, 0.0, 1.0, "", "", "", rate=1e-2)
            yield job, [dataclasses.replace(row, seed=seed) for seed in job.seeds], ""

    monkeypatch.setattr(work, "make", pretend)
    monkeypatch.setattr(runs, "all_jobs", lambda: [job_of("bptt"), job_of("immediate")])
    arguments = ["learning", "--out", str(tmp_path), "--seeds"]
    assert benchmarks_command.main([*arguments, "2"]) == 0
    first = [(job_of(name).name, (0, 1), 2) for name in ("bptt", "immediate")]
    assert ran == first
    assert benchmarks_command.main([*arguments, "2"]) == 0
    assert ran == first
    assert benchmarks_command.main([*arguments, "4", "--only", "bptt"]) == 0
    assert ran[2:] == [(first[0][0], (2, 3), 1)], "later seeds run at the chosen rate"
    assert len(rows.read(tmp_path / "learning.csv", rows.Row)) == 6


def test_a_run_that_fails_is_reported_and_has_no_row(tmp_path, monkeypatch, capsys):
    failed = job_of("bptt"), [], "Traceback ...\nValueError: broken"
    monkeypatch.setattr(work, "make", lambda *_: iter([failed]))
    monkeypatch.setattr(runs, "all_jobs", lambda: [failed[0]])
    assert benchmarks_command.main(["learning", "--out", str(tmp_path)]) == 1
    assert "FAILED first sign, leaky, bptt: ValueError: broken" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


PARENT = """
import os, time
from benchmarks.learning import work
pool = work.workers_of(1)
print(pool.submit(os.getpid).result(), flush=True)
pool.submit(time.sleep, 600).result()
"""


def test_workers_end_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
        try:
            parent.communicate(timeout=60)  # until nobody holds the output any more
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            raise


def test_runs_have_names_of_their_own():
    names = [job.name for job in runs.all_jobs()]
    assert len(set(names)) == len(names)
    assert {job.task for job in runs.all_jobs()} == set(tasks.ALL)


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("name", list(methods.BY_NAME))
def test_every_method_takes_or_refuses_every_cell(name, cell):
    found = measure.run(job_of(name, cell, updates=2), MACHINE)
    if not found[0].refused:
        assert None not in (*found[0].validation, *found[0].curve, found[0].cosine[0])


def test_processes_run_jobs(tmp_path):
    job = runs.Job("digits by rows", "leaky", "bptt", seeds=(0, 1), rates=(1e-2, 3e-2), updates=200)
    ((_, found, failure),) = work.make(measure.run, [job], workers=1)
    assert not failure
    assert min(row.score for row in found) > 0.5


def test_costs_are_measured_on_stored_rows(monkeypatch):
    monkeypatch.setattr(measure, "is_core", lambda *pair: True)
    row = measure.run(job_of("d_rtrl", updates=2), MACHINE)[0]
    assert row.step_seconds is None
    (changed,) = measure.timed_row(row, MACHINE)
    assert changed.step_seconds > 0
    assert changed.single_step_seconds > 0
    assert changed.single_peak_bytes > 0
    kept = {"step_seconds": None, "single_step_seconds": None, "single_peak_bytes": None}
    assert dataclasses.replace(changed, **kept) == row

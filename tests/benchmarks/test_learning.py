"""Networks are trained as the page says: they learn, and no run is made twice."""

import dataclasses
import math
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
from benchmarks.learning import command, measure, record, runs, tasks, ways, work
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


SAMPLE, HELD_OUT = made_up(make)
TINY = tasks.Task(
    name="first sign",
    source="a test",
    features=1,
    outputs=SIGNS,
    length=STEPS,
    kind="classes",
    counted=1.0,
    chance=0.5,
    threshold=0.7,
    truncations=(1, 2),
    batch=16,
    updates=60,
    sample=SAMPLE,
    held_out=HELD_OUT,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Let there be a task of its own for tests."""
    known = tasks.load
    monkeypatch.setattr(tasks, "load", lambda name: TINY if name == TINY.name else known(name))


def settings_of(way, cell="leaky", **changed):
    found = runs.settings_of("core", TINY, cell, ways.BY_NAME[way], TINY.updates, (0, 1), units=8)
    return dataclasses.replace(found, rates=(1e-9, 1e-2), **changed)


def gradient_of(way, cell="leaky", units=4):
    """The gradient of a way on a fixed batch, at the first weights."""
    method = ways.prepare(ways.BY_NAME[way], TINY, cell, units, batch=3)
    weights = values_of(build(TINY, cell, units, 0), brainstate.ParamState)
    batch = make(jax.random.key(0), 3)
    gradient = jax.jit(method.gradient)
    return gradient(weights, method.memory(0), batch)[0], weights, batch


def test_a_rule_learns():
    found = measure.run(settings_of("rtrl"), {"name": "a machine"})
    assert found.refused is None and found.failed == ()
    assert found.best_rate == 1e-2
    assert min(found.test) > 0.75
    still, learning = np.asarray(found.curves.scores).mean(axis=1)
    assert still.std() < 0.01 and learning[-1] > learning[0] + 0.2
    assert found.curves.updates[-1] == TINY.updates == found.cosine.updates[-1]
    assert all(points > 0 for points in found.updates_to_threshold)
    # The rule's gradient is exact, and that of backpropagation is taken without the library.
    np.testing.assert_allclose(found.cosine.values + found.cosine.recurrent, 1, atol=1e-4)
    assert found.price.seconds_per_step > 0 and found.price.trace_bytes > 0
    assert found.price.seconds_per_lone_step is None


def test_a_refused_rule_leaves_its_reason(tmp_path):
    found = measure.run(settings_of("ostl-feedforward"), {})
    assert "OSTLFeedforward" in found.refused and "\n" not in found.refused
    assert "networks.py" not in found.refused
    assert record.read(record.write(tmp_path, found)) == found


def test_lanes_that_are_lost_are_not_chosen():
    scores = np.full((2, 2, 3), 0.5)
    scores[1] = 0.9
    assert measure.best_rate(scores) == 1
    scores[1, 0, -1] = np.nan
    assert measure.best_rate(scores) == 0


@pytest.mark.parametrize(
    "way, window",
    [pytest.param("tbptt-short", 1, marks=pytest.mark.nightly), ("tbptt-long", 2)],
)
def test_truncated_backpropagation_stops_between_windows(way, window):
    found, weights, batch = gradient_of(way)
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
    fixed = ways.prepare(ways.BY_NAME["bptt-feedback"], TINY, cell, 4, batch=3).memory(0)
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


def test_done_runs_are_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def pretend(job, open_runs, folder, workers):
        assert job is work.train
        for settings in open_runs:
            made.append(settings.name)
            found = record.Record(settings, {}, refused="in a test")
            record.write(folder, found)
            yield settings, found, ""

    wanted = [settings_of("bptt"), settings_of("immediate")]
    monkeypatch.setattr(work, "make", pretend)
    monkeypatch.setattr(runs, "all_runs", lambda missing: iter(wanted))
    arguments = ["learning", "--out", str(tmp_path)]
    assert benchmarks_command.main(arguments) == 0
    assert made == [settings.name for settings in wanted]
    assert benchmarks_command.main(arguments) == 0
    assert len(made) == 2
    wanted[0] = dataclasses.replace(wanted[0], updates=TINY.updates + 1)
    assert benchmarks_command.main(arguments) == 0
    assert made[2:] == [wanted[0].name]
    assert "1 of 2 runs are done" in capsys.readouterr().out


def test_a_run_that_breaks_is_reported_and_leaves_no_record(tmp_path, monkeypatch, capsys):
    failed = settings_of("bptt"), None, "Traceback ...\nValueError: broken"
    monkeypatch.setattr(work, "make", lambda *_: iter([failed]))
    assert command.make(work.train, [failed[0]], tmp_path, 1) == 1
    assert "FAILED first-sign--leaky--bptt: ValueError: broken" in capsys.readouterr().out
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


@pytest.mark.nightly
def test_runs_have_names_of_their_own():
    missing = {}
    for found in (list(runs.all_runs(missing)), list(runs.quick_runs(missing))):
        names = [settings.name for settings in found]
        assert len(set(names)) == len(names)
    assert set(missing) <= set(tasks.ALL)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("way", list(ways.BY_NAME))
def test_every_way_takes_or_refuses_every_cell(way, cell):
    found = measure.run(settings_of(way, cell, updates=2), {})
    if found.refused is None:
        assert np.isfinite(np.asarray(found.curves.scores)).all()
        assert math.isfinite(found.cosine.values[0])


@pytest.mark.nightly
def test_processes_make_runs(tmp_path):
    name = "digits-by-rows--leaky--bptt"
    assert (
        benchmarks_command.main(["learning", "--quick", "--only", name, "--out", str(tmp_path)])
        == 0
    )
    (found,) = record.read_all(tmp_path)
    assert found.settings.name == name and min(found.test) > 0.5


@pytest.mark.nightly
def test_prices_are_taken_anew():
    found = measure.run(settings_of("d_rtrl", updates=2), {})
    changed = measure.priced(dataclasses.replace(found, price=None))
    assert changed.price.seconds_per_lone_step > 0 and changed.price.lone_peak_bytes > 0
    assert changed.price.trace_bytes == found.price.trace_bytes
    assert dataclasses.replace(changed, price=found.price) == found

"""Checkpoints resume to the last bit, and are refused by another learner or when damaged."""

import os
import pathlib
import subprocess
import sys
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import repository
import saiunit as u

import braintrace

OPTIMIZER = optax.adam(0.01)

# Threads of orbax may end after the event loop that they report to.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


def assert_same_bits(actual, expected):
    """Two pytrees have the same structure, shapes, dtypes and values."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        raise AssertionError(f"another tree: {actual} instead of {expected}")
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        found, wanted = np.asarray(found), np.asarray(wanted)
        if found.dtype != wanted.dtype or not np.array_equal(found, wanted, equal_nan=True):
            raise AssertionError(f"{found} instead of {wanted}")


class Net(brainstate.nn.Module):
    """Recurrent units, dropout and a readout, whose weights do not depend on JAX."""

    def __init__(self, units):
        super().__init__()
        draws = np.random.default_rng(0)
        self.cell = braintrace.nn.IndRNN(3, units)
        self.readout = braintrace.nn.Linear(units, 2)
        for weight in self.states(brainstate.ParamState).values():
            weight.value = jax.tree.map(lambda w: draws.normal(size=w.shape) / 2, weight.value)
            weight.value = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weight.value)

    def update(self, x):
        h = self.cell(x)
        return self.readout(jnp.where(brainstate.random.bernoulli(0.5, h.shape), h, 0.0))


def build(units=4, rule="d_rtrl", batch=2):
    """A learner with an optimizer, equal in every process."""
    brainstate.random.seed(0)
    learner = braintrace.compile(Net(units), rule, jnp.ones((batch, 3)), batch_size=batch)
    learner.init_optimizer(OPTIMIZER)
    return learner


def train(learner, part, batch=2):
    """Continue on the data of a part; return the losses."""
    xs = np.random.default_rng(part).normal(size=(5, batch, 3)).astype(np.float32)

    def step_fn(x):
        return jnp.mean((learner(x) - x[..., :2]) ** 2)

    return learner.etrace_online(xs, step_fn=step_fn, optimizer=OPTIMIZER)


def state_of(learner):
    return jax.device_get(learner.functional().state())


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    """In the middle of a sequence, with an optimizer, dropout and `extra`; not by saving either."""
    alone, saved, resumed = build(), build(), build()
    train(resumed, 9)
    for part in range(2):
        brainstate.random.seed(part)
        train(alone, part)
        brainstate.random.seed(part)
        train(saved, part)
    momenta = optax.sgd(0.1, momentum=0.9).init({"w": jnp.ones((2, 2), jnp.bfloat16)})
    braintrace.save(tmp_path, saved, {"momenta": momenta, "steps": 10, "lr": 0.1, "none": None})
    saved_state = state_of(saved)
    numbers = brainstate.random.uniform(size=3)
    brainstate.random.seed(5)
    extra = braintrace.restore(tmp_path, resumed)
    assert_same_bits(state_of(resumed), saved_state)
    assert_same_bits(brainstate.random.uniform(size=3), numbers)
    assert (extra["steps"], extra["lr"], extra["none"]) == (10, 0.1, None)
    rebuilt = jax.tree.unflatten(jax.tree.structure(momenta), jax.tree.leaves(extra["momenta"]))
    assert_same_bits(rebuilt, jax.device_get(momenta))
    for learner in (alone, saved, resumed):
        brainstate.random.seed(7)
        train(learner, 2)
    assert_same_bits(state_of(saved), state_of(alone))
    assert_same_bits(state_of(resumed), state_of(alone))


def test_a_learner_is_saved_at_the_start_of_a_sequence(tmp_path):
    """Its programs know that the traces are zero, also after it is restored."""
    saved, resumed = build(), build()
    train(saved, 0)
    train(resumed, 1)
    saved.reset_state()
    braintrace.save(tmp_path, saved)
    assert braintrace.restore(tmp_path, resumed) is None
    for learner in (saved, resumed):
        brainstate.random.seed(3)
        train(learner, 2)
    assert_same_bits(state_of(resumed), state_of(saved))


class Everything(brainstate.nn.Module):
    """States of all kinds."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray([[-0.0, 1e-42, 1.0], [2.0, 3.0, 4.0]]) * u.mV)
        self.pair = brainstate.ParamState({"re": jnp.ones(3), "im": jnp.ones(3, jnp.bfloat16)})
        self.count = brainstate.LongTermState(7)
        self.flags = brainstate.LongTermState((jnp.ones(2, bool), [jnp.zeros((0, 4))]))
        self.phase = brainstate.LongTermState(jnp.full(3, jnp.nan + 1j))
        self.keys = brainstate.LongTermState(jax.random.split(jax.random.key(1), 3))
        self.rng = brainstate.random.RandomState(3)

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 3)) * u.mV)

    def update(self, x):
        pair = self.pair.value
        drive = braintrace.matmul(x, self.w.value) * pair["re"] * pair["im"].astype(jnp.float32)
        self.v.value = 0.9 * self.v.value + drive
        return self.v.value


def test_states_of_all_kinds_are_restored(tmp_path):
    def compiled():
        return braintrace.compile(Everything(), "d_rtrl", jnp.ones((2, 2)), batch_size=2)

    learner, twin = compiled(), compiled()
    model = learner.module
    model.keys.value = jax.random.split(jax.random.key(5), 3)
    model.count.value, model.phase.value = 9, 2 * model.phase.value
    learner(jnp.ones((2, 2)))
    folder = tmp_path / "a folder with spaces, #1 & ümläuts%"
    braintrace.save(folder, learner)
    braintrace.restore(folder, twin)
    assert_same_bits(state_of(twin), state_of(learner))
    assert twin.module.w.value.unit == u.mV
    assert twin.module.keys.value.dtype == model.keys.value.dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"units": 5}, r"`hidden/cell/h` is float32\[2, 4\]; this learner has float32\[2, 5\]"),
        ({"rule": "es_d_rtrl"}, r"(?s)`rule` is D_RTRL.*`traces/cell/W.* none"),
        ({"batch": 3}, r"(?s)`traces/.* is float32\[2,.*\[3,.*`reset_state`"),
    ],
)
def test_another_learner_is_refused_with_the_names_of_the_differences(change, words, tmp_path):
    braintrace.save(tmp_path, build())
    other = build(**change)
    before = state_of(other)
    with pytest.raises(braintrace.CheckpointError, match=words):
        braintrace.restore(tmp_path, other)
    assert_same_bits(state_of(other), before)


def test_a_model_with_another_head_continues_by_the_advice(tmp_path):
    saved, other = build(), build()
    train(saved, 0)
    braintrace.save(tmp_path, saved)
    other.module.readout = braintrace.nn.Linear(4, 2, b_init=None)
    other.compile_graph(jnp.ones((2, 3)))
    other.optimizer_state = None
    with pytest.raises(braintrace.CheckpointError, match="with other layers, restore into a"):
        braintrace.restore(tmp_path, other)
    old = build()
    braintrace.restore(tmp_path, old)
    for path in old.param_states:
        if path[0] == "cell":
            other.param_states[path].value = old.param_states[path].value
    train(other, 1)
    weight = other.module.cell.W.weight.value["weight"]
    assert 0 < jnp.abs(weight - saved.module.cell.W.weight.value["weight"]).max() < 0.1


def test_an_optimizer_is_initialised_before(tmp_path):
    learner = build()
    braintrace.save(tmp_path, learner)
    learner.optimizer_state = None
    with pytest.raises(braintrace.CheckpointError, match=r"(?s)optimizer/0/count.*init_optimizer"):
        braintrace.restore(tmp_path, learner)


@pytest.mark.parametrize("part", ["state", "extra"])
def test_a_damaged_array_is_noticed(part, tmp_path):
    """Whether orbax can read it, or not."""
    learner = build()
    braintrace.save(tmp_path, learner, extra={"a": np.arange(2000.0)})
    before = state_of(learner)
    for file in (tmp_path / "1" / part).rglob("d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(braintrace.CheckpointError, match="damaged"):
        braintrace.restore(tmp_path, learner)
    assert_same_bits(state_of(learner), before)


def test_every_array_has_a_digest(tmp_path, monkeypatch):
    """Of its bits: orbax may return another array without an error."""
    learner = build()
    braintrace.save(tmp_path, learner)
    about = next(tmp_path.rglob("about/metadata"))
    text, name = about.read_text(), "parameters/readout/weight/bias"
    start = text.index('"digests"')
    place = text.index(name, start) + len(name) + 4
    wrong = "0" if text[place] != "0" else "1"
    about.write_text(text[:place] + wrong + text[place + 1 :])
    with pytest.raises(braintrace.CheckpointError, match=f"'{name}' does not have its digest"):
        braintrace.restore(tmp_path, learner)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_checkpoint(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        braintrace.restore(tmp_path / name, build())
    with pytest.raises(braintrace.NoCheckpointError):
        braintrace.restore(tmp_path / name, build())
    assert not (tmp_path / "missing").exists()


def run(folder, parts):
    """Train from the last checkpoint, and save after each part."""
    learner = build()
    try:
        done = braintrace.restore(folder, learner)
    except braintrace.NoCheckpointError:
        done = 0
    for part in range(done, parts):
        brainstate.random.seed(part)
        train(learner, part)
        braintrace.save(folder, learner, extra=part + 1)
        print(part + 1, flush=True)
    return state_of(learner)


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path):
    program = [sys.executable, __file__, str(tmp_path / "killed")]
    few = str(jax.config.values["jax_disable_most_optimizations"])
    environment = {
        **os.environ,
        "PYTHONPATH": repository.SEARCHED,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": few,
    }
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.2)
        process.kill()
        last = int([b"0", *process.stdout.read().split()][-1])
    folders = [child.name for child in (tmp_path / "killed").iterdir()]
    assert max(int(name) for name in folders if name.isdigit()) >= last
    done = braintrace.restore(tmp_path / "killed", build())
    assert_same_bits(run(tmp_path / "killed", done + 2), run(tmp_path / "alone", done + 2))


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]), 1000)

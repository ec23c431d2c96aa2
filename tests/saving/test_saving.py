"""A learner that is saved comes back with every bit, or is refused with what differs."""

import asyncio
import collections
import copy
import dataclasses
import functools
import json
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import time

import brainstate
import catalogue
import cloudpickle
import compilation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import places
import pytest
import saiunit as u
from assertions import assert_same_bits
from drivers import build_learner
from rules import RULES
from saved_runs import Run

import braintrace
from braintrace import nn
from braintrace._saving import checkpoint, checksums, store, trees, units

SEARCHED = os.pathsep.join([places.SEARCHED, os.environ.get("PYTHONPATH", "")])


def randomised(learner, seed):
    """Let every number of a learner be another one; return its state."""
    generator = np.random.default_rng(seed)

    def drawn(leaf):
        divisor = 7 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 1
        return jnp.asarray(generator.integers(0, 100, leaf.shape) / divisor).astype(leaf.dtype)

    pure = learner.functional()
    pure.restore(jax.tree.map(drawn, pure.state()))
    return pure.state()


def state_of(learner):
    return jax.device_get(learner.functional().state())


@functools.cache
def shared():
    """A learner that tests change and restore as they like."""
    return build_learner(catalogue.BY_NAME["ALIF"], "d_rtrl")


# --- what comes back


@pytest.mark.by_day(
    "es_d_rtrl",
    "immediate",
    "ottt",
)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_comes_back(rule, tmp_path):
    learner = build_learner(catalogue.BY_NAME[RULES[rule].case], rule)
    saved = jax.device_get(randomised(learner, 1))
    braintrace.save(tmp_path, learner)
    assert_same_bits(state_of(learner), saved)
    randomised(learner, 2)
    assert braintrace.restore(tmp_path, learner) is None
    assert_same_bits(state_of(learner), saved)


class Everything(brainstate.nn.Module):
    """States of all kinds."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)) * u.mV)
        self.pair = brainstate.ParamState({"re": jnp.ones(3), "im": jnp.ones(3, jnp.bfloat16)})
        self.count = brainstate.LongTermState(jnp.zeros((), jnp.int32))
        self.plain = brainstate.LongTermState(7)
        self.flags = brainstate.LongTermState((jnp.zeros(2, bool), [jnp.zeros((0, 4))]))
        self.phase = brainstate.LongTermState(jnp.ones(3, jnp.complex64))
        self.small = brainstate.LongTermState(jnp.ones(3, jnp.float8_e4m3fn))
        self.keys = brainstate.LongTermState(jax.random.split(jax.random.key(1), 3))
        self.rng = brainstate.random.RandomState(3)

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 3)) * u.mV)

    def update(self, x):
        pair = self.pair.value
        drive = braintrace.matmul(x, self.w.value) * pair["re"] * pair["im"].astype(jnp.float32)
        self.v.value = 0.9 * self.v.value + drive
        return self.v.value


def test_states_of_all_kinds_come_back(tmp_path):
    learner = braintrace.compile(Everything(), "d_rtrl", jnp.ones((2, 2)), batch_size=2)
    model = learner.algorithm.model
    model.w.value = jnp.asarray([[-0.0, jnp.nan, jnp.inf], [1e-42, 1.0, -3.0]]) * u.mV
    model.keys.value = jax.random.split(jax.random.key(5), 3)
    model.count.value += 3
    expected = brainstate.random.uniform(size=3)
    brainstate.random.seed(0)
    folder = tmp_path / "a folder with spaces, #1 & ümläuts%"
    braintrace.save(folder, learner)
    saved, key = state_of(learner), model.keys.value
    expected = brainstate.random.uniform(size=3)
    twin = braintrace.compile(Everything(), "d_rtrl", jnp.ones((2, 2)), batch_size=2)
    braintrace.restore(folder, twin)
    assert_same_bits(state_of(twin), saved)
    mantissa = np.asarray(twin.algorithm.model.w.value.mantissa)
    assert mantissa.tobytes() == np.asarray(model.w.value.mantissa).tobytes()
    assert twin.algorithm.model.w.value.unit == u.mV
    restored = twin.algorithm.model.keys.value
    assert restored.dtype == key.dtype
    assert_same_bits(*map(jax.random.key_data, (restored, key)))
    assert_same_bits(brainstate.random.uniform(size=3), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("driver", ["online", "grad"])
def test_a_run_goes_on_as_if_nothing_had_happened(driver, tmp_path):
    """Also: it is not disturbed by being saved, and may be saved at the start of a sequence."""
    alone, saved, resumed = (Run(driver=driver) for _ in range(3))
    resumed.part(7)
    for number in range(2):
        alone.part(number)
        saved.part(number)
        if driver == "grad":
            alone.learner.reset_state()
            saved.learner.reset_state()
        saved.save(tmp_path, number + 1)
    assert resumed.restore(tmp_path) == 2
    for number in (2, 4):
        expected = alone.part(number)
        assert_same_bits(saved.part(number), expected)
        assert_same_bits(resumed.part(number), expected)
    assert_same_bits(saved.state(), alone.state())
    assert_same_bits(resumed.state(), alone.state())


def started(*arguments):
    """A process that learns and saves, and compiles as this one does."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": SEARCHED}
    return subprocess.Popen(
        [
            sys.executable,
            *map(str, [places.SUPPORT / "saved_runs.py", *arguments, compilation.is_in_a_hurry()]),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("driver", ["online", "grad"])
@pytest.mark.parametrize("case", ["LSTMFused", "ALIF", "IndRNN"])
def test_a_run_that_is_killed_ten_times_ends_with_the_same_bits(case, driver, tmp_path):
    parts = 200

    def ended(folder):
        with started(case, driver, folder, parts) as process:
            return process.stdout.read().splitlines()[-1]

    for _ in range(10):
        with started(case, driver, tmp_path / "killed", parts) as process:
            process.stdout.readline()
            time.sleep(random.uniform(0, 0.3))
            process.kill()
    assert ended(tmp_path / "killed") == ended(tmp_path / "alone")


def test_what_an_optimizer_keeps_waits_for_it(tmp_path):
    first, begun = Run("Leaky"), Run("Leaky")
    braintrace.save(tmp_path / "before", first.learner)
    first.part(0)
    braintrace.save(tmp_path / "after", first.learner)
    expected = state_of(first.learner)
    begun.part(5)
    fresh = Run("Leaky")
    for run in (begun, fresh):
        braintrace.restore(tmp_path / "after", run.learner)
        assert_same_bits(state_of(run.learner), expected)
    braintrace.save(tmp_path / "waiting", fresh.learner)
    other = Run("Leaky")
    braintrace.restore(tmp_path / "waiting", other.learner)
    expected = first.part(1)
    for run in (begun, fresh, other):
        assert_same_bits(run.part(1), expected)
        assert_same_bits(state_of(run.learner), state_of(first.learner))
    braintrace.restore(tmp_path / "before", begun.learner)
    assert begun.learner.optimizer_state is None
    fresh.optimizer = optax.sgd(0.1)
    braintrace.restore(tmp_path / "before", fresh.learner)
    fresh.part(0)
    before = state_of(fresh.learner)
    with pytest.raises(braintrace.CheckpointError, match=r"optimizer/.*mu.*has none"):
        braintrace.restore(tmp_path / "after", fresh.learner)
    assert_same_bits(state_of(fresh.learner), before)


class Momentum:
    """An optimizer with a State of its own."""

    def __init__(self, weights):
        self.weights = weights
        self.kept = brainstate.State({path: 0 * weight.value for path, weight in weights.items()})

    def update(self, gradients):
        for path, weight in self.weights.items():
            self.kept.value = {**self.kept.value, path: self.kept.value[path] + gradients[path]}
            weight.value = weight.value - 0.1 * self.kept.value[path]


class OfFunction:
    """A model that is a function, and an optimizer that is not."""

    def __init__(self):
        params = {"deep": [jnp.full((3, 4), 0.1)], "steps": 3}
        model = braintrace.from_function(self.step, params, lambda size: jnp.zeros((size, 4)))
        self.learner = braintrace.compile(model, "d_rtrl", jnp.ones((2, 3)), batch_size=2)
        self.optimizer = Momentum(model.states(brainstate.ParamState))

    @staticmethod
    def step(params, state, x):
        new = 0.9 * state + braintrace.matmul(x, params["deep"][0])
        return new, jnp.sin(new)

    def part(self, number):
        xs = np.random.default_rng(number).normal(size=(4, 2, 3)).astype(np.float32)
        return self.learner.etrace_online(
            xs, step_fn=lambda x: (self.learner(x) ** 2).sum(), optimizer=self.optimizer
        )


def test_a_function_and_an_optimizer_with_states_go_on(tmp_path):
    first, fresh = OfFunction(), OfFunction()
    first.part(0)
    braintrace.save(tmp_path, first.learner)
    braintrace.restore(tmp_path, fresh.learner)
    assert_same_bits(fresh.part(1), first.part(1))
    assert_same_bits(state_of(fresh.learner), state_of(first.learner))
    braintrace.restore(tmp_path, first.learner)
    assert np.any(jax.tree.leaves(first.optimizer.kept.value)[0] != 0)


# --- what the user wants back

Point = collections.namedtuple("Point", "x y")


def through_json(tree):
    arrays = {}
    data = json.loads(json.dumps(trees.as_data(tree, "extra", arrays)))
    return trees.of_data(data, {name: np.asarray(array) for name, array in arrays.items()})


def test_named_tuples_of_classes_that_are_gone_keep_their_fields(monkeypatch):
    data = trees.as_data(Point(1, [2]), "extra", {})
    monkeypatch.delattr(sys.modules[__name__], "Point")
    found = trees.of_data(data, {})
    assert (type(found).__name__, found.x, found.y) == ("Point", 1, [2])


def test_arrays_of_keys_that_are_printed_alike_are_kept_apart():
    tree = {"1": np.ones(2), 1: np.zeros(2), "a/b": np.full(2, 3.0), "a": {"b": np.full(2, 4.0)}}
    found = through_json(tree)
    assert list(found) == list(tree)
    assert_same_bits(list(found.values()), list(tree.values()))


@pytest.mark.parametrize("unit", [u.mV, u.mV / u.ms, u.UNITLESS, u.uS / u.cm**2, u.inch])
def test_units_come_back(unit):
    found = units.unit_of_data(json.loads(json.dumps(units.unit_as_data(unit))))
    assert found == unit
    assert str(found) == str(unit)


REFUSED = [
    ({"f": len}, "`extra/f` is the builtin_function_or_method `len`"),
    ([brainstate.State(1.0)], "`extra/0` is a State; .* Give its `.value`"),
    (np.array(["a", "b"]), "`extra` is an array of dtype <U1"),
    (np.array([None]), "`extra` is an array of dtype object"),
    ({"s": {1, 2}}, "`extra/s` is a set"),
    (b"bytes", "`extra` is a bytes"),
    (
        [optax.EmptyState(), jax.tree_util.Partial(len)],
        "`extra/1` is a Partial; .* put them back by `jax.tree.unflatten`",
    ),
]


@pytest.mark.parametrize(("extra", "message"), REFUSED)
def test_extra_data_that_cannot_be_saved_are_refused_by_place(extra, message, tmp_path):
    with pytest.raises(braintrace.OptionError, match=message):
        braintrace.save(tmp_path, shared(), extra=extra)
    assert not list(tmp_path.iterdir())


# --- what is refused


class Cell(nn.IndRNN):
    """A cell with a State more."""

    def __init__(self, *sizes, value=0.0):
        super().__init__(*sizes)
        self.more = brainstate.LongTermState(value)


def indrnn(*sizes, rule="d_rtrl", batch=2, cell=nn.IndRNN, **options):
    kept = {name: options.pop(name) for name in ("value",) if name in options}
    sizes = sizes or (2, 3)
    x = jnp.ones((batch, sizes[0]))
    return braintrace.compile(cell(*sizes, **kept), rule, x, batch_size=batch, **options)


lstm = functools.partial(indrnn, cell=nn.LSTMCell)
KEYS = jax.random.split(jax.random.key(1, impl="threefry2x32"), 2)
more = functools.partial(indrnn, cell=Cell)
OTHERS = {
    "rule": (
        indrnn,
        lambda: indrnn(rule="snap"),
        r"`rule` is D_RTRL; this learner has SnAp\(n=1\)",
    ),
    "option": (
        lambda: indrnn(rule="es_d_rtrl"),
        lambda: indrnn(rule="es_d_rtrl", decay_or_rank=0.8),
        r"`rule` is ES_D_RTRL\(decay=0.9\); this learner has ES_D_RTRL\(decay=0.8\)",
    ),
    "window": (lstm, lambda: lstm(window=2), "'traces/W/weight@mm0>h/weight' is not in it"),
    "dtype of traces": (
        indrnn,
        lambda: indrnn(trace_dtype="bfloat16"),
        "'traces/u@.* dtype float32 .*; this learner has an array of dtype bfloat16",
    ),
    "units": (
        indrnn,
        lambda: indrnn(2, 4),
        r"(?s)'hidden/h' .*'parameters/u' .*\(3,\); this .*\(4,\).*'traces/",
    ),
    "batch": (
        indrnn,
        lambda: indrnn(batch=3),
        r"(?s)'hidden/h' .*\(2, 3\); this .*\(3, 3\).* batch call `reset_state`",
    ),
    "model": (
        indrnn,
        lambda: indrnn(cell=nn.LSTMCell),
        "(?s)'hidden/c' is not in it.*'parameters/u' .*; this learner has none",
    ),
    "a state more": (indrnn, more, "'others/more' is not in it"),
    "a state less": (more, indrnn, "'others/more' .*; this learner has none"),
    "dtype": (
        more,
        lambda: more(value=jnp.ones((), jnp.int32)),
        "'others/more' .* dtype float32 .*; this .* dtype int32",
    ),
    "unit": (
        lambda: more(value=1.0 * u.mV),
        lambda: more(value=1.0 * u.volt),
        "'others/more' .* in mV; this .* in V",
    ),
    "kind of keys": (
        lambda: more(value=KEYS),
        lambda: more(value=jax.random.key_data(KEYS)),
        "'others/more' .*, keys of 'threefry2x32'; this",
    ),
}


@pytest.mark.by_day(
    "rule",
    "option",
    "window",
    "unit",
)
@pytest.mark.parametrize("row", OTHERS)
def test_another_learner_is_refused_and_stays_as_it_is(row, tmp_path):
    build, build_other, message = OTHERS[row]
    braintrace.save(tmp_path, build())
    other = build_other()
    before = jax.device_get(randomised(other, 3)), other.algorithm.traces.carried.is_zero
    with pytest.raises(braintrace.CheckpointError, match=message):
        braintrace.restore(tmp_path, other)
    assert_same_bits((state_of(other), other.algorithm.traces.carried.is_zero), before)


@pytest.mark.parametrize("call", [braintrace.save, braintrace.restore])
@pytest.mark.parametrize("folder", [3, None, "", "gs://bucket/run"])
def test_what_is_no_folder_is_refused(call, folder):
    with pytest.raises(braintrace.OptionError, match="`folder` is"):
        call(folder, shared())


@pytest.mark.parametrize("call", [braintrace.save, braintrace.restore])
def test_what_is_no_learner_is_refused(call, tmp_path):
    with pytest.raises(braintrace.OptionError, match="`learner` is a D_RTRL; expected a learner"):
        call(tmp_path, shared().algorithm)
    with pytest.raises(braintrace.OptionError, match="not inside a transformation"):
        jax.jit(lambda: call(tmp_path, shared()))()


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    braintrace.save(tmp_path, shared())
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setattr(store, "_checkpointer", store._checkpointer.__wrapped__)  # none so far
    for call in (braintrace.save, braintrace.restore):
        with pytest.raises(braintrace.MissingPackageError, match=r"\[checkpoint\]"):
            call(tmp_path, shared())


# --- the folder


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_folder_has_the_last_checkpoint_alone_and_what_is_not_ours(tmp_path):
    learner = shared()
    (tmp_path / "100").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "braintrace-checkpoint-1.orbax-checkpoint-tmp-123").mkdir()
    for step in range(3):
        braintrace.save(tmp_path, learner, extra=step)
    assert {path.name for path in tmp_path.iterdir()} == {
        "100",
        "notes.txt",
        "braintrace-checkpoint-2",
    }
    assert braintrace.restore(str(tmp_path), learner) == 2


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    learner = shared()
    braintrace.save(tmp_path, learner, extra="first")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    for name in ("rename", "replace"):
        monkeypatch.setattr(f"os.{name}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        braintrace.save(tmp_path, learner, extra="second")
    monkeypatch.undo()
    assert braintrace.restore(tmp_path, learner) == "first"
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        braintrace.save(tmp_path, learner, extra="third")
    monkeypatch.undo()
    assert braintrace.restore(tmp_path, learner) in ("first", "third")
    braintrace.save(tmp_path, learner, extra="fourth")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("present", ["nothing", "an empty folder", "an unfinished checkpoint"])
def test_a_folder_without_a_checkpoint_is_told(present, tmp_path):
    folder = tmp_path / "run"
    if present != "nothing":
        folder.mkdir()
    if present == "an unfinished checkpoint":
        (folder / "braintrace-checkpoint-0.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*run") as caught:
        braintrace.restore(folder, shared())
    assert isinstance(caught.value, braintrace.NoCheckpointError)


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path):
    """Before anything is learned, by a program that restores first; and the file stays."""
    path = tmp_path / "run"
    path.write_text("somebody's notes")
    for call in (braintrace.restore, braintrace.save):
        with pytest.raises(braintrace.CheckpointError, match=r"run' is a file: expected a folder"):
            call(path, shared())
    assert path.read_text() == "somebody's notes"


def damages():
    def cut(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path):
        content = bytearray(path.read_bytes())
        if content:
            content[2 * len(content) // 3] ^= 4
        path.write_bytes(content)

    return {"cut": cut, "flipped": flip, "missing": pathlib.Path.unlink}


# Where one array cannot be read, orbax ends before the others have been.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", damages())
def test_no_damaged_file_gives_other_numbers(damage, tmp_path):
    """What a file says twice, or says for nobody, may be missing."""
    learner, whole, folder = shared(), tmp_path / "whole", tmp_path / "damaged"
    saved = jax.device_get(randomised(learner, 1))
    braintrace.save(whole, learner, extra="words")
    before = jax.device_get(randomised(learner, 2))
    told = 0
    for index, file in enumerate(files_of(whole)):
        copied = folder / str(index)
        shutil.copytree(whole, copied)
        damages()[damage](copied / file.relative_to(whole))
        try:
            extra = braintrace.restore(copied, learner)
        except braintrace.CheckpointError as error:
            assert "damaged" in str(error)
            assert_same_bits(state_of(learner), before)
            told += 1
        else:
            assert extra == "words"
            assert_same_bits(state_of(learner), saved)
            randomised(learner, 2)
    assert told >= 3


def test_arrays_that_are_not_those_that_were_saved_are_refused(tmp_path, monkeypatch):
    """What orbax reads without a complaint may still be wrong."""
    monkeypatch.setattr(store, "checksums", lambda arrays: dict.fromkeys(arrays, 7))
    braintrace.save(tmp_path, shared())
    monkeypatch.undo()
    with pytest.raises(braintrace.CheckpointError, match="does not have its checksum"):
        braintrace.restore(tmp_path, shared())


def test_a_later_format_is_refused_with_the_version_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    braintrace.save(tmp_path, shared())
    monkeypatch.undo()
    words = rf"format 3, .* up to 2. .*version {braintrace.__version__}: install"
    with pytest.raises(braintrace.CheckpointError, match=words):
        braintrace.restore(tmp_path, shared())


def test_the_first_format_is_read(tmp_path, monkeypatch):
    learner = shared()
    saved = jax.device_get(randomised(learner, 1))
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    monkeypatch.setattr(store, "checksums", checksums.checksums_of_format_1)
    braintrace.save(tmp_path, learner, extra="first")
    monkeypatch.undo()
    randomised(learner, 2)
    assert braintrace.restore(tmp_path, learner) == "first"
    assert_same_bits(state_of(learner), saved)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16", "bool"])
def test_a_checksum_is_that_of_its_parts(dtype, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 5)
    generator = np.random.default_rng(0)
    array = generator.integers(0, 99, (4, 3, 6)).astype(dtype)
    words = array.reshape(-1).view(f"u{min(4, array.itemsize)}").tolist()
    expected = sum((2 * place + 1) * word for place, word in enumerate(words)) % checksums.MODULUS
    assert checksums.checksums({"whole": array}) == {"whole": expected}
    for cut in (np.s_[2:, :, :], np.s_[:, 1:, :3], np.s_[1:2, 2:, 4:]):
        start = tuple(part.start or 0 for part in cut)
        changed = array.copy()
        changed[cut] = 0
        of_part = checksums._of_part(array.shape, start, array[cut])
        rest = checksums.checksums({"rest": changed})["rest"]
        assert (rest + of_part) % checksums.MODULUS == expected
    bits = array.copy().reshape(-1).view(np.uint8)
    bits[[array.itemsize - 1, 3 * array.itemsize - 1]] ^= 0x80  # signs of two numbers
    flipped = bits.view(dtype).reshape(array.shape)
    assert checksums.checksums({"whole": flipped}) != {"whole": expected}


def test_one_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    learner = shared()
    braintrace.save(tmp_path, learner, extra="first")
    read, written = store.read_arrays, []

    def after_another_process(path, *arguments):
        if not written:
            written.append(braintrace.save(tmp_path, learner, extra="second"))
        return read(path, *arguments)

    monkeypatch.setattr(store, "read_arrays", after_another_process)
    assert braintrace.restore(tmp_path, learner) == "second"


def test_in_a_notebook(tmp_path):
    async def cell():
        braintrace.save(tmp_path, shared(), extra=1)
        return braintrace.restore(tmp_path, shared())

    assert asyncio.run(cell()) == 1


def test_numbers_go_on_where_they_are(tmp_path):
    for number in (8, 9, 10):
        (tmp_path / f"braintrace-checkpoint-{number}").mkdir()
    assert store.last(tmp_path).name == "braintrace-checkpoint-10"


# --- pickles


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_a_learner_is_no_pickle(module):
    with pytest.raises(TypeError, match=r"use `braintrace\.save\(folder, learner\)`"):
        module.dumps(shared())


def test_a_learner_is_copied_and_its_state_is_pickled():
    learner, twin = shared(), copy.copy(shared())
    assert twin.algorithm is learner.algorithm
    assert twin.parts.drivers is not learner.parts.drivers
    state = learner.functional().state()
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)
    assert dataclasses.is_dataclass(state)

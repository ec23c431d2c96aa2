"""Checkpoints survive odd folders, foreign arrays, second writers and doctored files."""

import errno
import functools
import json
import os
import pathlib
import string
import subprocess
import sys
import types

import brainstate
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit
from assertions import assert_same_bits
from drawn import by_day_and_night, drawn
from places import SEARCHED

import braintrace
from braintrace._arguments import DEEPEST
from braintrace._saving import store

PRINTABLE = sorted({*map(chr, range(32, 127))} - {"/"})
NAMES = st.text(st.sampled_from([*PRINTABLE, "é", "漢", "🧠"]), min_size=1, max_size=8)


class Leaky(brainstate.nn.Module):
    """The smallest model that learns."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.arange(6.0).reshape(2, 3))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@functools.cache
def learner():
    return braintrace.compile(Leaky(), "d_rtrl", jnp.ones((2, 2)), batch_size=2)


def saved_and_restored(folder):
    """Save twice, so that the second replaces the first; every number comes back."""
    weight = learner().algorithm.model.w
    braintrace.save(folder, learner(), extra="first")
    weight.value = weight.value + 1
    expected = np.asarray(weight.value)
    braintrace.save(folder, learner(), extra="second")
    weight.value = jnp.zeros((2, 3))
    assert braintrace.restore(folder, learner()) == "second"
    np.testing.assert_array_equal(weight.value, expected)
    assert len(list(pathlib.Path(folder).iterdir())) == 1


# --- paths


@pytest.mark.by_day(
    "run[x]",
    "*?",
    "logs:",
)
@pytest.mark.parametrize("name", ["run[x]", "a\\b", "[", "*?", "with space", "naïve 漢 🧠", "logs:",
    "".join(c for c in string.punctuation if c != "/"),
])  # fmt: skip
def test_a_folder_of_any_name_keeps_what_was_saved(name, tmp_path):
    saved_and_restored(tmp_path / name)


@pytest.mark.nightly
def test_folders_of_random_names(tmp_path_factory):
    @drawn(400, st.lists(NAMES.filter(lambda name: name != ".."), min_size=1, max_size=3))
    def check(names):
        saved_and_restored(tmp_path_factory.mktemp("names").joinpath(*names))


# --- arrays of `extra`


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">u4", ">c8"])
def test_arrays_in_the_other_byte_order_keep_their_numbers(dtype, tmp_path):
    array = np.array([[1, 2], [300, 4]], dtype)
    braintrace.save(tmp_path, learner(), extra={"data": array, "one": array[1, 0]})
    found = braintrace.restore(tmp_path, learner())
    np.testing.assert_array_equal(found["data"], array)
    assert found["data"].dtype == array.dtype.newbyteorder("=")
    assert found["one"] == 300


REFUSED = {
    "masked": ({"a": np.ma.array([1.0, 2.0], mask=[True, False])}, r"`extra/a` is a MaskedArray"),
    "matrix": ([np.ones((1, 2)).view(np.matrix)], r"`extra/0` is a matrix"),
    "5,000 digits": ({"n": 10**4999}, r"`extra/n` is an integer"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_would_change_or_never_end_is_refused_by_name(row, tmp_path):
    extra, words = REFUSED[row]
    braintrace.save(tmp_path, learner(), extra="before")
    with pytest.raises(braintrace.OptionError, match=words):
        braintrace.save(tmp_path, learner(), extra=extra)
    assert braintrace.restore(tmp_path, learner()) == "before"


@pytest.mark.parametrize("levels", [DEEPEST - 2, DEEPEST - 1, DEEPEST])
def test_a_quantity_as_deep_as_can_be(levels, tmp_path):
    """What is saved can be restored: the unit takes a level as well."""
    extra = 2.0 * saiunit.mV
    for _ in range(levels):
        extra = [extra]
    if levels == DEEPEST:
        with pytest.raises(braintrace.OptionError, match="deeper than"):
            braintrace.save(tmp_path, learner(), extra=extra)
        return
    braintrace.save(tmp_path, learner(), extra=extra)
    found = braintrace.restore(tmp_path, learner())
    while isinstance(found, list):
        (found,) = found
    assert found == 2.0 * saiunit.mV


@pytest.mark.parametrize(
    "part", ["format", "versions", "options", "entries", "optimizer", "at start", "extra", "empty"]
)
def test_a_description_that_lacks_a_part_is_damaged(part, tmp_path, monkeypatch):
    def without(description):
        return json.dumps({k: v for k, v in description.items() if k != part})

    with monkeypatch.context() as patch:
        patch.setattr(store, "json", types.SimpleNamespace(dumps=without, loads=json.loads))
        braintrace.save(tmp_path, learner())
    before = jax.device_get(learner().functional().state())
    with pytest.raises(braintrace.CheckpointError, match=f"is damaged.*'{part}'"):
        braintrace.restore(tmp_path, learner())
    assert_same_bits(learner().functional().state(), before)


# --- what fails while a checkpoint is written


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("place", ["write", "read back"])
def test_a_disk_that_is_full_leaves_the_previous_checkpoint_alone(
    number, place, tmp_path, monkeypatch
):
    braintrace.save(tmp_path, learner(), extra="before")
    checkpointer = type(store._checkpointer())
    method = {"write": "save", "read back": "restore"}[place]

    def failing(self, path, *_, **__):
        (path if place == "read back" else path.parent).joinpath("part").write_bytes(b"x")
        raise OSError(number, "what the system says", str(path))

    monkeypatch.setattr(checkpointer, method, failing)
    with pytest.raises(braintrace.CheckpointError, match=r"are unchanged.*what the system says"):
        braintrace.save(tmp_path, learner(), extra="after")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["braintrace-checkpoint-0"]
    assert braintrace.restore(tmp_path, learner()) == "before"


def test_what_reads_back_as_other_numbers_replaces_nothing(tmp_path, monkeypatch):
    braintrace.save(tmp_path, learner(), extra="before")
    checkpointer = type(store._checkpointer())
    real, calls = checkpointer.restore, []

    def flipped(self, *arguments, **options):
        calls.append(1)
        found = real(self, *arguments, **options)
        found["parameters/w"] = found["parameters/w"] * np.array([1, 1, -1], np.float32)
        return found

    monkeypatch.setattr(checkpointer, "restore", flipped)
    with pytest.raises(braintrace.CheckpointError, match="'parameters/w' differs when"):
        braintrace.save(tmp_path, learner(), extra="after")
    monkeypatch.undo()
    assert len(calls) == 1
    assert braintrace.restore(tmp_path, learner()) == "before"
    assert len(list(tmp_path.iterdir())) == 1


# --- two writers


@pytest.mark.parametrize("step", ["_begin", "_finish", "_commit", "_delete"])
def test_a_second_writer_at_any_moment_loses_nothing_that_returned(step, tmp_path, monkeypatch):
    braintrace.save(tmp_path, learner(), extra="before")
    real, inside, returned = getattr(store, step), [], ["before"]

    def interleaved(*arguments):
        if not inside:
            inside.append(1)
            braintrace.save(tmp_path, learner(), extra="second")
            returned.append("second")
        return real(*arguments)

    monkeypatch.setattr(store, step, interleaved)
    try:
        braintrace.save(tmp_path, learner(), extra="first")
        returned.append("first")
    except braintrace.CheckpointError as error:
        assert "another program" in str(error)
    monkeypatch.undo()
    assert inside
    assert braintrace.restore(tmp_path, learner()) in returned[1:]
    braintrace.save(tmp_path, learner(), extra="last")
    assert braintrace.restore(tmp_path, learner()) == "last"


WRITER = """
import sys
import braintrace, test_checkpoint_folders as test
name, folder = sys.argv[1:]
for number in range(15):
    try:
        braintrace.save(folder, test.learner(), extra=[name, number])
    except braintrace.CheckpointError as error:
        assert "another program" in str(error), error
    else:
        print(name, number, flush=True)
"""


@pytest.mark.nightly
def test_two_processes_that_save_to_one_folder(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", WRITER]
    searched = os.pathsep.join([str(pathlib.Path(__file__).parent), SEARCHED])
    started = {"env": {**os.environ, "PYTHONPATH": searched}, "stdout": subprocess.PIPE}
    writers = [
        subprocess.Popen([*command, name, str(folder)], text=True, **started) for name in "ab"
    ]
    said = [writer.communicate(timeout=600)[0].split("\n") for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    name, number = braintrace.restore(folder, learner())
    assert any(f"{name} {number}" in lines for lines in said)
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_another_program_takes_away_at_once_is_said_to_be_taken(
    tmp_path, monkeypatch
):
    def touch(path):
        path.parent.rmdir()
        raise FileNotFoundError(path)

    braintrace.save(tmp_path, learner(), extra="before")
    monkeypatch.setattr(pathlib.Path, "touch", touch)
    with pytest.raises(braintrace.CheckpointError, match="another program saves to it"):
        braintrace.save(tmp_path, learner(), extra="after")
    assert braintrace.restore(tmp_path, learner()) == "before"


# --- what lies in the folder


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path):
    folder = tmp_path / "run"
    braintrace.save(tmp_path / "elsewhere", learner(), extra="elsewhere")
    folder.mkdir()
    (folder / "braintrace-checkpoint-3").symlink_to(tmp_path / "elsewhere/braintrace-checkpoint-0")
    with pytest.raises(braintrace.CheckpointError, match="is a symbolic link"):
        braintrace.restore(folder, learner())
    braintrace.save(folder, learner(), extra="own")
    assert braintrace.restore(folder, learner()) == "own"
    assert braintrace.restore(tmp_path / "elsewhere", learner()) == "elsewhere"


@pytest.mark.parametrize("name", ["braintrace-checkpoint-0", "braintrace-unfinished-1"])
def test_a_file_at_a_reserved_name_does_not_block_saving(name, tmp_path):
    (tmp_path / name).write_text("notes")
    braintrace.save(tmp_path, learner(), extra=1)
    assert braintrace.restore(tmp_path, learner()) == 1
    assert (tmp_path / name).read_text() == "notes"


# --- doctored manifests


NONSENSE = st.recursive(
    st.sampled_from([None, True, -1, 10**30, 0.5, "", "x", "os:system", [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(tree, path=()):
    """Yield the path of every value in a tree of JSON."""
    yield path
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*path, key))


def with_value(tree, path, value):
    if not path:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[path[0]] = with_value(copied[path[0]], path[1:], value)
    return copied


def check_doctored(folder, data):
    text = store.read_text(store.last(folder))
    manifest = json.loads(text)
    path = data.draw(st.sampled_from(list(places(manifest))))
    doctored = json.dumps(with_value(manifest, path, data.draw(NONSENSE)))
    before = jax.device_get(learner().functional().state())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read_text", lambda *_, **__: doctored)
        try:
            braintrace.restore(folder, learner())
        except braintrace.CheckpointError:
            after = jax.device_get(learner().functional().state())
            assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.fixture(scope="module")
def checkpoint_with_extra(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctored")
    tree = {"a": (1, [2.5, None]), "key": jax.random.key(1), "b": np.arange(3), 1j: "c"}
    braintrace.save(folder, learner(), extra=tree)
    return folder


@by_day_and_night(40, 2000)
def test_a_doctored_manifest_restores_or_is_refused(checkpoint_with_extra, examples):
    drawn(examples, st.data())(lambda data: check_doctored(checkpoint_with_extra, data))

"""Random histories of a checkpoint folder: saved, killed, resumed, damaged, and shared by two.

Whatever happens, `restore` gives what a `save` has written that returned or could have, to the last
bit, or raises and changes nothing.
"""

import contextlib
import types
import typing

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from drawn import by_day_and_night, drawn
from test_checkpoint_folders import NAMES, learner
from test_saving import damages, files_of

import braintrace
from braintrace._saving import store

DTYPES = ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64", ">i4", "bfloat16"]
SHAPES = [(), (3,), (2, 0), (2, 3)]
POINTS = ("_begin", "_write", "_finish", "_commit", "_delete")


class Momenta(typing.NamedTuple):
    """A state as optimizers have them."""

    count: int
    mu: object


def array_of(dtype, shape, seed, is_jax):
    numbers = np.random.default_rng(seed).integers(0, 2, shape)
    array = numbers.astype(jnp.bfloat16 if dtype == "bfloat16" else dtype)
    is_wide = array.dtype.itemsize > 4
    return jnp.asarray(array) if is_jax and not is_wide and dtype[0] != ">" else array


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.builds(array_of, *map(st.sampled_from, (DTYPES, SHAPES)), st.integers(0, 9), st.booleans()),
    st.builds(lambda seed: jax.random.key(seed), st.integers(0, 9)),
    st.builds(lambda number: number * u.mV, st.floats(-1, 1)),
)
KEYS = st.text(max_size=4) | st.integers(-9, 9) | st.tuples(st.text(max_size=2), st.just("w"))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Momenta, st.integers(0, 9), inner)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)


def is_same(found, expected):
    """Tell whether two trees are one in types and bits; byte order becomes the machine's."""
    if isinstance(expected, (list, tuple)):
        same = type(found) is type(expected) and len(found) == len(expected)
        return same and all(map(is_same, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(is_same(found[k], expected[k]) for k in found)
    if isinstance(expected, u.Quantity):
        one, other = (u.get_mantissa(q) for q in (found, expected))
        return u.get_unit(found) == u.get_unit(expected) and np.array_equal(one, other)
    if isinstance(expected, jax.Array) and jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        return bool(jnp.array_equal(*map(jax.random.key_data, (found, expected))))
    if isinstance(expected, (jax.Array, np.ndarray)):
        same = found.dtype == np.dtype(expected.dtype).newbyteorder("=")
        return same and found.shape == expected.shape and bool(np.array_equal(found, expected))
    return type(found) is type(expected) and repr(found) == repr(expected)


class Killed(BaseException):
    """Ends a program; nothing behind it is run."""


@contextlib.contextmanager
def at(point, act, is_after):
    """Let something happen once, before or after a step of `save`."""
    happened = []

    def replaced(real):
        def step(*arguments, **options):
            result = real(*arguments, **options) if is_after else None
            if not happened:
                happened.append(1)
                act()
            return result if is_after else real(*arguments, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        owner, name = (type(store._checkpointer()), "save") if point == "_write" else (store, point)
        patch.setattr(owner, name, replaced(getattr(owner, name)))
        yield patch


class History:
    """A folder, and the checkpoints that may be in it.

    Attributes
    ----------
    possible
        Numbers of what may be the last; ``None``: nothing may be there.
    saved
        Trees by number.
    """

    def __init__(self, folder):
        self.folder, self.possible, self.saved = folder, {None}, {}

    def save(self, tree):
        """Save a tree under the next number, with weights that tell it; return the number."""
        number = len(self.saved)
        self.saved[number] = tree
        learner().algorithm.model.w.value = jnp.full((2, 3), float(number))
        braintrace.save(self.folder, learner(), extra=(number, tree))
        return number

    def save_alone(self, draw):
        self.possible = {self.save(draw(TREES))}

    def ended(self, draw):
        """A program ends at some step of `save`: by Ctrl-C, or killed, when it deletes nothing."""
        ending = draw(st.sampled_from([Killed, KeyboardInterrupt]))
        point, is_after = draw(st.sampled_from(POINTS)), draw(st.booleans())
        number, alive, rmtree = len(self.saved), [1], store.shutil.rmtree

        def die():
            if ending is Killed:
                alive.clear()
            raise ending

        def guarded(*arguments, **options):
            if alive:
                rmtree(*arguments, **options)

        with at(point, die, is_after) as patch:
            patch.setattr(store, "shutil", types.SimpleNamespace(rmtree=guarded))
            try:
                self.save(draw(TREES))
            except ending:
                is_before = (point, is_after) in {
                    *((p, after) for p in ("_begin", "_write") for after in (False, True)),
                    ("_finish", False),
                    ("_commit", False),
                }
                self.possible = self.possible if is_before else {*self.possible, number}
            else:  # there was nothing to delete
                self.possible = {number}

    def two_writers(self, draw):
        """A second program saves at some step of the first."""
        point, is_after = draw(st.sampled_from(POINTS)), draw(st.booleans())
        trees, second = (draw(TREES), draw(TREES)), []
        with at(point, lambda: second.append(self.save(trees[1])), is_after):
            try:
                second.append(self.save(trees[0]))
            except braintrace.CheckpointError as error:
                assert "another program" in str(error), error
        self.possible = {*second}

    def damaged(self, draw):
        """A file of the folder is cut, changed or lost, until something is saved again."""
        damage, index = draw(st.sampled_from([*damages()])), draw(st.integers(0, 99))
        files = files_of(self.folder) if self.folder.is_dir() else []
        if files:  # how many there are is not the same at every run
            damages()[damage](files[index % len(files)])
            self.check(is_damaged=True)
        self.save_alone(draw)

    def check(self, is_damaged=False):
        """Restore, and compare with what may be there."""
        weight = learner().algorithm.model.w
        weight.value = jnp.full((2, 3), -1.0)
        try:
            number, tree = braintrace.restore(self.folder, learner())
        except braintrace.CheckpointError as error:
            is_missing = isinstance(error, braintrace.NoCheckpointError) and None in self.possible
            assert is_damaged or is_missing, error
            np.testing.assert_array_equal(weight.value, -1.0)
        else:
            assert number in self.possible
            np.testing.assert_array_equal(weight.value, float(number))
            assert is_same(tree, self.saved[number]), (tree, self.saved[number])
            self.possible = {number}


EVENTS = (History.save_alone, History.ended, History.two_writers, History.damaged)


def check_history(tmp_path_factory, data):
    names = data.draw(st.lists(NAMES.filter(lambda name: name != ".."), min_size=1, max_size=2))
    history = History(tmp_path_factory.mktemp("history").joinpath(*names))
    for event in data.draw(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=5)):
        event(history, data.draw)
        history.check()
    history.save_alone(data.draw)
    history.check()
    assert len(list(history.folder.iterdir())) == 1


# Where one array cannot be read, orbax ends before the others have been.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@by_day_and_night(5, 400)
def test_random_histories(tmp_path_factory, examples):
    drawn(examples, st.data())(lambda data: check_history(tmp_path_factory, data))

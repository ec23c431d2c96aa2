"""Public calls with one argument replaced by an odd value: they return, or raise in words.

The attack on the library, and the files that repeat it: a smaller part in the suite, all of it in
``.ci/nightly``.

=============================  ===================================================================
Part of the attack             Tests
=============================  ===================================================================
models of all kinds            `test_catalogue`, `test_catalogue_rules`, `test_random_cells`
models of other libraries      `test_frameworks`, `test_nn_brainpy`, `test_nn_swap`
models by forms of weights     `test_catalogue`, `test_masked_weights`, `test_found_marks`
mixes of options               `test_random_options`, `test_every_rule`, `test_rules_by_path`
random draws of programs       `test_dataflow`, `test_random_cells`, `test_random_rules`
interrupts                     `test_driver_transactions`, `test_watching`, `test_saving`
kills, two writers             `test_random_checkpoints`, `test_checkpoint_folders`, `test_saving`
damaged checkpoints            `test_random_checkpoints`, `test_checkpoint_folders`, `test_saving`
wrong calls, one by one        `test_wrong_calls`, `test_bad_input`
wrong calls, at random         this file
devices and processes          `test_sharding`, `test_meshes`, `test_processes`
=============================  ===================================================================
"""

import pathlib
import random
import re
import traceback
import warnings

import attacked_calls
import bad_values
import jax
import matplotlib
import matplotlib.pyplot
import places
import pytest
from assertions import assert_same_bits
from drivers import snapshot
from public_names import LAYERS, PUBLIC

import braintrace

matplotlib.use("agg")
ARGUMENTS = [(name, a) for name, call in attacked_calls.EVERY.items() for a in call.names]
BY_DAY, BY_NIGHT, ROWS = 120, 20_000, 20
"""Calls of the suite, and of all rows of the night together."""


def called(name, argument, value):
    """Make a call with a value, by its name; return the error that it raises."""
    call, bench = attacked_calls.EVERY[name], attacked_calls.bench()
    raised = []

    def run(value):
        try:
            call(bench, **{argument: value})
        except Exception as error:
            raised.append(error)
        return 0.0

    if value in bad_values.TRACED:
        jax.jit(run)(bad_values.TRACED[value]())
    else:
        run(bad_values.VALUES[value]())
    return raised[0] if raised else None


def is_told(error, argument):
    """Tell whether an error is the library's or the user's own, or names the argument."""
    if isinstance(error, braintrace.BraintraceError):
        return bool(str(error)) and not re.search(r" at 0x[0-9a-f]{6}", str(error))
    last = traceback.extract_tb(error.__traceback__)[-1]
    if pathlib.Path(last.filename).parent == places.SUPPORT and last.name == "pure_step":
        return True
    is_plain = type(error) in (TypeError, ValueError)
    return is_plain and re.search(rf"(?<!\w){argument}(?!\w)", str(error)) is not None


def attack(draws, seed):
    """Make random calls; return those that raise something else, or change the learner."""
    generator, wrong = random.Random(seed), []
    for _ in range(draws):
        name, argument = generator.choice(ARGUMENTS)
        value = generator.choice(bad_values.NAMES)
        learner = attacked_calls.bench().learner
        before = snapshot(learner)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = called(name, argument, value)
        if error is not None and not is_told(error, argument):
            wrong.append((name, argument, value, type(error).__name__, str(error)[:200]))
        try:
            assert_same_bits(snapshot(learner), before)
        except AssertionError:
            attacked_calls.bench.cache_clear()
            if error is not None:
                wrong.append((name, argument, value, "changes the learner", str(error)[:200]))
    return wrong


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Calls may write to folders of any name."""
    monkeypatch.chdir(tmp_path)
    yield
    matplotlib.pyplot.close("all")


def test_random_calls_return_or_raise_in_words():
    assert attack(BY_DAY, seed=0) == []


@pytest.mark.nightly
@pytest.mark.parametrize("row", range(ROWS))
def test_many_random_calls_return_or_raise_in_words(row):
    assert attack(BY_NIGHT // ROWS, seed=1 + row) == []


ENDLESS = ("cyclic list", "cyclic dict", "deep")


@pytest.mark.by_day(
    "matmul, x",
    "compile, rules",
    "OTTT, strict",
    "gradient_check, vmap",
    "gradient_check, xs",
    "compare_rules, xs",
    "etrace_evolve, chunk_size",
    "functional().evolve, reset",
    "nn.Conv1d, groups",
    "nn.ScaledWSConv2d, w_mask",
    "nn.GRUCell, in_size",
    "nn.ScaledWSLinear, eps",
    "nn.GIF, k2",
    "nn.ValinaRNNCell, activation",
)
@pytest.mark.parametrize("place", ARGUMENTS, ids=lambda place: ", ".join(place))
def test_endless_containers_are_refused(place):
    """JAX would leave the interpreter without a stack: every argument, not a sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = {value: called(*place, value) for value in ENDLESS}
    assert [v for v, error in errors.items() if error and not is_told(error, place[1])] == []


def test_every_public_name_is_attacked():
    """Except errors, what the library makes and returns, and what would register for good."""
    attacked = {name.partition(",")[0].removeprefix("nn.") for name in attacked_calls.EVERY}
    public = {name for name in PUBLIC if callable(getattr(braintrace, name))}
    errors = {name for name in public if name.endswith(("Error", "Warning", "Interrupted"))}
    assert public - errors - attacked == attacked_calls.MADE_BY_THE_LIBRARY
    assert {*LAYERS} - attacked == set()

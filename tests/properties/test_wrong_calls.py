"""Every wrong call raises an error of the library that names what is wrong, and changes nothing."""

import re

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_calls
import wrong_operands
from assertions import assert_same_bits
from drivers import snapshot

import braintrace

ROWS = [*wrong_calls.EVERY, *wrong_operands.EVERY]


@pytest.fixture(scope="module")
def expected():
    """Gradient of the bench's learner from where it stands."""
    return run_and_return(wrong_calls.bench())


def run_and_return(bench):
    """Return a gradient, and bring states and traces back to where they were."""
    states, traces = snapshot(bench.learner)
    gradients = bench.grad()
    for path, state in bench.learner.algorithm.model.states().items():
        state.value = states[path]
    bench.learner.algorithm.traces.value = traces
    return gradients


@pytest.mark.core
@pytest.mark.parametrize(("text", "call"), ROWS, ids=[str(text) for text, _ in ROWS])
def test_wrong_call_names_its_error_and_changes_nothing(text, call, expected):
    bench = wrong_calls.bench()
    bench.learner.optimizer_state = None  # other tests share the learner
    before = snapshot(bench.learner)
    with pytest.raises(braintrace.BraintraceError) as caught:
        call(bench)
    message = str(caught.value)
    phrases = (text,) if isinstance(text, str) else text
    assert [phrase for phrase in phrases if phrase not in message] == [], message
    assert not re.search(r" at 0x[0-9a-f]{6}", message)
    assert_same_bits(snapshot(bench.learner), before)
    assert_same_bits(run_and_return(bench), expected)


# --- what is the user's own ---------------------------------------------------------------


class OwnError(Exception):
    """An error that nobody else knows."""


def raising(kind):
    raise kind("mine")


def about_states():
    raise ValueError("JAX knows no such HiddenState")


RAISED = (
    OwnError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
SLIPS = (
    (ValueError, lambda: int("mine")),
    (KeyError, lambda: {}["mine"]),
    (AttributeError, lambda: object().mine),
    (TypeError, lambda: len(3)),
    (ZeroDivisionError, lambda: 1 / 0),
    (ValueError, about_states),
)


@pytest.mark.parametrize("place", ["update", "step_fn", "update_fn", "init_state"])
def test_errors_of_ones_own_pass_through(place, expected):
    bench = wrong_calls.bench()
    cases = [(kind, lambda kind=kind: raising(kind)) for kind in RAISED]
    for kind, raise_it in [*cases, *SLIPS]:
        before = snapshot(bench.learner)
        with pytest.raises(kind) as caught:
            calls(bench, raise_it)[place]()
        assert type(caught.value) is kind
        assert_same_bits(snapshot(bench.learner), before)
    assert_same_bits(run_and_return(bench), expected)


def calls(bench, raise_it):
    """A call for each place where the user's code runs."""

    class Broken(wrong_calls.OfBatch):
        def init_state(self, batch_size):
            raise_it()

    return {
        "update": lambda: wrong_calls.stepping(lambda model, x: raise_it()),
        "step_fn": lambda: bench.grad(step_fn=lambda x, y: (bench.loss(x, y), raise_it())[0]),
        "update_fn": lambda: bench.online(update_fn=lambda gradients: raise_it()),
        "init_state": lambda: wrong_calls.compiled(Broken()),
    }


def test_a_model_that_could_not_be_compiled_can_be_mended():
    model = wrong_calls.OfBatch(lambda model, x: x + jnp.ones(7))
    with pytest.raises(braintrace.CompilationError) as caught:
        wrong_calls.compiled(model)
    assert str(caught.value).endswith("(<lambda>)]"), "there is no word about `batch_size`"
    model.step = None
    learner = wrong_calls.compiled(model)
    assert learner(wrong_calls.X).shape == (2, 4)


def test_numbers_of_numpy_are_numbers():
    model = brainstate.nn.Module()
    for number, decay in ((np.float32(0.5), 0.5), (np.int64(3), 0.5), (np.float64(0.9), 0.9)):
        assert braintrace.ES_D_RTRL(model, decay_or_rank=number).decay == decay

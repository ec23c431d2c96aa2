"""`window=K`: BPTT inside windows of K steps, the rule's traces for everything before them.

Windows of all rules that are derivatives meet random models in ``tests/test_gradients.py``.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from learners import (
    ADAPTING,
    LEAKY,
    LSTM,
    TARGETS,
    XS,
    assert_same,
    expected_gradient,
    gradient,
    learner_of,
    loss_of_sample,
    quietly_compiled,
    squared_error,
    step_of,
)
from oracle import assert_close
from paths import add
from random_models import BATCH, INPUTS, STEPS, UNITS, Marked, Module, model_of, named

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
MASK = np.array([1.0, 0.0, 2.0, 1.0, 0.0, 0.5])
RESET = np.zeros((STEPS, BATCH), bool)
RESET[4, 0] = RESET[5, 1] = RESET[3, 1] = True
FILTERS = {"es_d_rtrl": {"decay_or_rank": 0.7}, "ottt": {"decay": 0.7}}


@pytest.mark.parametrize(("model", "rule"), [(LSTM, "es_d_rtrl"), (ADAPTING, "ottt")])
def test_rules_that_filter_inputs_carry_into_windows(model, rule):
    learner = learner_of(model, rule, window=3, **FILTERS[rule])
    found = gradient(learner, mask=MASK, reset=RESET, chunk_size=6)
    expected = getattr(oracle, rule)(
        model, model.params(), XS, loss_of_sample, 0.7, MASK, RESET, window=3
    )
    assert_close(found, expected, 1e-9)


def test_a_window_longer_than_the_sequence_is_bptt():
    found = gradient(learner_of(LSTM, which="with windows"), window=100)
    assert_close(found, expected_gradient(LSTM, "bptt"), 1e-9)


def test_windows_begin_with_the_call():
    """A sequence in two calls has the windows of both."""
    learner, first, later = learner_of(LSTM, window=3), np.arange(STEPS) < 4, np.arange(STEPS) >= 4
    parts = [gradient(learner, XS[part], TARGETS[part]) for part in (slice(4), slice(4, None))]
    # of windows at 0, 3 and 4
    apart = expected_gradient(LSTM, window=3, mask=first * 1.0)
    expected = add(apart, expected_gradient(LSTM, window=4, mask=later * 1.0))
    assert_close(add(*parts), expected, 1e-9)


# --- streams


def descended(learner, **options):
    """The sum of the gradients of a stream whose parameters stay as they are."""
    weights = learner.param_states
    total = brainstate.State({p: jnp.zeros_like(w.value) for p, w in weights.items()})

    def update_fn(gradients):
        total.value = add(total.value, dict(gradients))

    learner.etrace_online(XS, TARGETS, step_fn=step_of(learner), update_fn=update_fn, **options)
    return named(total.value)


def test_a_block_of_a_stream_has_several_windows():
    found = descended(learner_of(LSTM, which="with windows"), every=4, window=2)
    means = np.array([1 / 4] * 4 + [1 / 2] * 2)
    assert_close(found, expected_gradient(LSTM, window=2, mask=means), 1e-9)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_no_window_spans_an_update(every):
    learner = learner_of(LSTM, which="with windows")
    found = descended(learner, every=every, window=4)
    learner.reset_state()
    assert_close(found, descended(learner, every=every, window=every), 1e-9)


# --- a gradient of one's own


def own_gradient(learner, length):
    """The sum of one's own gradients around calls with `MultiStepData`, or of single steps."""
    algorithm, weights = learner, learner.param_states

    def loss(xs, targets):
        if length == 1:
            return squared_error(algorithm(xs[0]), targets[0])
        return squared_error(algorithm(braintrace.MultiStepData(xs)), targets)

    own = brainstate.transform.jit(brainstate.transform.grad(loss, weights))
    starts = range(0, STEPS, length)
    parts = [own(XS[t : t + length], TARGETS[t : t + length]) for t in starts]
    return named(jax.tree.map(lambda *leaves: sum(leaves), *parts))


@pytest.mark.parametrize("length", [1, 2, STEPS])
def test_data_of_several_steps_is_one_window(length):
    found = own_gradient(learner_of(LSTM, window=3), length)
    assert_close(found, expected_gradient(LSTM, window=length), 1e-9)


def test_without_a_window_data_of_several_steps_is_a_loop_of_single_ones():
    found = own_gradient(learner_of(LSTM, which="with windows"), STEPS)
    assert_close(found, expected_gradient(LSTM), 1e-9)


# --- a window that a call asks for


def test_a_call_asks_for_a_window_where_traces_follow_every_state():
    """Those of an LSTM without windows leave one out, from the first step on."""
    learner = learner_of(LSTM, which="without windows so far")
    assert_close(gradient(learner), expected_gradient(LSTM), 1e-9)
    with pytest.raises(braintrace.OptionError, match="window"):
        gradient(learner, window=3)
    pure = learner.functional()
    with pytest.raises(braintrace.OptionError, match="window"):
        pure.grad(pure.state(), XS, TARGETS, step_fn=step_of(learner), window=3)
    learner.reset_state()
    assert_close(gradient(learner, window=3), expected_gradient(LSTM, window=3), 1e-9)
    learner.reset_state()
    assert_close(gradient(learner), expected_gradient(LSTM), 1e-9)
    leaky = learner_of(LEAKY)
    leaky.etrace_evolve(XS[:2])
    found = gradient(leaky, XS[2:], TARGETS[2:], window=2)
    later = (np.arange(STEPS) >= 2) * 1.0
    assert_close(found, expected_gradient(window=2, mask=later), 1e-9)


def test_functions_of_the_state_take_a_window():
    learner = learner_of(LSTM, window=3)
    pure, options = learner.functional(), {"step_fn": step_of(learner), "reduction": "sum"}
    run = jax.jit(lambda state: pure.grad(state, XS, TARGETS, window=2, **options)[1])
    assert_close(named(run(pure.state())), expected_gradient(LSTM, window=2), 1e-9)


# --- which rules take one


def test_rtrl_takes_a_window_without_effect():
    expected = gradient(learner_of(LSTM, "rtrl"))
    assert_same(gradient(learner_of(LSTM, "rtrl", window=3)), expected)
    assert_same(gradient(learner_of(LSTM, "rtrl"), window=2), expected)


def test_one_window_is_for_all_rules():
    def build(**options):
        model = model_of(LSTM)
        return quietly_compiled(model, "d_rtrl", XS[0], batch_size=BATCH, **options)

    with pytest.raises(braintrace.OptionError, match="window"):
        build(rules={"w0": ("es_d_rtrl", {"window": 2})})
    with pytest.raises(braintrace.OptionError, match="RTRL"):
        build(rules={"w0": "rtrl"}, window=2)


# --- steps of any kind


def branch(h, gain):
    """The first result is unused, so only the second has a derivative."""
    branches = (lambda: (h, jnp.sin(h * gain))), (lambda: (-h, h + gain))
    return jax.lax.cond(h.sum() > 0, *branches)[1]


def loop(h, gain):
    """The last carry is unused."""
    return jax.lax.scan(lambda c, _: (c * gain, jnp.sin(c * gain)), h, None, 2)[1].sum(0)


def watched(h, gain):
    """An operation without a result reads a parameter."""
    jax.debug.callback(lambda value: None, gain)
    return h * gain


def chained(h, gain):
    """A product is the operand of another."""
    return h + h @ jnp.diag(gain) @ jnp.diag(gain)


class Gated:
    """A layer whose gain acts in some operation of JAX."""

    def __init__(self, gate):
        self.gate = gate

    def params(self, dtype=np.float64):
        draw = np.random.default_rng(0).normal
        return {"w": draw(size=(INPUTS, UNITS)), "gain": draw(size=UNITS), "out": np.ones((4, 2))}

    def start(self, batch=BATCH, dtype=np.float64):
        return {"h": jnp.zeros((batch, UNITS), dtype)}

    def step(self, ops, p, h, x):
        h = jnp.tanh(self.gate(ops.matmul(x, p["w"]) + 0.5 * h["h"], p["gain"]))
        return {"h": h}, h @ p["out"]


@pytest.mark.parametrize(
    ("gate", "rule"),
    [(branch, "d_rtrl"), (loop, "rtrl"), (watched, "d_rtrl"), (chained, "d_rtrl")],
)
def test_a_window_passes_operations_of_any_kind(gate, rule):
    model = Gated(gate)
    module = Module(model, Marked(), np.float64)
    learner = quietly_compiled(module, rule, XS[0], batch_size=BATCH)
    found = gradient(learner, window=STEPS)
    assert_close(found, expected_gradient(model, "bptt"), 1e-9)

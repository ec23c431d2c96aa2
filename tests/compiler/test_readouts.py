"""A leaky readout written the usual way is exact: o = k o + s W, whatever remembers below it."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from learners import quietly_compiled
from paths import PATHS
from random_models import BATCH, INPUTS, OUTPUTS, STEPS, UNITS, spike
from toys import XS, Toy, bptt, clipped, compiled, deviation, findings, gradient, warned

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
LINEAR, OTHERS = [], []
SHAPES = {
    "w": (INPUTS, UNITS),
    "out": (UNITS, OUTPUTS),
    "two": (UNITS, OUTPUTS),
    "b": (OUTPUTS,),
    "k": (),
    "d": (UNITS,),
    "e": (OUTPUTS,),
}
STATES = {"h": (UNITS,), "a": (UNITS,), "o": (OUTPUTS,), "q": (OUTPUTS,)}


def readout(table, weights="w out", states="h o"):
    """Add a model whose readout is decorated to a table."""

    def decorate(step):
        weights_of = {name: SHAPES[name] for name in weights.split()}
        states_of = {name: STATES[name] for name in states.split()}
        table.append(pytest.param(Toy(step, weights_of, states_of), id=step.__name__))
        return step

    return decorate


# --- layers below ---------------------------------------------------------------------------------


def rates(ops, p, h, x):
    new = 0.7 * h["h"] + jnp.tanh(ops.matmul(x, p["w"]))
    return {"h": new}, new**2


def adapting(ops, p, h, x):
    """Spikes, which a second state adapts to."""
    z = spike(h["h"] - 0.3 - 0.5 * h["a"])
    v = 0.8 * h["h"] - 0.4 * z + ops.matmul(x, p["w"])
    a = 0.9 * h["a"] + z
    return {"h": v, "a": a}, spike(v - 0.3 - 0.5 * a)


# --- readouts -------------------------------------------------------------------------------------


@readout(LINEAR)
def usual(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = 0.8 * h["o"] + z @ p["out"]
    return {**new, "o": o}, o


@readout(LINEAR, "w out b k", "h a o")
def with_a_decay_that_learns(ops, p, h, x):
    new, z = adapting(ops, p, h, x)
    decay = ops.element_wise(p["k"], jax.nn.sigmoid)
    o = decay * h["o"] + (1 - decay) * (ops.matmul(z, p["out"], p["b"]) + 0.3)
    return {**new, "o": o}, jax.nn.softmax(o)


@readout(LINEAR, "w out k")
def with_a_shift_that_a_weight_scales(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = 0.8 * h["o"] + p["k"] * (z @ p["out"] - 0.3)
    return {**new, "o": o}, o


@readout(LINEAR, "w out b")
def in_a_step_of_euler(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = h["o"] + (z @ p["out"] + p["b"] - h["o"]) / 2.5
    return {**new, "o": o}, o


@readout(LINEAR, "w out two", "h a o q")
def several(ops, p, h, x):
    new, z = adapting(ops, p, h, x)
    o = 0.8 * h["o"] + z @ p["out"]
    q = 0.5 * h["q"] + z @ p["two"] + 0.2 * (z @ p["out"])
    return {**new, "o": o, "q": q}, o + jnp.tanh(q)


@readout(LINEAR, "w out d")
def of_bent_values_with_a_mark(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    bent = jnp.tanh(z - ops.element_wise(p["d"], jnp.sin))
    o = 0.8 * h["o"] + bent @ p["out"]
    return {**new, "o": o}, o


@pytest.mark.parametrize("toy", LINEAR)
def test_a_linear_readout_is_exact(toy):
    learner = compiled(toy, strict=True)
    assert not findings(learner)
    oracle.assert_close(gradient(learner), bptt(toy), 1e-10)


MASK = np.array([0.0, 1.0, 0.5, 0.0, 2.0, 1.0])
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = RESET[4, 1] = True
ASKED = {"mask": MASK, "reset": RESET}


@functools.cache
def bptt_as_asked():
    return bptt(*LINEAR[2].values, **ASKED)


@pytest.mark.parametrize("path", ["by_stream", "by_own_gradient", "by_pure_function"])
def test_masks_and_resets_count_on_every_path(path):
    found = gradient(compiled(*LINEAR[2].values), PATHS[path], **ASKED)
    oracle.assert_close(found, bptt_as_asked(), 1e-10, path)


def test_an_output_of_initial_values_teaches_no_step_before_a_reset():
    def step(ops, p, h, x):
        return rates(ops, p, h, x)[0], h["h"] @ p["out"]

    toy = Toy(step)
    oracle.assert_close(gradient(compiled(toy), reset=RESET), bptt(toy, reset=RESET), 1e-10)


def test_states_that_predict_has_moved_have_no_past():
    (toy,) = LINEAR[0].values
    states = toy.start(BATCH)
    for x in XS:
        states, _ = toy.step(oracle.Plain(), toy.params(), states, x)

    class Later(Toy):
        def start(self, *batch, **_):
            return states

    learner = compiled(toy)
    learner.predict(XS)
    oracle.assert_close(gradient(learner), bptt(Later(toy.step, toy.weights, toy.states)), 1e-10)


def test_windows_of_a_readout_are_exact():
    (toy,) = LINEAR[0].values
    learner = compiled(toy, window=2)
    oracle.assert_close(gradient(learner, window=2), bptt(toy), 1e-10)


def test_a_readout_of_a_model_that_is_marked_automatically_is_exact():
    (toy,) = LINEAR[2].values
    found = gradient(compiled(toy, marked=False, mark="auto"))
    oracle.assert_close(found, bptt(toy), 1e-10)


# --- readouts that are not linear -----------------------------------------------------------------


@readout(OTHERS, "w out e")
def with_a_decay_for_each_unit(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = p["e"] * h["o"] + z @ p["out"]
    return {**new, "o": o}, o


@readout(OTHERS)
def bent_inside(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = jnp.tanh(0.8 * h["o"] + z @ p["out"])
    return {**new, "o": o}, o


@readout(OTHERS, "w out", "h o q")
def read_by_another_state(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = 0.8 * h["o"] + z @ p["out"]
    q = 0.5 * h["q"] * jnp.tanh(o)
    return {**new, "o": o, "q": q}, o + q


@readout(OTHERS)
def with_a_decay_of_data(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = jax.nn.sigmoid(x.sum()) * h["o"] + z @ p["out"]
    return {**new, "o": o}, o


@readout(OTHERS)
def behind_a_rule_that_clips(ops, p, h, x):
    new, z = rates(ops, p, h, x)
    o = 0.8 * h["o"] + clipped(4 * z @ p["out"]) / 4
    return {**new, "o": o}, o


@pytest.mark.parametrize("toy", OTHERS)
def test_another_readout_is_reported_and_truncated(toy):
    learner = compiled(toy)
    cut = [d for d in learner.graph.diagnostics if d.kind == "truncated"]
    assert any("o" in d.paths for d in cut)
    assert deviation(gradient(learner), bptt(toy), "w") > 0.02


def test_an_unmarked_parameter_in_what_is_filtered_is_the_only_one_left_out():
    def step(ops, p, h, x):
        new, z = rates(ops, p, h, x)
        o = 0.8 * h["o"] + jnp.tanh(z - p["d"]) @ p["out"]
        return {**new, "o": o}, o

    states = {name: STATES[name] for name in "ho"}
    toy = Toy(step, {name: SHAPES[name] for name in ("w", "out", "d")}, states)
    learner, expected = compiled(toy), bptt(toy)
    assert findings(learner) == {("info", "truncated", ("d", "o"))}
    assert not warned(learner)
    found = gradient(learner)
    assert deviation(found, expected, "d") > 0.02
    rest = {name: expected[name] for name in ("w", "out")}
    oracle.assert_close({name: found[name] for name in rest}, rest, 1e-10)


def test_nothing_is_left_of_nan_before_a_reset():
    (toy,) = LINEAR[0].values
    learner = compiled(toy)
    learner.etrace_evolve(np.nan * XS)
    reset = np.zeros((STEPS, BATCH), bool)
    reset[0] = True
    oracle.assert_close(gradient(learner, reset=reset), bptt(toy), 1e-10)


def test_samples_of_a_filter_are_on_the_axis_of_its_units():
    """The readout has its samples on another axis, of the same size as the units."""

    class Network(brainstate.nn.Module):
        def __init__(self, is_turned):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((INPUTS, BATCH)) / 4)
            self.out = brainstate.ParamState(jnp.linspace(-1, 1, 2 * BATCH).reshape(BATCH, 2))
            self.is_turned = is_turned

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, BATCH)))
            shape = (2, batch_size) if self.is_turned else (batch_size, 2)
            self.o = brainstate.HiddenState(jnp.zeros(shape))

        def update(self, x):
            self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w.value)
            letters = "bn,no->ob" if self.is_turned else "bn,no->bo"
            new = jnp.einsum(letters, jnp.tanh(self.h.value), self.out.value)
            self.o.value = 0.7 * self.o.value + new
            return self.o.value.T if self.is_turned else self.o.value

    reset = np.arange(STEPS * BATCH).reshape(STEPS, BATCH) % 5 == 3
    turned, plain = (
        gradient(quietly_compiled(Network(turn), "d_rtrl", XS[0], batch_size=BATCH), reset=reset)
        for turn in (True, False)
    )
    oracle.assert_close(turned, plain, 1e-10)

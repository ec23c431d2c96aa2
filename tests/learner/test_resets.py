"""A sample that starts anew is as in a sequence of its own, wherever and however it is reset.

Resets inside the sequences of random models are in ``tests/test_gradients.py``.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
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
    quietly_compiled,
    state_of,
)
from oracle import assert_close
from paths import add
from random_models import BATCH, INPUTS, STEPS, UNITS, Marked, Module, model_of

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0], RESET[3], RESET[5, 1] = True, True, True


class Drawn(brainstate.nn.Module):
    """A state that starts at random values."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((INPUTS, UNITS)))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(brainstate.random.randn(batch_size, UNITS, dtype=float))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


def test_a_seed_draws_the_initial_states():
    learners = [
        braintrace.compile(Drawn(), "d_rtrl", XS[0], batch_size=BATCH, seed=seed)
        for seed in (3, 3, 4)
    ]
    first, same, other = (learner.module.h.value for learner in learners)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


# --- what is not finite is gone

RULES = {
    "d_rtrl": {"trace_dtype": jnp.bfloat16},
    "es_d_rtrl": {"decay_or_rank": 0.8},
    "ottt": {"decay": 0.7},
    "rtrl": {},
    "snap": {"n": 1},
    "ostl_recurrent": {},
    "uoro": {},
    "kf_rtrl": {},
    "immediate": {"window": 2},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_sample_that_was_nan_is_as_if_it_had_not_been(rule):
    found, reset = [], np.zeros((STEPS, BATCH), bool)
    reset[4, 0] = True
    for bad in (0.0, np.nan):
        xs = XS.copy()
        xs[2, 0] = bad
        learner = learner_of(LSTM, rule, **RULES[rule])
        learner.etrace_evolve(xs, reset=reset, chunk_size=3)
        found.append(state_of(learner))
    assert_same(*found, 0)


# --- in a loop of the user's own


def test_a_reset_between_steps_is_one_before_the_next_step():
    expected, eager, compiled, by_cond = (learner_of(ADAPTING, which=which) for which in range(4))
    expected.etrace_evolve(XS, reset=RESET)
    initial = state_of(eager)

    def step(learner, x, done):
        learner.reset_state(where=done)
        learner(x)

    def step_by_cond(x, done):
        for sample in np.eye(BATCH, dtype=bool):
            reset = lambda sample=sample: by_cond.reset_state(where=sample)  # noqa: E731
            brainstate.transform.cond((done & sample).any(), reset, lambda: None)
        by_cond(x)

    for x, done in zip(XS, RESET, strict=True):
        step(eager, x, done)
    brainstate.transform.for_loop(lambda x, done: step(compiled, x, done), XS, RESET)
    loop = brainstate.transform.for_loop
    brainstate.transform.jit(lambda: loop(step_by_cond, jnp.asarray(XS), jnp.asarray(RESET)))()
    for learner in (eager, compiled, by_cond):
        assert_same(state_of(learner), state_of(expected))
    eager.reset_state(where=True)
    assert_same(state_of(eager), initial)


def test_a_reset_makes_states_anew_whose_buffers_a_jit_of_the_user_has_taken():
    learner = learner_of(ADAPTING)
    initial = jax.device_get(state_of(learner))
    learner.reset_state()
    for state in learner.module.states(brainstate.HiddenState).values():
        jax.tree.map(lambda leaf: leaf.delete(), state.value)  # as with `donate_argnums`
    learner.reset_state()
    assert_same(state_of(learner), initial)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_reset_heals_states_that_a_jit_of_the_user_has_initialised(vmap):
    """As BPTT beside the learner does; JAX forgets their values at its end."""
    model = random_models.model_of(LEAKY, vmap=vmap)
    learner = quietly_compiled(model, "d_rtrl", XS[0], batch_size=BATCH, vmap=vmap)
    expected = gradient(learner)

    @brainstate.transform.jit
    def bptt(xs):
        given = {} if vmap else {"batch_size": BATCH}
        brainstate.nn.init_all_states(model, **given)
        return brainstate.transform.for_loop(model, xs[:, 0] if vmap else xs)

    bptt(XS)
    learner.reset_state()
    assert_close(gradient(learner), expected, 0)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_batch_of_another_size_is_as_in_a_learner_of_that_size(vmap):
    xs = np.concatenate([XS, XS[:, :1]], axis=1)
    form = {"form": "function", "vmap": True} if vmap else {}
    larger, smaller = (
        quietly_compiled(model_of(LSTM, **form), "d_rtrl", x, batch_size=x.shape[0], vmap=vmap)
        for x in (xs[0], XS[0])
    )
    larger.reset_state(BATCH)
    found = [gradient(learner, reset=RESET) for learner in (larger, smaller)]
    assert_same(*found)
    assert_same(state_of(larger).traces, state_of(smaller).traces)


# --- states that samples share


class Shared:
    """A state for each sample, beside one that all samples share and add to."""

    sideways = False

    def params(self, dtype=np.float64):
        draw = np.random.default_rng(0).normal
        w, v = draw(size=(2, INPUTS, UNITS))
        return {"w": jnp.asarray(w), "v": jnp.asarray(v), "out": jnp.ones((UNITS, 2))}

    def start(self, batch=BATCH, dtype=np.float64):
        h = jnp.full((batch, UNITS), 0.2, dtype)
        return {"h": h.T if self.sideways else h, "theta": jnp.full(UNITS, 0.5, dtype)}

    def step(self, ops, p, states, x):
        drive, common = ops.matmul(x, p["w"]), ops.matmul(x, p["v"])
        h = 0.5 * states["h"] + (drive.T if self.sideways else drive)
        theta = 0.9 * states["theta"] + common.mean(0)
        return {"h": h, "theta": theta}, ((h.T if self.sideways else h) * theta) @ p["out"]


class Sideways(Shared):
    """The batch is the last axis of the state."""

    sideways = True


def compiled(model, **options):
    return quietly_compiled(
        Module(model, Marked(), np.float64), "d_rtrl", XS[0], batch_size=BATCH, **options
    )


@pytest.mark.parametrize("kind", [Shared, Sideways])
def test_a_shared_state_goes_on_until_all_samples_are_reset(kind):
    learner = compiled(kind())
    assert_close(gradient(learner), expected_gradient(kind(), "bptt"), 1e-9)
    learner.reset_state()
    found = gradient(learner, reset=RESET, chunk_size=3)
    by_steps, other = None, compiled(Shared())
    for t, flags in enumerate(RESET):
        other.reset_state(where=flags)
        now = gradient(other, XS[t : t + 1], TARGETS[t : t + 1])
        by_steps = now if by_steps is None else add(by_steps, now)
    assert_close(found, by_steps, 1e-9)
    theta = learner.module.theta.value
    learner.reset_state(where=np.array([True, False]))
    assert_same(learner.module.theta.value, theta)
    learner.reset_state(where=np.array([True, True]))
    assert_same(learner.module.theta.value, np.full(UNITS, 0.5))


def test_nan_in_a_shared_state_resets_all_samples():
    learner, xs = compiled(Shared()), XS[:2].copy()
    xs[1, 0] = np.nan
    with pytest.warns(braintrace.NonFiniteWarning, match="step 1"):
        learner.etrace_online(
            xs, step_fn=lambda x: (learner(x) ** 2).sum(), update_fn=lambda gradients: None
        )
    start = Shared().start()
    assert_same(learner.module.h.value, start["h"])
    assert_same(learner.module.theta.value, start["theta"])


# --- which axes are samples


class Flat(Module):
    """A State whose only axis is that of all samples and units."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.flat = brainstate.ShortTermState(jnp.zeros(batch_size * UNITS))

    def update(self, x):
        self.flat.value = 0.5 * self.flat.value + self.h0.value.ravel()
        return super().update(x)


def test_an_axis_of_samples_and_units_is_refused():
    model = Flat(LEAKY, Marked(), np.float64)
    learner = quietly_compiled(model, "d_rtrl", XS[0], batch_size=BATCH)
    with pytest.raises(braintrace.ShapeError, match="flat"):
        gradient(learner, reset=RESET)


def test_units_are_no_samples():
    model = random_models.Module(LEAKY, Marked(), np.float64)
    learner = quietly_compiled(model, "d_rtrl", XS[0, 0])
    with pytest.raises(braintrace.ShapeError, match="batch"):
        learner.reset_state(where=np.array([True] * UNITS))


def test_rtrl_needs_a_state_for_each_sample():
    model = Module(Shared(), Marked(), np.float64)
    with pytest.raises(braintrace.CompilationError, match="theta"):
        braintrace.compile(model, "rtrl", XS[0], batch_size=BATCH)


# --- a learner within a map of someone else


@pytest.mark.parametrize("rule", ["d_rtrl", "es_d_rtrl", "snap"])
def test_an_algorithm_of_one_sample_is_mapped_by_brainstate(rule):
    options = RULES[rule] if rule != "d_rtrl" else {}
    learner = learner_of(LEAKY, rule, **options)
    expected = gradient(learner)
    model = random_models.Module(LEAKY, Marked(), np.float64)
    algorithm = type(learner)(model, **options)

    def initialise(x):
        brainstate.nn.init_all_states(model)
        algorithm.compile_graph(x)

    lanes = {"axis_size": BATCH, "state_tag": "lane"}
    brainstate.transform.vmap_new_states(initialise, **lanes)(jnp.asarray(XS[0]))
    run = brainstate.nn.Vmap(algorithm, vmap_states="lane")
    weights = model.states(brainstate.ParamState)

    def loss(x, target):
        return jnp.sum((run(x) - target) ** 2)

    own = brainstate.transform.jit(brainstate.transform.grad(loss, weights))

    def of_sequence():
        steps = zip(jnp.asarray(XS), TARGETS, strict=True)
        parts = [own(x, target) for x, target in steps]
        found = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        return random_models.named(found)

    assert_close(of_sequence(), expected, 1e-9)
    states = algorithm.states("lane")
    reset = brainstate.transform.vmap(
        algorithm.reset_state, axis_size=BATCH, in_states=states, out_states=states
    )
    reset()
    assert_close(of_sequence(), expected, 1e-9)


# --- modules that may be initialised once ---------------------------------------------------------


class Once(brainstate.nn.Module):
    """A cell whose `init_state` allocates, and whose `reset_state` starts a sequence."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(-0.5, 0.5, 6).reshape(2, 3))

    def init_state(self, batch_size=None, **_):
        if hasattr(self, "h"):
            raise RuntimeError("Cannot init_state() after init_state().")
        self.h = brainstate.HiddenState(jnp.full((batch_size, 3), 0.25))

    def reset_state(self, batch_size=None, **_):
        self.h.value = jnp.full((batch_size, 3), 0.25)

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value


class WithReadout(brainstate.nn.Module):
    """Of its parts, one may be initialised once, and the other has no `reset_state`."""

    def __init__(self):
        super().__init__()
        self.cell, self.mean = Once(), Mean()

    def update(self, x):
        return self.mean(self.cell(x))


class Mean(brainstate.nn.Module):
    def init_state(self, batch_size=None, **_):
        self.m = brainstate.HiddenState(jnp.ones((batch_size, 3)))

    def update(self, h):
        self.m.value = 0.5 * self.m.value + h
        return self.m.value


def test_a_module_that_may_be_initialised_once_is_reset_afterwards():
    model, xs = WithReadout(), np.ones((4, 2, 2), np.float32)
    brainstate.nn.init_all_states(model, batch_size=2)
    model(xs[0])
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)

    def gradient(**options):
        found = learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum(), **options)
        return found["cell", "w"]

    def total(w):
        h, m, loss = jnp.full((2, 3), 0.25), jnp.ones((2, 3)), 0.0
        for x in xs:
            h = 0.8 * h + jnp.tanh(x @ w)
            m = 0.5 * m + h
            loss += (m**2).sum()
        return loss / len(xs)

    expected = jax.grad(total)(model.cell.w.value)
    np.testing.assert_allclose(gradient(), expected, rtol=1e-5)
    learner.reset_state()
    np.testing.assert_allclose(gradient(reset=np.zeros(4, bool)), expected, rtol=1e-5)
    learner.reset_state(where=np.array([True, False]))
    np.testing.assert_allclose(model.cell.h.value[0], 0.25)
    assert model.cell.h.value[1, 0] != 0.25


class Masked(Drawn):
    """Weights with a mask that is drawn for each sequence."""

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS), float))
        self.mask = brainstate.ShortTermState(brainstate.random.uniform(size=(INPUTS, UNITS)))

    def update(self, x):
        weight = self.mask.value * self.w.value
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, weight)
        return self.h.value


def test_a_stream_may_draw_weights_at_a_reset():
    """A sequence may not: its weights are computed once."""
    learner = braintrace.compile(Masked(), "d_rtrl", XS[0], batch_size=BATCH, seed=0)
    flags, before = np.arange(STEPS) == 3, learner.module.mask.value

    losses = learner.etrace_online(
        XS,
        step_fn=lambda x: (learner(x) ** 2).mean(),
        update_fn=lambda gradients: None,
        reset=flags,
    )
    drawn = learner.module.mask.value
    assert np.any(drawn != before)
    learner.reset_state()
    learner.module.mask.value = drawn
    outputs = learner.predict(XS[3:])
    np.testing.assert_allclose(losses[3:], np.mean(outputs**2, axis=(1, 2)))
    with pytest.raises(braintrace.OptionError, match="'mask', which `reset`"):
        learner.etrace_grad(XS, step_fn=lambda x: learner(x).mean(), reset=flags)


def test_weights_are_not_written_in_a_step():
    learner = braintrace.compile(Masked(), "d_rtrl", XS[0], batch_size=BATCH, seed=0)

    def step_fn(x):
        learner.module.mask.value = 0.9 * learner.module.mask.value
        return learner(x).mean()

    with pytest.raises(braintrace.OptionError, match="writes the State 'mask'"):
        learner.etrace_online(XS, step_fn=step_fn, update_fn=lambda gradients: None)

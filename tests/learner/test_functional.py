"""A learner as pure functions of its state does what its methods do, also when it is mapped."""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learners import (
    LEAKY,
    LSTM,
    TARGETS,
    XS,
    assert_same,
    expected_gradient,
    learner_of,
    state_of,
    step_of,
)
from oracle import assert_close
from random_models import BATCH, STEPS, named

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
MASK = np.array([1.0, 0.0, 1.0, 2.0, 1.0, 1.0])
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = True
OPTIMIZER = optax.sgd(0.02, momentum=0.9)


class Bench:
    """A learner with an optimizer, its functions and their options."""

    def __init__(self, model=LEAKY, rule="d_rtrl", which=0):
        self.learner = learner_of(model, rule, which)
        self.learner.init_optimizer(OPTIMIZER)
        self.pure = self.learner.functional()
        self.start = jax.tree.map(jnp.copy, self.pure.state())
        step = {"step_fn": step_of(self.learner)}
        self.chunks = {**step, "chunk_size": 4, "mask": MASK}
        self.streaming = {**step, "optimizer": OPTIMIZER, "reset": RESET}

    def grad(self, state, xs=XS, targets=TARGETS):
        return self.pure.grad(state, xs, targets, **self.chunks)

    def online(self, state, xs=XS, targets=TARGETS):
        return self.pure.online(state, xs, targets, **self.streaming)


def at(index, tree):
    return jax.tree.map(lambda leaf: leaf[index], tree)


@pytest.mark.core
def test_each_function_is_the_method():
    own = Bench()
    learner, pure, state = own.learner, own.pure, own.start
    where = np.array([True, False])
    calls = [
        (own.grad, lambda: learner.etrace_grad(XS, TARGETS, **own.chunks)),
        (own.online, lambda: learner.etrace_online(XS, TARGETS, **own.streaming)),
        (lambda s: pure.evolve(s, XS, chunk_size=3), lambda: learner.etrace_evolve(XS)),
        (lambda s: pure.predict(s, XS), lambda: learner.predict(XS)),
        (lambda s: pure.step(s, XS[0]), lambda: learner(XS[0])),
        (lambda s: (pure.reset(s, where=where), None), lambda: learner.reset_state(where=where)),
        (lambda s: (pure.reset(s), None), learner.reset_state),
    ]
    before, found = state_of(learner), []
    for function, _ in calls:
        state, result = function(state)
        settled = pure.settle(state)
        assert jax.tree.structure(settled) == jax.tree.structure(own.start)
        found.append((settled, result))
    assert_same(state_of(learner), before, 0)
    for (_, method), (state, result) in zip(calls, found, strict=True):
        assert_same(result, method())
        assert_same(state_of(learner), jax.device_get(state))


@pytest.mark.parametrize(
    ("rule", "method"), [("d_rtrl", Bench.grad), ("es_d_rtrl", Bench.online), ("snap", Bench.grad)]
)
def test_learners_that_are_mapped_learn_alone(rule, method):
    own = Bench(LSTM, rule)
    run = functools.partial(method, own)

    def scaled(seed):
        parameters = jax.tree.map(lambda w: (1 + 0.1 * seed) * w, own.start.parameters)
        return dataclasses.replace(own.start, parameters=parameters)

    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(scaled, range(3)))
    found = jax.device_get(jax.jit(jax.vmap(run))(stack))
    for seed in range(3):
        assert_same(at(seed, found), jax.device_get(run(at(seed, stack))))
    results = [jax.tree.leaves(at(seed, found[1]))[0] for seed in (0, 1)]
    assert not np.allclose(*results)


@pytest.mark.parametrize("method", [Bench.grad, Bench.online])
def test_a_scan_over_sequences_is_one_after_the_other(method):
    own = Bench(LSTM)
    run = functools.partial(method, own)
    sequences = np.stack([XS, 2 * XS]), np.stack([TARGETS, -TARGETS])
    found, results = jax.lax.scan(lambda state, now: run(state, *now), own.start, sequences)
    state = own.start
    for index in range(2):
        state, result = run(state, *at(index, sequences))
        assert_same(at(index, results), result)
    assert_same(found, own.pure.settle(state))


@pytest.mark.parametrize("window", [None, 1])
def test_the_derivative_of_steps_is_the_online_gradient(window):
    learner = learner_of(LSTM, window=window)
    pure = learner.functional()

    def loss(parameters):
        state = dataclasses.replace(pure.state(), parameters=parameters)
        return jnp.sum((jax.lax.scan(pure.step, state, XS)[1] - TARGETS) ** 2)

    found = jax.jit(jax.grad(loss))(pure.state().parameters)
    assert_close(named(found), expected_gradient(LSTM, window=window), 1e-9)


def test_lanes_that_are_mapped_in_a_gradient_have_signals_of_their_own():
    learner = learner_of(LSTM)
    pure = learner.functional()

    def gradient(sequences):
        def loss(parameters):
            state = dataclasses.replace(pure.state(), parameters=parameters)
            outputs = jax.vmap(lambda xs: jax.lax.scan(pure.step, state, xs)[1])(sequences)
            return jnp.sum((outputs - TARGETS) ** 2)

        return named(jax.jit(jax.grad(loss))(pure.state().parameters))

    alone = [gradient(xs[None]) for xs in (XS, XS[::-1])]
    assert_close(alone[0], expected_gradient(LSTM), 1e-9)
    together = gradient(np.stack([XS, XS[::-1]]))
    assert_close(together, jax.tree.map(jnp.add, *alone), 1e-9)


# --- states


def names_of(state):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


@pytest.mark.parametrize("rule", ["d_rtrl", "es_d_rtrl"])
def test_a_state_that_is_saved_by_names_goes_on_in_another_learner(rule, tmp_path):
    own, file = Bench(LSTM, rule), tmp_path / "state.npz"
    state, _ = own.online(own.start)
    names = names_of(state)
    assert len({*names}) == len(names)
    assert {"parameters/w0", "hidden/c0", "optimizer/0/trace/('w0',)"} <= {*names}
    np.savez(file, **dict(zip(names, jax.tree.leaves(state), strict=True)))
    expected = own.online(state)
    other = Bench(LSTM, rule, which=1)
    with np.load(file) as saved:
        leaves = [saved[name] for name in names_of(other.start)]
    other.pure.restore(jax.tree.unflatten(jax.tree.structure(other.start), leaves))
    losses = other.learner.etrace_online(XS, TARGETS, **other.streaming)
    assert_same(losses, expected[1])
    assert_same(state_of(other.learner), jax.device_get(expected[0]))


def changed(field, entry, value):
    def change(state):
        entries = {**getattr(state, field), entry: value}
        return dataclasses.replace(state, **{field: entries})

    return change


WRONG = {
    "a trace": (lambda s: dataclasses.replace(s, traces={}), "traces"),
    "a batch": (changed("hidden", ("h0",), jnp.zeros((3, 4))), "hidden/h0"),
    "a dtype": (changed("parameters", ("w0",), jnp.zeros((3, 4), int)), "parameters/w0"),
    "more": (changed("others", ("v",), jnp.zeros(3)), "others/v"),
    "another rule": (lambda s: dataclasses.replace(s, rule="SnAp(n=1)"), "SnAp"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_of_something_else_is_refused(name):
    own, (change, word) = Bench(), WRONG[name]
    before, wrong = state_of(own.learner), change(own.start)
    for function in (own.pure.restore, own.pure.reset, own.grad):
        with pytest.raises(braintrace.BraintraceError, match=word):
            function(wrong)
    assert_same(state_of(own.learner), before, 0)


# --- States of the user


def test_states_of_the_user_are_named_and_part_of_the_state():
    learner, count = learner_of(), brainstate.State(jnp.zeros(()))

    def update_fn(gradients):
        count.value = count.value + 1

    options = {"step_fn": step_of(learner), "update_fn": update_fn}
    unnamed = learner.functional()
    with pytest.raises(braintrace.OptionError, match="functional"):
        unnamed.online(unnamed.state(), XS, TARGETS, **options)
    pure = learner.functional(counted=count)
    state, _ = pure.online(pure.state(), XS, TARGETS, **options)
    assert state.others["counted",] == STEPS
    assert count.value == 0


class Noisy(brainstate.nn.Module):
    """A leaky unit with noise, which begins anywhere."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.count = brainstate.State(jnp.zeros(()))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(brainstate.random.normal(size=(batch_size, 4), dtype=float))

    def update(self, x):
        noise = brainstate.random.normal(size=self.h.value.shape, dtype=float)
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value) + noise
        return self.h.value


def test_two_states_have_two_names():
    learner = braintrace.compile(Noisy(), "d_rtrl", XS[0], batch_size=BATCH)
    own = brainstate.State(jnp.ones(()))
    with pytest.raises(braintrace.OptionError, match="count"):
        learner.functional(count=own).state()
    others = learner.functional(counted=own).state().others
    assert others["count",] == 0
    assert others["counted",] == 1


def test_random_numbers_are_those_of_the_state():
    brainstate.random.seed(0)
    learner = braintrace.compile(Noisy(), "d_rtrl", XS[0], batch_size=BATCH)
    pure, reset = learner.functional(), np.arange(STEPS) % 2 == 0
    start = pure.state()
    first, again = (pure.evolve(start, XS, reset=reset) for _ in range(2))
    assert_same(first, again, 0)
    assert not np.allclose(pure.evolve(first[0], XS, reset=reset)[1], first[1])
    assert_same(learner.etrace_evolve(XS, reset=reset), first[1])
    assert_same(state_of(learner), jax.device_get(first[0]))
    fresh = [pure.reset(state).hidden["h",] for state in (start, start, first[0])]
    np.testing.assert_array_equal(fresh[0], fresh[1])
    assert not np.allclose(fresh[0], fresh[2])
    pure.restore(start)
    assert_same(learner.etrace_evolve(XS, reset=reset), first[1])

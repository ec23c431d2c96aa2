"""Copies of a learner with shared parameters agree with a loop over separate learners."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn

COPIES, STEPS = 3, 5
XS = np.random.default_rng(0).normal(size=(STEPS, COPIES, 2)).astype(np.float32)
RESETS = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]], bool)


class Agent(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.value = nn.IndRNN(2, 4), brainstate.nn.Linear(4, 1)

    def update(self, x):
        return self.value(self.cell(x))[0]


def functions(params, state, x):
    h = jnp.tanh(params["a"] * state["h"] + x @ params["w"])
    return {"h": h}, h.sum()


MODELS = {
    "module": Agent,
    "function": lambda: braintrace.from_function(
        functions,
        {"a": jnp.full(4, 0.6), "w": jnp.ones((2, 4)), "count": jnp.zeros((), int)},
        {"h": jnp.zeros(4)},
    ),
}


def predict(step, x):
    value = step(x)
    return value**2, {"value": value}


@pytest.fixture(params=MODELS)
def pure(request):
    brainstate.random.seed(0)
    return braintrace.compile(MODELS[request.param](), "d_rtrl", jnp.ones(2)).functional()


def one_by_one(pure, xs, resets):
    """Gradients by path and values of one copy, from `FunctionalLearner` alone."""
    state, found = pure.state(), []
    for x, reset in zip(xs, resets, strict=True):
        state = pure.reset(state) if reset else state

        def loss(parameters, x=x, state=state):
            after, value = pure.step(dataclasses.replace(state, parameters=parameters), x)
            return value**2, (after, value)

        gradients, (state, value) = jax.grad(loss, has_aux=True)(state.parameters)
        found.append((gradients, value))
    return found


def by_path(pure, gradients):
    model = pure.algorithm.model
    return gradients if isinstance(model, Agent) else model.by_path(gradients)


def test_each_copy_is_a_learner_of_its_own(pure):
    agents = pure.batched(COPIES)
    step, parameters, memory = jax.jit(agents.grad(predict)), agents.parameters(), agents.memory()
    expected = [one_by_one(pure, XS[:, copy], RESETS[:, copy]) for copy in range(COPIES)]
    for now, (x, reset) in enumerate(zip(XS, RESETS, strict=True)):
        gradients, memory, results = step(parameters, memory, x, reset=reset)
        for copy in range(COPIES):
            wanted, value = expected[copy][now]
            got = jax.tree.map(lambda leaf, copy=copy: leaf[copy], by_path(pure, gradients))
            assert got.keys() == wanted.keys()
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, wanted)
            np.testing.assert_allclose(results["value"][copy], value, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_states_and_traces_are_the_same(pure):
    agents = pure.batched(COPIES)
    parameters, memory = agents.parameters(), agents.memory()
    _, learnt, results = agents.grad(predict)(parameters, memory, XS[0])
    ran, values = agents.run(predict)(parameters, memory, XS[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-6), (ran, values), (learnt, results)
    )
    assert not ran.parameters


def test_seeds_are_mapped_around_copies(pure):
    agents = pure.batched(COPIES)
    parameters, memory = agents.parameters(), agents.memory()
    seeds = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), parameters)
    run = jax.vmap(agents.grad(predict), in_axes=(0, None, None))
    gradients, _, _ = run(seeds, memory, XS[0])
    for index in range(2):
        own = jax.tree.map(lambda leaf, index=index: leaf[index], seeds)
        expected, _, _ = agents.grad(predict)(own, memory, XS[0])
        got = jax.tree.map(lambda leaf, index=index: leaf[index], gradients)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, expected)


def test_copies_draw_different_random_numbers():
    class Noisy(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.IndRNN(2, 4)

        def update(self, x):
            return self.cell(x + brainstate.random.normal(size=2)).sum()

    agents = braintrace.compile(Noisy(), "d_rtrl", jnp.ones(2)).functional().batched(COPIES)
    run = agents.run(lambda step, x: (0.0, step(x)))
    memory, first = run(agents.parameters(), agents.memory(), jnp.ones((COPIES, 2)))
    _, second = run(agents.parameters(), memory, jnp.ones((COPIES, 2)))
    assert len({*np.asarray(first).tolist(), *np.asarray(second).tolist()}) == 2 * COPIES


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_wrong_number_of_copies(pure, size):
    with pytest.raises(braintrace.OptionError, match="`batched`: `size`"):
        pure.batched(size)


def test_what_is_no_pair_of_value_and_results():
    learner = braintrace.compile(braintrace.nn.IndRNN(2, 1), "d_rtrl", jnp.ones(2))
    agents = learner.functional().batched(COPIES)
    differentiate = agents.grad(lambda step, x: step(x)[0])
    with pytest.raises(braintrace.OptionError, match="expected a pair"):
        differentiate(agents.parameters(), agents.memory(), jnp.ones((COPIES, 2)))


@pytest.mark.parametrize(
    ("x", "reset", "message"),
    [
        (XS[0], True, r"`reset` has shape \(\); expected 3 as its first axis"),
        (XS[0, :2], None, r"`argument 0` has shape \(2, 2\); expected 3"),
        ({"now": XS[0], "gain": 1.0}, RESETS[0], r"`argument 0\['gain'\]` has shape \(\)"),
    ],
)
def test_an_argument_without_an_entry_for_each_copy_is_named(pure, x, reset, message):
    copies = pure.batched(COPIES)
    given = copies.parameters(), copies.memory(), x
    with pytest.raises(braintrace.ShapeError, match=message):
        copies.grad(predict)(*given, reset=reset)

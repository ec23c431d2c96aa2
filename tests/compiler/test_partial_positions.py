"""States at a part of their group's positions: slices of one vector of synapses, and resets."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ
from backpropagation import through_time

import braintrace

BATCH, INPUTS, SYNAPSES, STEPS = 2, 3, 5, 6
SIZES = {"syn": SYNAPSES, "e": 3, "i": 2}
pytestmark = pytest.mark.usefixtures("float64")


def step(states, drive):
    """New states and output of one sample or of a batch; ``i`` is fed backward."""
    syn = 0.7 * states["syn"] + drive
    e = 0.8 * states["e"] + jnp.tanh(syn[..., :3])
    i = 0.6 * states["i"] + syn[..., :2:-1] - 0.2 * states["i"] ** 2
    syn = syn - 0.3 * jnp.concatenate([jnp.sin(states["e"]), jnp.flip(i, -1)], -1)
    return {"syn": syn, "e": e, "i": i}, e[..., :2] * i


class Populations(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, SYNAPSES))))

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        for name, size in SIZES.items():
            setattr(self, name, brainstate.HiddenState(jnp.full((*lead, size), 0.2)))

    def update(self, x):
        states = {name: getattr(self, name).value for name in SIZES}
        states, output = step(states, braintrace.matmul(x, self.w.value))
        for name, value in states.items():
            getattr(self, name).value = value
        return output


XS = np.random.default_rng(1).normal(size=(STEPS, BATCH, INPUTS))
RESETS = np.zeros((STEPS, BATCH), bool)
RESETS[2, 0] = RESETS[4, 1] = True


def plain_step(params, states, x, anew):
    states = {name: jnp.where(anew[:, None], 0.2, value) for name, value in states.items()}
    states, output = step(states, x @ params["w"])
    return states, jnp.sum(output**2)


def bptt(resets):
    fresh = {name: jnp.full((BATCH, size), 0.2) for name, size in SIZES.items()}
    return through_time(plain_step, {"w": Populations().w.value}, fresh, XS, resets)


def compiled(algorithm, vmap):
    """Without a warning: no part of the gradient is cut."""
    learner = braintrace.compile(Populations(), algorithm, XS[0], batch_size=BATCH, vmap=vmap)
    (group,) = learner.graph.hidden_groups
    assert group.num_positions == BATCH * SYNAPSES
    return learner


def learned(learner, xs, resets, chunk_size=4):
    learner.reset_state()
    options = {"reduction": "sum", "chunk_size": chunk_size, "reset": resets}
    found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), **options)
    return {"w": found[("w",)]}


@pytest.mark.parametrize("vmap", [True])
def test_samples_are_reset_one_by_one(vmap):
    expected = bptt(RESETS)
    assert_gradients_differ(expected, bptt(np.zeros_like(RESETS)), 1e-2)
    learner, traces = compiled("d_rtrl", vmap), []
    for chunk_size in (4, 1):
        found = learned(learner, XS, RESETS, chunk_size)
        assert_gradients_close(found, expected, 1e-10)
        traces.append(learner.algorithm.traces.value)
    for one, two in zip(*map(jax.tree.leaves, traces), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-10)


@pytest.mark.parametrize("vmap", [True])
def test_filters_are_reset_with_their_samples(vmap):
    """A sample alone, reset as a whole, has the gradient of its losses in the batch."""
    found = learned(compiled("es_d_rtrl", vmap), XS, RESETS)
    assert_gradients_close(found, jax.tree.map(np.add, *learned_alone()), 1e-10)


@functools.cache
def learned_alone():
    learner = braintrace.compile(Populations(), "es_d_rtrl", XS[0, 0])
    return [learned(learner, XS[:, b], RESETS[:, b], 3) for b in range(BATCH)]


def joined(states, drive):
    """Two states that a larger one puts side by side."""
    a = 0.7 * states["a"] + drive[:2]
    b = 0.6 * states["b"] + jnp.tanh(drive[2:])
    return {"a": a, "b": b, "p": 0.8 * states["p"] + jnp.sin(jnp.concatenate([a, b]))}


def two_vectors(states, drive):
    """Two vectors of synapses, one of them backward, that feed the same two populations."""
    p = 0.7 * states["p"] + drive
    q = 0.5 * states["q"] + jnp.sin(drive)
    backward = jnp.flip(q)
    a = 0.8 * states["a"] + p[:2] * (1 - states["a"]) + backward[:2]
    b = 0.6 * states["b"] + p[2:] - backward[2:] * states["b"]
    return {"p": p, "q": q, "a": a, "b": b}


class OneSample(brainstate.nn.Module):
    def __init__(self, step, sizes):
        super().__init__()
        self.step, self.sizes = step, sizes
        draw = np.random.default_rng(0).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, SYNAPSES))))

    def init_state(self):
        for name, size in self.sizes.items():
            setattr(self, name, brainstate.HiddenState(jnp.full(size, 0.2)))

    def update(self, x):
        states = {name: getattr(self, name).value for name in self.sizes}
        states = self.step(states, braintrace.matmul(x, self.w.value))
        for name, value in states.items():
            getattr(self, name).value = value
        return jnp.concatenate([states["a"], states["b"], states["p"]])


@pytest.mark.parametrize(
    ("step", "sizes"),
    [(joined, {"a": 2, "b": 3, "p": 5}), (two_vectors, {"p": 5, "q": 5, "a": 2, "b": 3})],
    ids=["a state at the first positions", "vectors that meet twice"],
)
def test_states_that_meet_in_parts(step, sizes):
    model, xs = OneSample(step, sizes), XS[:, 0]

    def plain_step(params, states, x):
        states = step(states, x @ params["w"])
        return states, sum(jnp.sum(states[name] ** 2) for name in "abp")

    start = {name: jnp.full(size, 0.2) for name, size in sizes.items()}
    expected = through_time(plain_step, {"w": model.w.value}, start, xs)
    learner = braintrace.compile(model, "d_rtrl", xs[0])  # no part of the gradient is cut
    (group,) = learner.graph.hidden_groups
    assert group.num_positions == SYNAPSES
    found = learner.etrace_grad(
        xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum", chunk_size=4
    )
    assert_gradients_close({"w": found[("w",)]}, expected, 1e-10)

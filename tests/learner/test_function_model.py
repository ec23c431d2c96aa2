"""Models written as functions: their gradients are pytrees like their parameters.

Models of other frameworks with their verdicts are in ``tests/support/catalogue_foreign.py``.
"""

import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from learners import (
    LEAKY,
    TARGETS,
    XS,
    assert_same,
    expected_gradient,
    learner_of,
    squared_error,
    step_of,
)
from oracle import assert_close
from random_models import BATCH, INPUTS, STEPS, UNITS, Marked

import braintrace

pytestmark = pytest.mark.usefixtures("float64")


def loss(output):
    return (output**2).sum()


def gradient(learner, xs=XS, **options):
    options = {"step_fn": lambda x: loss(learner(x)), "reduction": "sum", **options}
    return learner.etrace_grad(xs, **options)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# --- a function with everything in it


class Pair(NamedTuple):
    fast: Any
    nothing: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Carry:
    h: Any
    rest: tuple
    key: Any


OFFSET = draw(3, UNITS)


def step(params, state, x):
    """Noise, a counter, a loop within the step, constants of all kinds, a copy of a state."""
    key, now = jax.random.split(state.key)
    pair, other = state.rest
    drive = x @ params["in"] + OFFSET + 0.1 * jax.random.normal(now, state.h.shape)

    @jax.jit
    def substep(h, _):
        return jnp.tanh(drive + h @ params["layers"][0] + 0.5 * h), None

    h, _ = jax.lax.scan(substep, state.h, None, length=2)
    h = h * (params["sign"] + params["power"] - 2)
    other = {"t": other["t"] + 1, "last": [h]}
    output = h + pair.fast + params["function"](state.rest[1]["last"][0])
    return Carry(h, (Pair(0.5 * pair.fast + h, None), other), key), output


def parameters():
    return {
        "in": jnp.asarray(draw(1, INPUTS, UNITS)),
        "layers": [draw(2, UNITS, UNITS) / 4],
        "sign": np.array([1, -1, 1, -1]),
        "power": 2,
        "function": jnp.sin,
    }


def start(*batch):
    fast, last = jnp.full((*batch, UNITS), 0.2), jnp.zeros((*batch, UNITS))
    rest = Pair(fast, None), {"t": 0, "last": [last]}
    return Carry(jnp.zeros((*batch, UNITS)), rest, jax.random.key(5))


def losses_in_plain_jax(learned, key, xs, *batch):
    params = {**parameters(), "in": learned["in"], "layers": learned["layers"]}

    def one(state, x):
        state, output = step(params, state, x)
        return state, loss(output)

    return jax.lax.scan(one, dataclasses.replace(start(*batch), key=key), xs)[1]


def exact(key, xs, *batch):
    learned = {name: parameters()[name] for name in ("in", "layers")}
    return jax.jit(jax.grad(lambda p: losses_in_plain_jax(p, key, xs, *batch).sum()))(learned)


KINDS = {
    ("params", "in"): brainstate.ParamState,
    ("params", "layers", "0"): brainstate.ParamState,
    ("params", "sign"): brainstate.LongTermState,
    ("state", "h"): brainstate.HiddenState,
    ("state", "rest", "0", "fast"): brainstate.HiddenState,
    ("state", "rest", "1", "t"): brainstate.ShortTermState,
    ("state", "rest", "1", "last", "0"): brainstate.HiddenState,
    ("state", "key"): brainstate.random.RandomState,
}


def test_a_step_with_everything_in_it():
    """With a new sequence in the middle, which draws other random numbers."""
    params = parameters()
    model = braintrace.from_function(step, params, start(BATCH))
    assert {path: type(state) for path, state in model.states().items()} == KINDS
    learner = braintrace.compile(model, "rtrl", XS[0], batch_size=BATCH)
    twice = {"reset": np.arange(2 * STEPS) == STEPS, "chunk_size": 4}
    found = gradient(learner, np.concatenate([XS, XS]), **twice)
    assert jax.tree.structure(found) == jax.tree.structure(
        {name: params[name] if name in ("in", "layers") else None for name in params}
    )
    keys = [start().key]
    for _ in range(2 * STEPS):
        keys.append(jax.random.split(keys[-1])[0])
    expected = jax.tree.map(jnp.add, *(exact(keys[t], XS, BATCH) for t in (0, STEPS)))
    assert_same({name: found[name] for name in expected}, expected)
    assert model.get_state().rest[1]["t"] == STEPS
    learner.reset_state()
    assert_same(model.get_state().rest, jax.tree.map(jnp.asarray, start(BATCH).rest))
    assert jnp.array_equal(model.get_state().key, keys[-1])


def test_samples_that_are_mapped_have_keys_of_their_own():
    model = braintrace.from_function(step, parameters(), start())
    learner = braintrace.compile(model, "rtrl", XS[0], vmap=True)
    axes = Carry(0, (Pair(0, None), {"t": 0, "last": [0]}), 0)

    def total(learned):
        params = parameters() | learned
        whole, value = jax.tree.map(lambda x: jnp.stack([x] * BATCH), start()), 0.0
        key = start().key
        for x in XS:
            whole = dataclasses.replace(whole, key=jax.random.split(key, BATCH))
            whole, output = jax.vmap(step, (None, axes, 0))(params, whole, x)
            key, value = whole.key[0], value + loss(output)
        return value

    expected = jax.grad(total)({name: parameters()[name] for name in ("in", "layers")})
    found = gradient(learner)
    assert_same({name: found[name] for name in expected}, expected)
    learner.reset_state(where=np.array([False, True]))
    assert np.array_equal(model.get_state().rest[1]["t"], np.array([STEPS, 0]))


def test_a_reset_keeps_what_is_persistent():
    """A running mean and a counter; a reset of one sample as well as of all."""

    def averages(params, state, x):
        h = 0.5 * state["h"] + x @ params["w"]
        mean = 0.9 * state["norm"]["mean"] + 0.1 * jax.lax.stop_gradient(h).mean(0)
        return {"h": h, "norm": {"mean": mean, "count": state["norm"]["count"] + 1}}, h - mean

    begin = {
        "h": jnp.zeros((BATCH, 1)),
        "norm": {"mean": jnp.zeros(1), "count": jnp.zeros((), int)},
    }
    params = {"w": jnp.ones((INPUTS, 1))}
    model = braintrace.from_function(averages, params, begin, persistent=["norm"])
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
    flags = np.arange(STEPS)[:, None] == [2, 4]
    learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x)), reset=flags)
    before = model.get_state()["norm"]
    learner.reset_state()
    now = model.get_state()
    assert before["count"] == STEPS and before["mean"] != 0
    assert_same(now, {"h": begin["h"], "norm": before})
    with pytest.raises(braintrace.OptionError, match="norm/mean"):
        braintrace.from_function(averages, params, begin, persistent=["nor"])


def test_what_does_not_learn_stays():
    params = parameters()
    model = braintrace.from_function(step, params, start(BATCH))
    now = model.get_params()
    assert now["power"] == 2 and now["function"] is jnp.sin
    assert_same(now["sign"], jnp.asarray(params["sign"]))
    none = {"layers": [None], "sign": None, "power": None, "function": None}
    model.set_params({"in": now["in"] / 2, **none})
    assert_same(model.get_params()["in"], now["in"] / 2)
    assert_same(model.get_params()["layers"], now["layers"])


# --- every way to a gradient


@pytest.fixture
def learner():
    return learner_of(LEAKY, form="function")


@pytest.mark.core
def test_every_way_to_a_gradient_gives_the_pytree(learner):
    """`etrace_grad` is among the forms of ``tests/test_gradients.py``."""
    model, pure = learner.module, learner.functional()
    before = jax.tree.map(jnp.copy, pure.state())

    def total():
        losses = brainstate.transform.for_loop(step_of(learner), jnp.asarray(XS), TARGETS)
        return losses.sum()

    states = model.as_params(learner.param_states)
    assert model.by_path(states) == dict(learner.param_states)
    assert_close(brainstate.transform.grad(total, states)(), expected_gradient(), 1e-9)

    def of_steps(params):
        state = dataclasses.replace(before, parameters=model.by_path(params))
        return squared_error(jax.lax.scan(pure.step, state, XS)[1], TARGETS)

    assert_close(jax.grad(of_steps)(model.get_params()), expected_gradient(), 1e-9)


def test_a_stream_updates_the_pytree(learner):
    model = learner.module
    before = model.get_params()

    def descend(gradients):
        params = jax.tree.map(lambda p, g: p - 0.01 * g, model.get_params(), gradients)
        model.set_params(params)

    learner.etrace_online(XS, TARGETS, step_fn=step_of(learner), update_fn=descend)
    after = model.get_params()
    assert all(np.any(after[name] != before[name]) for name in before)
    assert_same(model.as_params(learner.functional().state().parameters), after)


def test_a_state_by_a_function_has_any_batch(learner):
    xs = np.concatenate([XS, XS[:, :1]], axis=1)
    learner.reset_state(3)
    found = learner.etrace_grad(xs, step_fn=lambda x: learner(x)[:2].sum(), reduction="sum")
    learner.reset_state(BATCH)
    expected = learner.etrace_grad(XS, step_fn=lambda x: learner(x).sum(), reduction="sum")
    assert_close(found, expected, 1e-9)
    learner.reset_state(BATCH)
    assert learner.module.get_state()["h0"].shape == (BATCH, UNITS)


# --- copies


def leaky(params, state, x):
    return LEAKY.step(Marked(), params, state, x)


def test_copies_have_parameters_of_their_own(learner):
    model = learner.module
    before = model.get_params()
    other = braintrace.from_function(leaky, before, LEAKY.start)
    copied = copy.deepcopy(learner)
    model.set_params(jax.tree.map(jnp.ones_like, before))
    for kept in (other, copied.module):
        assert_same(kept.get_params(), before)
    found = copied.etrace_grad(XS, TARGETS, step_fn=step_of(copied), reduction="sum")
    model.set_params(before)
    assert_close(found, expected_gradient(), 1e-9)


def test_a_pickled_model_goes_on_as_it_would_have():
    model = braintrace.from_function(step, {**parameters(), "function": abs}, start(BATCH))
    model(XS[0])
    copied = pickle.loads(pickle.dumps(model))
    for x in XS[1:3]:
        assert_same(copied(x), model(x), 0)
    by_function = braintrace.from_function(leaky, LEAKY.params(), LEAKY.start)
    copied = pickle.loads(pickle.dumps(by_function))
    for each in (copied, by_function):
        each.init_state(BATCH)
    assert_same(copied(XS[0]), by_function(XS[0]), 0)


def test_arrays_that_are_given_may_change_or_be_donated():
    params, given = jax.tree.map(np.array, LEAKY.params()), jax.tree.map(np.array, LEAKY.start(2))
    model = braintrace.from_function(jax.jit(leaky, donate_argnums=1), params, given)
    for array in (*params.values(), *given.values()):
        array[...] = 9.0
    model.init_state()
    assert_same(model.get_state(), LEAKY.start(BATCH))
    assert_same(model.get_params(), LEAKY.params())
    outputs = []
    for begin in (lambda: None, model.init_state, model.reset_state):
        begin()
        outputs.append([model(x) for x in XS])
    assert_same(outputs[1:], outputs[:1] * 2, 0)


# --- leaves


def test_leaves_have_units():
    params = {"w": LEAKY.params()["w0"] * u.mA, "tau": 10.0 * u.ms}

    def membrane(params, v, x):
        current = u.math.dot(x, params["w"])
        v = v + (1.0 * u.ms) / params["tau"] * (current * u.ohm - v)
        return v, v / u.mV

    def plain(params, v, x):
        v = v + (x @ params["w"] - v) / params["tau"]
        return v, v

    model = braintrace.from_function(membrane, params, jnp.zeros((BATCH, UNITS)) * u.mV)
    other = braintrace.from_function(
        plain, {"w": LEAKY.params()["w0"], "tau": jnp.asarray(10.0)}, jnp.zeros((BATCH, UNITS))
    )
    found, expected = (
        gradient(braintrace.compile(each, "rtrl", XS[0], batch_size=BATCH))
        for each in (model, other)
    )
    assert u.get_unit(found["w"]) == u.mA and u.get_unit(model.get_state()) == u.mV
    assert_same({name: u.get_mantissa(value) for name, value in found.items()}, dict(expected))


def test_names_of_leaves_are_told_apart():
    """What a box calls its only content is no part of a path."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: Any

    class Twins(list):
        pass

    one_name = jax.tree_util.DictKey("x")
    jax.tree_util.register_pytree_with_keys(
        Twins, lambda t: ([(one_name, leaf) for leaf in t], None), lambda _, leaves: Twins(leaves)
    )
    params = {"w": Box(jnp.ones(2)), "twins": Twins([jnp.zeros(2), jnp.ones(2)])}
    model = braintrace.from_function(leaky, params, LEAKY.start)
    names = [("params", "twins", "x", "0"), ("params", "twins", "x", "1"), ("params", "w")]
    assert [*model.states()] == names
    assert_same(model.get_params()["twins"], params["twins"])


# --- other frameworks


def test_a_network_of_flax_carries_what_is_no_parameter():
    """Dropout, whose counters are carried along, with the noise of the same steps."""
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
            self.cell = nnx.GRUCell(INPUTS, UNITS, **options)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.readout = nnx.Linear(UNITS, 2, **options)

        def __call__(self, h, x):
            h, output = self.cell(h, x)
            return h, self.readout(self.dropout(output))

    network = Network(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(network, nnx.Param, ...)

    def step(params, state, x):
        h, rest = state
        network = nnx.merge(graphdef, params, rest)
        h, output = network(h, x)
        return (h, nnx.state(network, nnx.Not(nnx.Param))), output

    first = jnp.zeros((BATCH, UNITS)), rest

    def total(params):
        outputs = jax.lax.scan(lambda state, x: step(params, state, x), first, XS)[1]
        return loss(outputs)

    model = braintrace.from_function(step, params, first)
    learner = braintrace.compile(model, "rtrl", XS[0], batch_size=BATCH)
    found = gradient(learner)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert_same(found, jax.jit(jax.grad(total))(params))

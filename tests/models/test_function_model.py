"""Models written as pure functions: their gradients are those of `jax.grad`, as pytrees."""

import copy
import dataclasses
import functools
import pickle
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close, assert_same_bits

import braintrace

BATCH, INPUTS, UNITS, STEPS = 3, 2, 4, 6
pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def inputs():
    return jax.device_put(draw(0, STEPS, BATCH, INPUTS))


def loss(output):
    return (output**2).sum()


def bptt(step, params, state, xs):
    """Gradient of the summed losses, the state at the end, and the losses."""

    @jax.jit
    def differentiate(learning):
        def sequence_loss(learning):
            whole = jax.tree.map(
                lambda new, old: old if new is None else new,
                learning,
                params,
                is_leaf=lambda leaf: leaf is None,
            )

            def one_step(state, x):
                state, output = step(whole, state, x)
                return state, loss(output)

            end, losses = jax.lax.scan(one_step, state, xs)
            return losses.sum(), (end, losses)

        return jax.grad(sequence_loss, has_aux=True)(learning)

    return differentiate(jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, params))


def is_floating(leaf):
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def gradient(learner, xs, **options):
    return learner.etrace_grad(
        xs, step_fn=lambda x: loss(learner(x)), reduction="sum", **{"chunk_size": 3, **options}
    )


# --- a function with everything in it -----------------------------------------------------


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
        "in": jax.device_put(draw(1, INPUTS, UNITS)),
        "layers": [draw(2, UNITS, UNITS) / 4],
        "sign": np.array([1, -1, 1, -1]),
        "power": 2,
        "function": jnp.sin,
    }


def start(*batch):
    rest = (
        Pair(jax.device_put(np.full((*batch, UNITS), 0.2)), None),
        {"t": 0, "last": [jax.device_put(np.zeros((*batch, UNITS)))]},
    )
    return Carry(jax.device_put(np.zeros((*batch, UNITS))), rest, jax.random.key(5))


PATHS = {
    ("params", "in"): brainstate.ParamState,
    ("params", "layers", "0"): brainstate.ParamState,
    ("params", "sign"): brainstate.LongTermState,
    ("state", "h"): brainstate.HiddenState,
    ("state", "rest", "0", "fast"): brainstate.HiddenState,
    ("state", "rest", "1", "t"): brainstate.ShortTermState,
    ("state", "rest", "1", "last", "0"): brainstate.HiddenState,
    ("state", "key"): brainstate.ShortTermState,
}


def test_a_step_with_everything_in_it():
    params, xs = parameters(), inputs()
    model = braintrace.from_function(step, params, start(BATCH))
    assert {path: type(state) for path, state in model.states().items()} == PATHS
    learner = braintrace.compile(model, "rtrl", xs[0], batch_size=BATCH)
    for name in ("params/layers/0", "state/rest/0/fast"):
        assert name in str(learner.report())

    # With a new sequence in the middle: what is no number starts anew as well.
    expected, (end, losses) = bptt(step, params, start(BATCH), xs)
    found, values = gradient(
        learner,
        np.concatenate([xs, xs]),
        reset=np.arange(2 * STEPS) == STEPS,
        return_value=True,
        chunk_size=4,  # the new sequence begins within the second of three
    )
    assert_gradients_close(found, jax.tree.map(lambda g: 2 * g, expected), 1e-10)
    np.testing.assert_allclose(values, np.concatenate([losses, losses]))
    state = model.get_state()
    assert_same_bits(jax.tree.map(jnp.shape, state), jax.tree.map(jnp.shape, end))
    assert jnp.array_equal(state.key, end.key) and state.rest[1]["t"] == STEPS

    learner.reset_state()
    state = model.get_state()
    assert_same_bits(state.rest, jax.tree.map(jnp.asarray, start(BATCH).rest))
    assert jnp.array_equal(state.key, start().key)


def test_samples_that_are_mapped_have_random_keys_of_their_own():
    params, xs = parameters(), inputs()
    model = braintrace.from_function(step, params, start())
    learner = braintrace.compile(model, "rtrl", xs[0], vmap=True)
    keys = jax.random.split(start().key, BATCH)

    def of_sample(key, xs):
        return bptt(step, params, dataclasses.replace(start(), key=key), xs)[0]

    of_samples = jax.vmap(of_sample, in_axes=(0, 1))(keys, xs)
    found = gradient(learner, xs, chunk_size=STEPS)
    assert_gradients_close(found, jax.tree.map(lambda g: np.sum(g, 0), of_samples), 1e-10)

    learner.reset_state(where=np.array([False, True, False]))
    assert np.array_equal(model.get_state().rest[1]["t"], np.array([STEPS, 0, STEPS]))
    assert jnp.array_equal(model.get_state().key[1], keys[1])


# --- every way to a gradient --------------------------------------------------------------


def leaky(params, h, x):
    """ETP operations in a plain function: D_RTRL is exact."""
    decay = braintrace.element_wise(params["decay"], jax.nn.sigmoid)
    h = decay * h + braintrace.matmul(x, params["w"])
    return h, jnp.tanh(h)


LEAKY = {"w": draw(1, INPUTS, UNITS), "decay": draw(2, UNITS)}


def zeros(batch_size):
    return jnp.zeros((batch_size, UNITS))


@functools.cache
def leaky_learner():
    model = braintrace.from_function(leaky, jax.tree.map(jnp.asarray, LEAKY), zeros)
    return braintrace.compile(model, "d_rtrl", inputs()[0], batch_size=BATCH)


@pytest.fixture
def learner():
    found = leaky_learner()
    found.algorithm.model.set_params(LEAKY)
    found.reset_state(BATCH)
    return found


def expected_gradient(xs):
    return bptt(leaky, LEAKY, zeros(BATCH), xs)[0]


@pytest.mark.core
def test_every_way_to_a_gradient_gives_the_pytree(learner):
    model, xs = learner.algorithm.model, inputs()
    expected = expected_gradient(xs)
    before = learner.functional().state()

    assert_gradients_close(gradient(learner, xs), expected, 1e-12, "etrace_grad")
    functional = learner.functional()
    functional.restore(before)

    def whole_loss():
        return brainstate.transform.for_loop(lambda x: loss(learner(x)), xs).sum()

    states = model.as_params(model.states(brainstate.ParamState))
    assert model.by_path(states) == dict(model.states(brainstate.ParamState))
    found = brainstate.transform.grad(whole_loss, states)()
    assert_gradients_close(found, expected, 1e-12, "one's own loop")

    def loss_of_steps(params):
        def one_step(state, x):
            state, output = functional.step(state, x)
            return state, loss(output)

        state = dataclasses.replace(before, parameters=model.by_path(params))
        return jax.lax.scan(one_step, state, xs)[1].sum()

    found = jax.grad(loss_of_steps)(model.get_params())
    assert_gradients_close(found, expected, 1e-12, "functional.step")


def test_a_stream_updates_the_pytree(learner):
    model, xs = learner.algorithm.model, inputs()

    def descend(gradients):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, model.get_params(), gradients)
        model.set_params(params)

    stream = np.concatenate([xs] * 4)
    losses = learner.etrace_online(stream, step_fn=lambda x: loss(learner(x)), update_fn=descend)
    losses = np.asarray(losses)
    assert losses[-STEPS:].sum() < 0.5 * losses[:STEPS].sum()
    assert not np.array_equal(model.get_params()["decay"], LEAKY["decay"])
    state = learner.functional().state()
    assert_same_bits(model.as_params(state.parameters), model.get_params())


def test_a_state_by_a_function_has_any_batch(learner):
    xs = np.concatenate([inputs(), 2 * np.asarray(inputs())], axis=1)
    learner.reset_state(2 * BATCH)
    found = gradient(learner, xs)
    expected = bptt(leaky, LEAKY, zeros(2 * BATCH), xs)[0]
    assert_gradients_close(found, expected, 1e-12)
    learner.reset_state(BATCH)
    assert learner.algorithm.model.get_state().shape == (BATCH, UNITS)


def test_gradient_check_takes_it(learner):
    model, xs = learner.algorithm.model, inputs()
    check = braintrace.gradient_check(
        model,
        "es_d_rtrl",
        xs,
        xs,
        lambda output, x: loss(output),
        decay_or_rank=0.5,
        batch_size=BATCH,
    )
    assert [row.parameter for row in check.rows[:2]] == ["params/decay", "params/w"]
    assert check.rows[-1].deviation > 1e-3


def test_learners_of_one_function_have_parameters_of_their_own(learner):
    model = learner.algorithm.model
    other = braintrace.from_function(leaky, model.get_params(), zeros)
    copied = copy.deepcopy(learner)
    model.set_params(jax.tree.map(jnp.ones_like, model.get_params()))
    for kept in (other, copied.algorithm.model):
        assert_same_bits(kept.get_params(), jax.tree.map(jnp.asarray, LEAKY))
    found = gradient(copied, inputs())
    assert_gradients_close(found, expected_gradient(inputs()), 1e-12)


def test_a_model_that_has_been_pickled_goes_on_as_it_would_have():
    def of_numbers(change, params):
        return jax.tree.map(lambda p: change(p) if is_floating(p) else None, params)

    params = {**parameters(), "function": abs}
    fixed, by_function = (
        braintrace.from_function(step, params, start(BATCH)),
        braintrace.from_function(leaky, LEAKY, zeros),  # its state is there after `init_state`
    )
    fixed(inputs()[0])
    fixed.set_params(of_numbers(lambda p: p / 2, params))
    for model in (fixed, by_function):
        copied = pickle.loads(pickle.dumps(model))
        assert copied.states().keys() == model.states().keys()
        if model is by_function:
            copied.init_state(BATCH)
            model.init_state(BATCH)
        for x in inputs()[1:3]:
            assert_same_bits(copied(x), model(x))
        model.set_params(of_numbers(lambda p: p + 1, model.get_params()))
        assert not np.array_equal(copied(inputs()[3]), model(inputs()[3]))


# --- leaves of all kinds ------------------------------------------------------------------


def test_what_does_not_learn_stays_and_has_no_gradient():
    params = parameters()
    model = braintrace.from_function(step, params, start(BATCH))
    now = model.get_params()
    assert now["power"] == 2 and now["function"] is jnp.sin
    assert_same_bits(now["sign"], jnp.asarray(params["sign"]))
    halved = {"in": now["in"] / 2, "layers": [None], "sign": None, "power": None, "function": None}
    model.set_params(halved)
    assert_same_bits(model.get_params()["in"], now["in"] / 2)
    assert_same_bits(model.get_params()["layers"], now["layers"])
    model.set_params(now)
    assert_same_bits(model.get_params()["in"], now["in"])


def test_a_step_may_take_the_buffers_of_its_state():
    given = jnp.ones((BATCH, UNITS))
    model = braintrace.from_function(jax.jit(leaky, donate_argnums=1), LEAKY, given)
    outputs = []
    for begin in (lambda: None, model.init_state, model.reset_state):
        begin()
        outputs.append([model(x) for x in inputs()])
    assert_same_bits(outputs[1:], outputs[:1] * 2)
    assert_same_bits(given, jnp.ones((BATCH, UNITS)))


def test_arrays_that_are_given_may_change_afterwards():
    params, given = jax.tree.map(np.array, LEAKY), np.zeros((BATCH, UNITS))
    model = braintrace.from_function(leaky, params, given)
    for array in (*params.values(), given):
        array[...] = 9.0
    model.init_state()
    assert not model.get_state().any()
    assert_same_bits(model.get_params(), jax.tree.map(jnp.asarray, LEAKY))


def test_leaves_have_units():
    params = {"w": LEAKY["w"] * u.mA, "tau": 10.0 * u.ms}

    def membrane(params, v, x):
        current = u.math.dot(x, params["w"])
        v = v + (1.0 * u.ms) / params["tau"] * (current * u.ohm - v)
        return v, v / u.mV

    def plain(params, v, x):
        v = v + (x @ params["w"] - v) / params["tau"]
        return v, v

    model = braintrace.from_function(membrane, params, zeros(BATCH) * u.mV)
    learner = braintrace.compile(model, "rtrl", inputs()[0], batch_size=BATCH)
    found = gradient(learner, inputs())
    assert u.get_unit(found["w"]) == u.mA and u.get_unit(model.get_state()) == u.mV
    mantissas = {name: u.get_mantissa(value) for name, value in found.items()}
    same = {"w": LEAKY["w"], "tau": jnp.asarray(10.0)}
    assert_gradients_close(mantissas, bptt(plain, same, zeros(BATCH), inputs())[0], 1e-10)


def test_what_a_box_calls_its_content_is_no_part_of_a_path():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        value: Any

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Bounded:
        value: Any
        low: Any

    params = {"w": Box(LEAKY["w"]), "clipped": Bounded(LEAKY["decay"], 0.0)}
    model = braintrace.from_function(leaky, params, zeros)
    assert list(model.states()) == [("params", "clipped", "value"), ("params", "w")]


def test_leaves_that_a_class_gives_one_name_to_stay_apart():
    class Twins(list):
        pass

    one_name = jax.tree_util.DictKey("x")
    jax.tree_util.register_pytree_with_keys(
        Twins, lambda t: ([(one_name, leaf) for leaf in t], None), lambda _, leaves: Twins(leaves)
    )
    params = Twins([jnp.zeros(2), jnp.ones(2)])
    model = braintrace.from_function(leaky, params, zeros)
    assert list(model.states()) == [("params", "x", "0"), ("params", "x", "1")]
    assert_same_bits(model.get_params(), params)

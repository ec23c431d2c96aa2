"""Traces of gradients are a loop over environments, and sum up to the λ-returns of episodes."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from learners import assert_same
from oracle import assert_close

import braintrace

STEPS, BATCH, DECAY, GAMMA = 6, 3, 0.8, 0.9
SHAPES = {"w": (2, 3), "b": (3,), "scale": ()}
CREDIT = braintrace.TDTrace(DECAY)
# Two episodes end within the sequence, one of them twice in a row.
DISCOUNTS = np.full((STEPS, BATCH), GAMMA, np.float32)
DISCOUNTS[0], DISCOUNTS[3, 1], DISCOUNTS[2:4, 2] = 0.0, 0.0, 0.0


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


GRADIENTS = {name: draw(i, STEPS, BATCH, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
ERRORS = draw(9, STEPS, BATCH)
PARAMETERS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def plain_loop():
    """Traces ``(steps, batch, ...)`` and descents ``(steps, ...)`` of every leaf, by loops."""
    traces = {name: np.zeros_like(leaf) for name, leaf in GRADIENTS.items()}
    descents = {name: np.zeros((STEPS, *shape)) for name, shape in SHAPES.items()}
    for name, gradients in GRADIENTS.items():
        for b in range(BATCH):
            z = np.zeros(SHAPES[name])
            for t in range(STEPS):
                z = DISCOUNTS[t, b] * DECAY * z + gradients[t, b]
                traces[name][t, b] = z
                descents[name][t] -= ERRORS[t, b] * z / BATCH
    return traces, descents


def step(trace, now):
    gradients, discount, errors = now
    trace = CREDIT.update(trace, gradients, discount)
    return trace, (trace, CREDIT.gradients(trace, errors))


def by_scan(sequences):
    scan = jax.jit(lambda given: jax.lax.scan(step, CREDIT.init(PARAMETERS, BATCH), given)[1])
    return scan(sequences)


def by_map(sequences):
    """A trace without an axis of environments, which somebody else maps."""
    alone = jax.vmap(
        lambda given: jax.lax.scan(step, CREDIT.init(PARAMETERS), given)[1], in_axes=1, out_axes=1
    )
    traces, descents = jax.jit(alone)(sequences)
    return traces, jax.tree.map(lambda leaf: leaf.mean(1), descents)


@pytest.mark.parametrize("run", [by_scan, by_map])
def test_equals_a_plain_loop(run):
    assert_same(run((GRADIENTS, DISCOUNTS, ERRORS)), plain_loop(), 1e-5)


def test_an_episode_leaves_nothing_behind():
    """Also of what is not finite, and for one discount for all environments."""
    gradients = jnp.asarray(GRADIENTS["b"][1])
    for ends, bad in ((np.zeros(BATCH, np.float32), jnp.nan), (0.0, jnp.inf)):
        trace = jnp.full_like(gradients, bad)
        np.testing.assert_array_equal(CREDIT.update(trace, gradients, ends), gradients)
        assert not np.isfinite(CREDIT.update(trace, gradients, GAMMA)).any()


def test_dtypes_are_those_of_the_trace():
    """Whatever those of discounts and errors."""
    trace = CREDIT.init({"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}, BATCH)
    gradients = {"w": jnp.ones((BATCH, 2), jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"):
        for _ in range(2):
            trace = CREDIT.update(trace, gradients, jnp.float32([GAMMA, GAMMA, 0.0]))
        descent = CREDIT.gradients(trace, jnp.float32([1.0, 1.0, 0.0]))
    assert trace["w"].dtype == descent["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(trace["w"][:, 0]), [1.72, 1.72, 1.0], rtol=1e-2)
    np.testing.assert_allclose(np.float32(descent["w"]), -2 * 1.72 / BATCH, rtol=1e-2)


def test_units_are_those_of_the_parameters():
    parameters = {"w": jnp.ones(2) * u.mV}
    trace = CREDIT.init(parameters, BATCH)
    trace = CREDIT.update(trace, {"w": jnp.ones((BATCH, 2)) * u.mV}, GAMMA)
    descent = CREDIT.gradients(trace, jnp.ones(BATCH))
    assert jax.tree.structure(descent) == jax.tree.structure(parameters)
    np.testing.assert_allclose(descent["w"] / u.mV, -1.0)


class Critic(brainstate.nn.Module):
    """Leaky units, read out as one value; written for one environment."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(draw(20, 2, 4)))
        self.out = brainstate.ParamState(jnp.asarray(draw(21, 4)))

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return jnp.dot(self.h.value, self.out.value)


def values_of(parameters, xs, starts):
    """The values of one environment, in plain JAX: a state that starts anew with every episode."""

    def advance(h, now):
        x, is_start = now
        h = jnp.where(is_start, 0.0, h)
        h = 0.8 * h + jnp.tanh(jnp.dot(x, parameters["w",]))
        return h, jnp.dot(h, parameters["out",])

    return jax.lax.scan(advance, jnp.zeros(4), (xs, starts))[1]


def lambda_returns(rewards, discounts, values):
    """The forward view: ``G_t = r + γ ((1 - λ) v' + λ G')``, back from the last value."""
    found, after = np.zeros_like(rewards), values[-1]
    for t in reversed(range(len(rewards))):
        after = rewards[t] + discounts[t] * ((1 - DECAY) * values[t + 1] + DECAY * after)
        found[t] = after
    return found


def test_sums_up_to_the_lambda_returns_of_episodes():
    """Traces of the rule within those of gradients: BPTT of values towards their λ-returns."""
    xs, rewards, ends = draw(30, STEPS + 1, BATCH, 2), draw(31, STEPS, BATCH), DISCOUNTS == 0
    starts = np.concatenate([ends, np.zeros((1, BATCH), bool)])
    discounts = np.where(starts[1:], 0.0, GAMMA).astype(np.float32)
    learner = braintrace.compile(Critic(), "d_rtrl", jnp.zeros(2))
    pure = learner.functional()
    parameters = pure.state().parameters

    def evaluate(parameters, state, x, is_start):
        state = pure.reset(dataclasses.replace(state, parameters=parameters), where=is_start)
        state, value = pure.step(state, x)
        return value, (state, value)

    def online(carry, now):
        states, trace, value = carry
        x, is_start, reward, discount, after = now
        each = jax.vmap(jax.grad(evaluate, has_aux=True), in_axes=(None, 0, 0, 0))
        gradients, (states, value) = each(parameters, states, x, is_start)
        trace = CREDIT.update(trace, gradients, jnp.where(is_start, 0.0, GAMMA))
        errors = reward + discount * after - value
        return (states, trace, value), CREDIT.gradients(trace, errors)

    per_environment = jax.vmap(values_of, in_axes=(None, 1, 1), out_axes=1)
    values = np.asarray(per_environment(parameters, xs, starts))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * BATCH), pure.state())
    carry = states, CREDIT.init(parameters, BATCH), jnp.zeros(BATCH)
    given = xs[:-1], starts[:-1], rewards, discounts, values[1:]
    _, descents = jax.lax.scan(online, carry, given)
    found = jax.tree.map(lambda leaf: leaf.sum(0), descents)

    targets = np.stack(
        [lambda_returns(rewards[:, b], discounts[:, b], values[:, b]) for b in range(BATCH)], axis=1
    )

    def loss(parameters):
        off = targets - per_environment(parameters, xs, starts)[:-1]
        return 0.5 * jnp.sum(off**2) / BATCH

    assert_close(found, jax.grad(loss)(parameters), 1e-4)


def test_one_gradient_for_all_environments_is_refused():
    trace = {"w": jnp.ones((BATCH, 4))}
    with pytest.raises(TypeError, match="add"):
        CREDIT.update(trace, {"w": jnp.ones(4)}, GAMMA)

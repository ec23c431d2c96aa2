"""Sums, filters and maxima keep their digits, with all optimisations of the compiler."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

import braintrace

pytestmark = pytest.mark.usefixtures("optimised")


class Leaky(brainstate.nn.Module):
    """A layer with a leak."""

    def __init__(self, leak, dtype):
        super().__init__()
        self.leak, self.dtype = leak, dtype
        self.w = brainstate.ParamState(jnp.ones((2, 3), dtype))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3), self.dtype))

    def update(self, x):
        leak = jnp.asarray(self.leak, self.dtype)
        self.h.value = leak * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@functools.cache
def gradient(leak, dtype, xs, decay, scale=1.0):
    xs = np.reshape(xs, (-1, 1, 2)).astype(dtype)
    options = {"batch_size": 1, "decay_or_rank": decay}
    learner = braintrace.compile(Leaky(leak, dtype), "es_d_rtrl", xs[0], **options)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: scale * learner(x).sum(), reduction="sum", chunk_size=len(xs)
    )
    return np.float64(found[("w",)]) / scale


def test_sums_over_time_in_half_precision_add_up():
    found = gradient(0.0, jnp.bfloat16, 1200 * (1.0,), decay=0.0)
    np.testing.assert_array_equal(found, 600)


@pytest.mark.parametrize(("decay", "dtype"), [(0.9999, jnp.float16), (0.99999999, jnp.float32)])
def test_slow_filters_are_corrected(decay, dtype):
    """In half precision the correction of the first step overflows; a decay rounds to one."""
    xs = tuple(np.sin(np.arange(10.0)))
    expected = gradient(0.9, jnp.float32, xs, 0.9999)
    found = gradient(0.9, dtype, xs, decay, scale=1024.0)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


# --- maxima on the way into a state ---------------------------------------------------------------

INPUTS, HIDDEN, PIECES, STEPS, BATCH = 3, 4, 3, 100, 2


def pairwise(values, axis):
    first, second, third = jnp.moveaxis(values, axis, 0)
    return jnp.maximum(jnp.minimum(first, second), third)


def at(index_of):
    """The value at an index: its derivative does not ask which of two rounded values is equal."""

    def selected(values, axis):
        index = index_of(values, axis=axis, keepdims=True)
        return jnp.take_along_axis(values, index, axis).squeeze(axis)

    return selected


def pairwise_selected(values, axis):
    first, second, third = jnp.moveaxis(values, axis, 0)
    lower = jnp.where(first < second, first, second)
    return jnp.where(lower > third, lower, third)


REDUCTIONS = {"max": jnp.max, "min": jnp.min, "pairwise": pairwise}
SELECTIONS = {"max": at(jnp.argmax), "min": at(jnp.argmin), "pairwise": pairwise_selected}


class Layer(brainstate.nn.Module):
    """Every unit follows the extreme one of three candidates, each with products and sums."""

    def __init__(self, reduce):
        super().__init__()
        weight = np.random.default_rng(1).normal(size=(INPUTS, HIDDEN * PIECES)) / 2
        self.w = brainstate.ParamState(jnp.asarray(weight, jnp.float32))
        self.reduce = reduce

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.full((batch_size, HIDDEN), 0.1))

    def update(self, x):
        y = braintrace.matmul(x, self.w.value).reshape(-1, HIDDEN, PIECES)
        self.h.value = self.reduce(0.8 * self.h.value[..., None] + 0.3 * jnp.sin(y), axis=-1)
        return self.h.value


class Extremes(brainstate.nn.Module):
    """A layer for each of the reductions, side by side, so that one program has them all."""

    def __init__(self, reductions):
        super().__init__()
        for name, reduce in reductions.items():
            setattr(self, name, Layer(reduce))

    def update(self, x):
        return jnp.stack([getattr(self, name)(x) for name in REDUCTIONS])


def data():
    return jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS)), jnp.float32)


def loss(model):
    return lambda x: (model(x) ** 2).sum()


def named(gradients):
    return {"/".join(path): gradient for path, gradient in gradients.items()}


def of_squares(model, xs):
    """Backpropagate the sum of all squared outputs through the model's own loop."""
    brainstate.nn.init_all_states(model, batch_size=BATCH)

    def total():
        return (brainstate.transform.for_loop(model, xs) ** 2).sum()

    weights = model.states(brainstate.ParamState)
    return brainstate.transform.grad(total, weights, check_states=False)()


@pytest.mark.core
def test_maxima_equal_backpropagation():
    model, plain = Extremes(REDUCTIONS), Extremes(SELECTIONS)
    expected = of_squares(plain, data())
    learner = braintrace.compile(model, "d_rtrl", data()[0], batch_size=BATCH)
    step = loss(learner)
    for chunk_size in (1, "auto"):
        learner.reset_state(BATCH)
        options = {"step_fn": step, "reduction": "sum", "chunk_size": chunk_size}
        found = learner.etrace_grad(data(), **options)
        assert_close(named(found), named(expected), 1e-5, f"chunks of {chunk_size}")
    learner.reset_state(BATCH)
    gradient = brainstate.transform.grad(step, model.states(brainstate.ParamState))
    found = brainstate.transform.for_loop(gradient, data())
    found = jax.tree.map(lambda leaf: leaf.sum(0), found)
    assert_close(named(found), named(expected), 1e-5, "step by step")


def test_equal_candidates_share_the_derivative():
    """As in JAX: a maximum over spikes, of which several are ones."""

    class Pooled(Layer):
        def update(self, x):
            y = braintrace.matmul(x, self.w.value).reshape(-1, HIDDEN, PIECES)
            several = jnp.stack([y, y, jnp.abs(y)], axis=-1)
            self.h.value = 0.8 * self.h.value + jnp.max(several, axis=(-1, -2))
            return self.h.value

    model, plain = Pooled(None), Pooled(None)
    expected = of_squares(plain, data()[:5])
    learner = braintrace.compile(model, "d_rtrl", data()[0], batch_size=BATCH)
    found = learner.etrace_grad(data()[:5], step_fn=loss(learner), reduction="sum", chunk_size=2)
    assert_close(named(found), named(expected), 1e-5)

"""Sums and filters over many steps keep their digits in single and half precision."""

import functools

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

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

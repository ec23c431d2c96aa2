"""Surrogate gradients: spikes forward, the formulas of the literature backward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.nn import surrogate


def gaussian_cdf(x):
    return np.array([math.erf(value / math.sqrt(2)) / 2 + 0.5 for value in np.ravel(x)])


X = np.array([-1.7, -0.6, -0.1, 0.0, 0.05, 0.4, 0.99, 2.5])

# Where a surrogate is the derivative of a smooth step, that step is differentiated numerically.
SMOOTH_STEPS = {
    "sigmoid": (lambda x: 1 / (1 + np.exp(-4.0 * x)), {}),
    "arctan": (lambda x: np.arctan(np.pi * x) / np.pi + 0.5, {}),
    "gaussian": (lambda x: gaussian_cdf(x / 0.5), {}),
    "multi_gaussian": (
        lambda x: (
            1.15 * gaussian_cdf(x / 0.5)
            - 0.15 * gaussian_cdf((x - 0.5) / 3.0)
            - 0.15 * gaussian_cdf((x + 0.5) / 3.0)
        ),
        {},
    ),
    # The rest are steep or kinked at x = 0 or at the edge of their window.
    "super_spike": (lambda x: x / (1 + 10.0 * np.abs(x)), {}),
    "triangle": (
        lambda x: 0.3 * (np.clip(x, -1, 1) - np.sign(x) * np.clip(x, -1, 1) ** 2 / 2),
        {},
    ),
    "rectangle": (lambda x: np.clip(x / 2.0, -0.5, 0.5), {"width": 2.0}),
}


@pytest.mark.core
@pytest.mark.parametrize("name", SMOOTH_STEPS)
def test_the_derivative_is_the_documented_one(name, float64):
    step, options = SMOOTH_STEPS[name]
    spike = functools.partial(getattr(surrogate, name), **options)
    z, dz = jax.jvp(spike, (jnp.asarray(X),), (jnp.ones(len(X)),))
    np.testing.assert_array_equal(z, X >= 0)
    epsilon = 1e-6
    expected = (step(X + epsilon) - step(X - epsilon)) / (2 * epsilon)
    np.testing.assert_allclose(dz, expected, atol=1e-4)
    assert np.abs(dz).max() > 0.1


def test_all_are_compared():
    public = {n for n, f in vars(surrogate).items() if not n.startswith("_") and callable(f)}
    assert {n for n in public if getattr(surrogate, n).__module__ == surrogate.__name__} == set(
        SMOOTH_STEPS
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SMOOTH_STEPS)
def test_dtype_stays(name, dtype):
    z, vjp = jax.vjp(getattr(surrogate, name), jnp.asarray(X, dtype))
    assert z.dtype == vjp(z)[0].dtype == dtype


def test_reverse_and_second_derivatives_exist():
    x = jnp.asarray([-0.2, 0.3])
    s = jax.nn.sigmoid(4.0 * x)
    first = jax.grad(lambda x: surrogate.sigmoid(x).sum())
    np.testing.assert_allclose(first(x), 4 * s * (1 - s), rtol=1e-6)
    second = jax.grad(lambda x: first(x).sum())(x)
    np.testing.assert_allclose(second, 16 * s * (1 - s) * (1 - 2 * s), rtol=1e-5)

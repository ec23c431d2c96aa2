"""Weights keep their signs, dense and sparse, and the populations of a synapse add up."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn

INPUTS, UNITS = 4, 5
DRAW = np.random.default_rng(0)
SIGNS = np.array([1.0, 1.0, -1.0, 1.0])
OF_WEIGHTS = np.where(DRAW.random((INPUTS, UNITS)) < 0.5, -1.0, 1.0)
MASK = (DRAW.random((INPUTS, UNITS)) < 0.6).astype(np.float32)
WEIGHT = DRAW.standard_normal((INPUTS, UNITS)).astype(np.float32)
BIAS = DRAW.standard_normal(UNITS).astype(np.float32)
X = DRAW.standard_normal((3, INPUTS)).astype(np.float32)
FORMATS = ("CSR", "CSC", "COO")


def dense(signs):
    return nn.Linear(INPUTS, UNITS, jnp.asarray(WEIGHT), jnp.asarray(BIAS), MASK, w_sign=signs)


def sparse(signs, kind="CSR"):
    matrix = getattr(u.sparse, kind).fromdense(jnp.asarray(WEIGHT * MASK))
    return nn.SparseLinear(matrix, jnp.asarray(BIAS), w_sign=signs)


def of_each_weight(signs):
    return signs if signs.ndim == 2 else np.broadcast_to(signs[:, None], WEIGHT.shape)


def weights_of(layer):
    """The weights that act: what the layer makes of one input after the other."""
    x = jnp.eye(INPUTS)
    return np.asarray(layer(x) - layer(0 * x))


LAYERS = {"dense": dense, **{kind: lambda s, kind=kind: sparse(s, kind) for kind in FORMATS}}


@pytest.mark.parametrize("signs", [SIGNS, SIGNS[:, None], OF_WEIGHTS], ids=lambda s: str(s.shape))
@pytest.mark.parametrize("layer", LAYERS)
def test_signs_are_those_of_the_effective_weight(layer, signs):
    expected = X @ (np.abs(WEIGHT) * of_each_weight(signs) * MASK) + BIAS
    np.testing.assert_allclose(LAYERS[layer](signs)(X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_signs_hold_whatever_an_update_does(layer):
    built = LAYERS[layer](SIGNS)
    for seed in range(3):
        draw = np.random.default_rng(seed).standard_normal
        built.weight.value = jax.tree.map(
            lambda leaf: jnp.asarray(10 * draw(leaf.shape), leaf.dtype),  # noqa: B023
            built.weight.value,
        )
        np.testing.assert_array_equal(np.sign(weights_of(built)), SIGNS[:, None] * MASK)


@pytest.mark.parametrize("signs", [np.ones(UNITS), np.ones((1, UNITS)), 2.0], ids=str)
@pytest.mark.parametrize("layer", ["dense", "CSR"])
def test_other_signs_are_refused(layer, signs):
    with pytest.raises(braintrace.OptionError, match="inputs"):
        LAYERS[layer](signs)


# --- several populations on one synapse ----------------------------------------------------


def projection():
    weights = {
        "input": nn.Linear(INPUTS, UNITS, WEIGHT, None),
        "recurrent": nn.Linear(UNITS, UNITS, np.ones((UNITS, UNITS), np.float32), None),
    }
    return nn.Projection(weights, nn.Expon(UNITS, g_initializer=0.0))


def test_what_populations_send_adds_up():
    ours, synapse = projection(), nn.Expon(UNITS, g_initializer=0.0)
    z = np.arange(3 * UNITS, dtype=np.float32).reshape(3, UNITS)
    with brainstate.environ.context(dt=1.0 * u.ms):
        for module in (ours, synapse):
            brainstate.nn.init_all_states(module, batch_size=3)
        for _ in range(2):
            found = ours({"input": X, "recurrent": z})
            expected = synapse(X @ WEIGHT + z.sum(1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("others", [{}, {"other": X}], ids=["missing", "another"])
def test_other_populations_are_refused(others):
    built = projection()
    brainstate.nn.init_all_states(built, batch_size=3)
    with pytest.raises(braintrace.ShapeError, match="populations"):
        built({"input": X, **others})

"""Weights that keep their signs: dense, masked and sparse, alone and in a network."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import saiunit as u
from assertions import assert_gradients_close
from catalogue import LAYERS as CATALOGUE
from catalogue_runs import case_of, data, runs_of

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


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("signs", "words"),
    [
        (np.ones(UNITS), "for each of 4 inputs"),
        (np.ones((1, UNITS)), "for each of 4 inputs"),
        (2.0, "for each of 4 inputs"),
    ],
    ids=["outputs", "row", "number"],
)
def test_other_signs_are_refused(layer, signs, words):
    with pytest.raises(braintrace.OptionError, match=words):
        LAYERS[layer](signs)


def test_rtrl_of_excitatory_and_inhibitory_neurons_is_bptt(float64):
    """Sparse, with two populations on one synapse; D_RTRL and ES_D_RTRL have rows elsewhere."""
    (entry,) = [entry for entry in CATALOGUE if entry.name == "Dale's law"]
    with brainstate.environ.context(dt=1.0 * u.ms):
        case, (params, states) = case_of(entry)
        expected = oracles.bptt(case, params, states, *data(entry))
        found = runs_of(entry, "rtrl").sequence(3)
        assert_gradients_close(found, expected, 1e-9)


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


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"input": X}, r"expected the populations \['input', 'recurrent'\]"),
        ({"input": X, "other": X}, "'other'"),
    ],
    ids=["missing", "another"],
)
def test_wrong_inputs_of_populations(inputs, words):
    built = projection()
    brainstate.nn.init_all_states(built, batch_size=3)
    with pytest.raises(braintrace.ShapeError, match=words):
        built(inputs)

"""Layers that brainstate has as well give its numbers from its parameters."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from nn_swaps import SWAPS, pair

from braintrace import nn

BATCH, STEPS = 5, 2
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}


def outputs(layers, sequences):
    """Outputs of each layer over some sequences, each from a state that is not zero.

    `sequences` are pairs of the number of samples and inputs; a layer without a state has one step.
    """

    def of_layer(layer, batch, xs):
        brainstate.nn.init_all_states(layer, batch_size=batch)
        states = layer.states(brainstate.HiddenState).values()
        for state in states:
            values = np.linspace(-0.5, 0.5, state.value.size).reshape(state.value.shape)
            state.value = values.astype(xs.dtype)
        return u.math.stack([layer(x) for x in (xs if states else xs[:1])])

    @brainstate.transform.jit
    def steps(inputs):
        batches = [batch for batch, _ in sequences]
        return [
            [of_layer(layer, *given) for layer in layers]
            for given in zip(batches, inputs, strict=True)
        ]

    return steps([xs for _, xs in sequences])


IN_FLOAT64 = {
    "Linear, masked, no bias",
    "Linear, two axes",
    "SignedWLinear",
    "ScaledWSLinear",
    "SparseLinear",
    "AllToAll",
    "AllToAll, others only, wide",
    "AllToAll, one weight, wide",
    "OneToOne, bias",
    "LoRA on a base",
    "Embedding, padded, of two axes",
    "Embedding, frozen",
    "Conv1d, masked",
    "Conv2d",
    "Conv3d",
    "ScaledWSConv2d",
    "ValinaRNNCell",
    "GRUCell",
    "LSTMCell",
}
"""Layers of which the numbers are compared in double precision by day, and not in single."""


@pytest.mark.rows(*(f"{row.id}-float{64 if row.id in IN_FLOAT64 else 32}" for row in SWAPS))
@pytest.mark.core
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("name", "args", "options", "ours", "shape", "unit"), SWAPS)
def test_a_layer_gives_the_numbers_of_brainstate(name, args, options, ours, shape, unit, dtype):
    with jax.enable_x64(dtype is np.float64):
        layers = pair(name, args, options, ours, dtype)
        sequences = []
        for batch in (None, BATCH):
            full = (STEPS, *(() if batch is None else (batch,)), *shape)
            xs = np.random.default_rng(1).standard_normal(full).astype(dtype) * unit
            sequences.append((batch, xs))
        for expected, found in outputs(layers, sequences):
            assert u.get_unit(found).has_same_dim(u.get_unit(expected))
            wanted, got = (
                u.Quantity(y).to_decimal(u.get_unit(expected)) for y in (expected, found)
            )
            assert got.dtype == dtype
            scale = np.abs(wanted).max()
            assert scale > 0.1
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_every_counterpart_is_compared():
    compared = {case.id.split(",")[0] for case in SWAPS}
    layers = {name for name, value in vars(nn).items() if isinstance(value, type)}
    assert layers & set(vars(brainstate.nn)) <= compared


def test_one_weight_for_all_gives_every_output():
    theirs, own = (module.AllToAll(3, 4, w_init=0.3) for module in (brainstate.nn, nn))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(own(x), np.broadcast_to(theirs(x), (2, 4)), rtol=1e-6)


@pytest.mark.parametrize("name", ["GRUCell", "MGUCell"])
def test_the_default_form_is_another_function_of_the_same_parameters(name):
    layers = pair(name, (3, 4), {}, {}, np.float32)
    ((expected, found),) = outputs(layers, [(BATCH, jnp.ones((STEPS, BATCH, 3)))])
    assert np.abs(found[-1] - expected[-1]).max() > 1e-2


def test_initial_parameters_are_those_of_brainstate():
    for module in (brainstate.nn, nn):
        with brainstate.random.seed_context(1):
            cell = module.LSTMCell(3, 4)
        if module is brainstate.nn:
            expected = cell.W.weight.value
    np.testing.assert_array_equal(cell.W.weight.value["weight"], expected["weight"])

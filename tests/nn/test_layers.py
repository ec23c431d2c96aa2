"""Layers give the numbers of brainstate from its parameters, and units change no number."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from matrices import csr
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


@pytest.mark.core
@pytest.mark.parametrize(("name", "args", "options", "ours", "shape", "unit"), SWAPS)
def test_a_layer_gives_the_numbers_of_brainstate(name, args, options, ours, shape, unit):
    dtype = np.float64 if len(options) % 2 else np.float32
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


def test_initial_parameters_are_those_of_brainstate():
    for module in (brainstate.nn, nn):
        with brainstate.random.seed_context(1):
            cell = module.LSTMCell(3, 4)
        if module is brainstate.nn:
            expected = cell.W.weight.value
    np.testing.assert_array_equal(cell.W.weight.value["weight"], expected["weight"])


@pytest.mark.parametrize("bias", [None, np.full((2, 2), 0.5)], ids=["no bias", "bias"])
def test_groups_have_weights_of_their_own(bias):
    weight, x = np.arange(12.0).reshape(2, 3, 2), np.arange(24.0).reshape(4, 2, 3)
    layer = nn.GroupedLinear((2, 3), (2, 2), w_init=jnp.asarray(weight), b_init=bias)
    expected = np.einsum("bgi,gio->bgo", x, weight) + (0 if bias is None else bias)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-6)


# --- units ----------------------------------------------------------------------------------------


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def conv(layer, dims, **options):
    shape = (*(4,) * dims, 3)

    def make(kernel, bias):
        kernel, bias = kernel((2,) * dims + (3, 2)), bias((1,) * dims + (2,))
        return layer(shape, 2, kernel_size=2, w_init=kernel, b_init=bias, **options)

    return make, drawn(0, 2, *shape)


def dense(layer, outputs=2, **options):
    def make(kernel, bias):
        return layer(3, outputs, w_init=kernel((3, outputs)), b_init=bias((outputs,)), **options)

    return make, VECTOR


def sparse(kernel, bias):
    pattern = csr(np.eye(3) + np.eye(3, k=1))
    entries = kernel(pattern.data.shape)
    matrix = u.sparse.CSR((entries, pattern.indices, pattern.indptr), shape=pattern.shape)
    return nn.SparseLinear(matrix, b_init=bias((3,)))


def low_rank(kernel, bias):
    base = nn.Linear(3, 2, w_init=kernel((3, 2)), b_init=bias((2,)))
    layer = nn.LoRA(3, 1, 2, base_module=base, kernel_init=lambda shape, **_: jnp.ones(shape))
    factors = layer.weight.value
    layer.weight.value = {**factors, "lora_a": kernel(factors["lora_a"].shape)}
    return layer


def with_states(layer, name, **options):
    """A cell whose states have the unit of its drive."""

    def make(kernel, bias):
        def start(shape, **_):
            return jnp.zeros(shape) * kernel(()) * 0.0

        weights = {"w_init": kernel((3, 2)), "b_init": bias((2,))}
        return layer(3, 2, **weights, **{name: start}, **options)

    return make, VECTOR


VECTOR = drawn(0, 2, 3)
WITH_UNITS = {
    "Linear with a mask": dense(nn.Linear, w_mask=np.ones((3, 2), np.float32) / 2),
    "FeedbackLinear": dense(nn.FeedbackLinear),
    "SignedWLinear": (lambda w, b: nn.SignedWLinear(3, 2, w_init=w((3, 2))), VECTOR),
    "ScaledWSLinear": dense(nn.ScaledWSLinear),
    "AllToAll": dense(nn.AllToAll, outputs=3, include_self=False),
    "OneToOne": (lambda w, b: nn.OneToOne(3, w_init=w((3,)), b_init=b((3,))), VECTOR),
    "GroupedLinear": (
        lambda w, b: nn.GroupedLinear((2, 3), (2, 2), w_init=w((2, 3, 2)), b_init=b((2, 2))),
        drawn(0, 4, 2, 3),
    ),
    "Embedding": (
        lambda w, b: nn.Embedding(3, 2, w((3, 2)), padding_idx=1, max_norm=0.5),
        np.array([0, 2, 1]),
    ),
    "SparseLinear": (sparse, VECTOR),
    "LoRA": (low_rank, VECTOR),
    "Conv1d with a mask": conv(nn.Conv1d, 1, w_mask=np.ones((2, 3, 2), np.float32) / 2),
    "Conv2d": conv(nn.Conv2d, 2),
    "ScaledWSConv3d": conv(nn.ScaledWSConv3d, 3),
    "IndRNN": with_states(nn.IndRNN, "state_init", u_init=jnp.ones(2)),
    "LeakyRateReadout": with_states(nn.LeakyRateReadout, "r_initializer"),
}


@pytest.mark.parametrize("name", WITH_UNITS)
def test_units_change_no_number(name, time_step):
    make, x = WITH_UNITS[name]

    def output(of_kernel, of_bias):
        layer = make(lambda s: drawn(1, *s) * of_kernel, lambda s: drawn(2, *s) * of_bias)
        brainstate.nn.init_all_states(layer, batch_size=2)
        return brainstate.transform.jit(layer)(x)

    found = output(u.mA, 1e3 * u.uA)
    assert u.get_unit(found).has_same_dim(u.mA)
    np.testing.assert_allclose(found.to_decimal(u.mA), output(1.0, 1.0), rtol=1e-5, atol=1e-6)

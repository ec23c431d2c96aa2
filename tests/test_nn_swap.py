"""Layers that brainstate has as well give its numbers from its parameters."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from nn_models import quick_draws

from braintrace import nn

BATCH, STEPS = 5, 2
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}

MASK = (np.arange(12).reshape(3, 4) % 4 > 0).astype(np.float32)
SIGNS = np.array([[1.0], [-1.0], [1.0]], np.float32)
KERNEL_MASK = (np.arange(12).reshape(3, 2, 2) % 4 > 0).astype(np.float32)
CONDUCTANCES = {"w_init": np.ones((3, 4)) * u.mS, "b_init": np.ones(4) * u.uA}
BEFORE = {"reset_after": False}


def lora(module, in_features, lora_rank, out_features):
    base = module.Linear(in_features, out_features)
    return module.LoRA(in_features, lora_rank, out_features, base_module=base)


def sparse(module, bias=None):
    matrix = u.sparse.CSR.fromdense(jnp.asarray(np.arange(12).reshape(3, 4) % 3, float))
    return module.SparseLinear(matrix, bias, in_size=3)


class Words(brainstate.nn.Module):
    """Rows of a table for the largest entry of each input."""

    def __init__(self, module, *arguments, **options):
        super().__init__()
        self.table = module.Embedding(*arguments, **options)
        self.in_size, self.out_size = (3,), self.table.out_size

    def update(self, x):
        return self.table(jnp.argmax(u.get_mantissa(x), axis=-1))


def words(*arguments, **options):
    return lambda module: Words(module, *arguments, **options)


def swap(name, *args, shape=(3,), ours=None, unit=1.0, label="", **options):
    """One layer of `brainstate.nn`, and what ours needs on top of its arguments."""
    return pytest.param(name, args, options, ours or {}, shape, unit, id=label or name)


SWAPS = [
    swap("Linear", 3, 4),
    swap("Linear", 3, 4, b_init=None, w_mask=MASK, label="Linear, masked, no bias"),
    swap("Linear", 3, 4, b_init=0.5, label="Linear, one bias for all"),
    swap("Linear", (2, 3), (2, 4), shape=(2, 3), label="Linear, two axes"),
    swap("Linear", 3, 4, **CONDUCTANCES, unit=u.mV, label="Linear, with units"),
    swap("SignedWLinear", 3, 4),
    swap("SignedWLinear", 3, 4, w_sign=SIGNS, label="SignedWLinear, signs"),
    swap("ScaledWSLinear", 3, 4),
    swap("ScaledWSLinear", 3, 4, ws_gain=False, w_mask=SIGNS, b_init=None,
         label="ScaledWSLinear, no gain"),
    swap(sparse, label="SparseLinear"),
    swap(sparse, np.ones(4), label="SparseLinear, bias"),
    swap("AllToAll", 3, 4),
    swap("AllToAll", 3, 3, include_self=False, b_init=np.ones(3), label="AllToAll, others only"),
    swap("AllToAll", 3, 4, include_self=False, label="AllToAll, others only, wide"),
    swap("AllToAll", 3, 2, include_self=False, w_init=0.3, label="AllToAll, one weight, narrow"),
    swap("AllToAll", 3, 4, include_self=False, w_init=0.3, label="AllToAll, one weight, wide"),
    swap("OneToOne", 3),
    swap("OneToOne", 3, b_init=np.ones(3), label="OneToOne, bias"),
    swap("LoRA", 3, 2, 4),
    swap(lora, 3, 2, 4, label="LoRA on a base"),
    swap(words(3, 4), label="Embedding"),
    swap(words(3, (2, 2), padding_idx=1), label="Embedding, padded, of two axes"),
    swap(words(3, 4, max_norm=0.7, norm_type=1.0), label="Embedding, of a largest norm"),
    swap(words(3, 4, freeze=True), label="Embedding, frozen"),
    swap("Conv1d", (7, 2), 4, 3, 2, b_init=np.ones((1, 4)), shape=(7, 2)),
    swap("Conv1d", (7, 2), 2, 3, padding=(1, 2), w_mask=KERNEL_MASK, shape=(7, 2),
         label="Conv1d, masked"),
    swap("Conv1d", (2, 7), 4, 3, b_init=np.ones((1, 4, 1))[0], channel_first=True, shape=(2, 7),
         label="Conv1d, channel first"),
    swap("Conv2d", (5, 4, 2), 4, (3, 2), (1, 2), rhs_dilation=2, groups=2, shape=(5, 4, 2)),
    swap("Conv2d", (5, 4, 2), 4, 3, lhs_dilation=2, padding=(1, 2), b_init=0.2, shape=(5, 4, 2),
         label="Conv2d, stretched"),
    swap("Conv3d", (3, 4, 2, 2), 3, 2, shape=(3, 4, 2, 2)),
    swap("ScaledWSConv1d", (7, 2), 4, 3, b_init=np.ones((1, 4)), shape=(7, 2)),
    swap("ScaledWSConv2d", (5, 4, 2), 4, 3, groups=2, ws_gain=False, shape=(5, 4, 2)),
    swap("ScaledWSConv3d", (3, 4, 2, 2), 3, 2, 2, shape=(3, 4, 2, 2)),
    swap("ValinaRNNCell", 3, 4),
    swap("ValinaRNNCell", 3, 4, activation="tanh", b_init=None,
         label="ValinaRNNCell, tanh, no bias"),
    swap("GRUCell", 3, 4, ours=BEFORE),
    swap("MGUCell", 3, 4, ours=BEFORE),
    swap("LSTMCell", 3, 4),
    swap("URLSTMCell", 3, 4),
]  # fmt: skip


def pair(name, args, options, ours, dtype):
    """The same layer of both packages with the same parameters, drawn anew."""
    with quick_draws():
        if callable(name):
            layers = name(brainstate.nn, *args), name(nn, *args)
        else:
            layers = (
                getattr(brainstate.nn, name)(*args, **options),
                getattr(nn, name)(*args, **options, **ours),
            )
    theirs, own = (layer.states(brainstate.ParamState) for layer in layers)
    assert list(theirs) == list(own)
    generator = np.random.default_rng(2)
    for path, state in theirs.items():
        assert jax.tree.structure(state.value) == jax.tree.structure(own[path].value)
        draw = jax.tree.map(
            lambda leaf: jnp.asarray(generator.standard_normal(np.shape(leaf)).astype(dtype)),
            state.value,
        )
        state.value = own[path].value = draw
    return layers


def outputs(layers, sequences):
    """Outputs of each layer over some sequences, each from a state that is not zero.

    `sequences` are pairs of the number of samples and inputs; a layer without a state has one step.
    """

    def of_layer(layer, batch, xs):
        brainstate.nn.init_all_states(layer, batch_size=batch)
        states = layer.states(brainstate.HiddenState).values()
        for state in states:
            values = np.linspace(-0.5, 0.5, state.value.size).reshape(state.value.shape)
            state.value = jnp.asarray(values, xs.dtype)
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


@pytest.mark.by_day(*(f"{row.id}-float{64 if row.id in IN_FLOAT64 else 32}" for row in SWAPS))
@pytest.mark.core
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(("name", "args", "options", "ours", "shape", "unit"), SWAPS)
def test_same_numbers(name, args, options, ours, shape, unit, dtype):
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


@pytest.mark.nightly
def test_rows_that_are_given_stay_as_they_are():
    table = np.arange(6.0).reshape(3, 2)
    for module in (brainstate.nn, nn):
        layer = module.Embedding.from_pretrained(table, padding_idx=1, max_norm=5.0)
        assert layer.freeze
        np.testing.assert_allclose(layer(jnp.array([0, 1])), table[:2])
    assert layer(jnp.zeros((0, 2), int)).shape == (0, 2, 2)

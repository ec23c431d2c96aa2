"""Layers give the numbers of brainstate from its parameters, and units change no number.

Weights keep their signs, dense and sparse, and the populations of a synapse add up.
"""

import inspect

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn

# --- layers of both packages: pairs with the same parameters --------------------------------------

MASK = (np.arange(12).reshape(3, 4) % 4 > 0).astype(np.float32)
SIGNS = np.array([[1.0], [-1.0], [1.0]], np.float32)
KERNEL_MASK = (np.arange(12).reshape(3, 2, 2) % 4 > 0).astype(np.float32)
CONDUCTANCES = {"w_init": np.ones((3, 4)) * u.mS, "b_init": np.ones(4) * u.uA}
BEFORE = {"reset_after": False}


def lora(module, in_features, lora_rank, out_features):
    base = module.Linear(in_features, out_features)
    return module.LoRA(in_features, lora_rank, out_features, base_module=base)


def sparse_layer(module, bias=None):
    matrix = csr((np.arange(12).reshape(3, 4) % 3).astype(float))
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
    swap(sparse_layer, label="SparseLinear"),
    swap(sparse_layer, np.ones(4), label="SparseLinear, bias"),
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
            lambda leaf: jax.device_put(generator.standard_normal(np.shape(leaf)).astype(dtype)),
            state.value,
        )
        state.value = own[path].value = draw
    return layers


def csr(dense):
    """Return what `saiunit.sparse.CSR.fromdense` does, without a program of JAX for each."""
    dense = np.asarray(dense)
    rows, columns = np.nonzero(dense)
    starts = np.searchsorted(rows, np.arange(len(dense) + 1))
    parts = (dense[rows, columns], columns.astype(np.int32), starts.astype(np.int32))
    return u.sparse.CSR(tuple(map(jax.device_put, parts)), shape=dense.shape)


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
    layers = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    layers.remove("Delay")  # it has arguments of its own
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


# --- signs ----------------------------------------------------------------------------------------

INPUTS, UNITS = 4, 5
DRAW = np.random.default_rng(0)
OF_INPUTS = np.array([1.0, 1.0, -1.0, 1.0])
OF_WEIGHTS = np.where(DRAW.random((INPUTS, UNITS)) < 0.5, -1.0, 1.0)
CONNECTED = (DRAW.random((INPUTS, UNITS)) < 0.6).astype(np.float32)
WEIGHT = DRAW.standard_normal((INPUTS, UNITS)).astype(np.float32)
BIAS = DRAW.standard_normal(UNITS).astype(np.float32)
XS = DRAW.standard_normal((3, INPUTS)).astype(np.float32)
FORMATS = ("CSR", "CSC", "COO")


def signed(signs):
    return nn.Linear(INPUTS, UNITS, jnp.asarray(WEIGHT), jnp.asarray(BIAS), CONNECTED, w_sign=signs)


def signed_sparse(signs, kind="CSR"):
    matrix = getattr(u.sparse, kind).fromdense(jnp.asarray(WEIGHT * CONNECTED))
    return nn.SparseLinear(matrix, jnp.asarray(BIAS), w_sign=signs)


def of_each_weight(signs):
    return signs if signs.ndim == 2 else np.broadcast_to(signs[:, None], WEIGHT.shape)


def weights_of(layer):
    """The weights that act: what the layer makes of one input after the other."""
    x = jnp.eye(INPUTS)
    return np.asarray(layer(x) - layer(0 * x))


SIGNED = {
    "dense": signed,
    **{kind: lambda s, kind=kind: signed_sparse(s, kind) for kind in FORMATS},
}


@pytest.mark.parametrize(
    "signs", [OF_INPUTS, OF_INPUTS[:, None], OF_WEIGHTS], ids=lambda s: str(s.shape)
)
@pytest.mark.parametrize("layer", SIGNED)
def test_signs_are_those_of_the_effective_weight(layer, signs):
    expected = XS @ (np.abs(WEIGHT) * of_each_weight(signs) * CONNECTED) + BIAS
    np.testing.assert_allclose(SIGNED[layer](signs)(XS), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", SIGNED)
def test_signs_hold_whatever_an_update_does(layer):
    built = SIGNED[layer](OF_INPUTS)
    for seed in range(3):
        draw = np.random.default_rng(seed).standard_normal
        built.weight.value = jax.tree.map(
            lambda leaf: jnp.asarray(10 * draw(leaf.shape), leaf.dtype),  # noqa: B023
            built.weight.value,
        )
        np.testing.assert_array_equal(np.sign(weights_of(built)), OF_INPUTS[:, None] * CONNECTED)


@pytest.mark.parametrize("signs", [np.ones(UNITS), np.ones((1, UNITS)), 2.0], ids=str)
@pytest.mark.parametrize("layer", ["dense", "CSR"])
def test_other_signs_are_refused(layer, signs):
    with pytest.raises(braintrace.OptionError, match="inputs"):
        SIGNED[layer](signs)


# --- several populations on one synapse -----------------------------------------------------------


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
            found = ours({"input": XS, "recurrent": z})
            expected = synapse(XS @ WEIGHT + z.sum(1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("others", [{}, {"recurrent": np.ones((3, UNITS)), "other": XS}])
def test_other_populations_are_refused(others):
    built = projection()
    brainstate.nn.init_all_states(built, batch_size=3)
    with pytest.raises(KeyError, match="other" if others else "recurrent"):
        built({"input": XS, **others})


# --- what help shows ------------------------------------------------------------------------------


class Named(brainstate.nn.Module):
    """A layer of a user."""

    def __init__(self, size, gain=2.0):
        super().__init__()
        self.size, self.gain = size, gain

    def update(self, x, times=1):
        return times * self.gain * x


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_layers_have_a_docstring():
    layers = [layer for name in nn.__all__ if isinstance(layer := getattr(nn, name), type)]
    assert all(layer.__doc__ for layer in [*layers, nn.Dropout, nn.LayerNorm])


def test_a_marked_class_shows_the_arguments_of_the_class():
    marked = braintrace.mark(Named)
    assert arguments(marked.__init__) == ["self", "size", "gain"]
    assert arguments(marked.update) == ["self", "x", "times"]
    assert marked.__doc__ == Named.__doc__

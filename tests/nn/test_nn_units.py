"""Layers and cells whose kernel and bias carry units give the numbers of those without."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from matrices import csr
from ops_catalogue import array

import braintrace
from braintrace import nn

MATRIX = csr(jnp.asarray(np.eye(3) + np.eye(3, k=1), jnp.float32))


def conv(layer, dims, **options):
    shape = (*(4,) * dims, 3)

    def make(kernel, bias):
        kernel, bias = kernel((2,) * dims + (3, 2)), bias((1,) * dims + (2,))
        return layer(shape, 2, kernel_size=2, w_init=kernel, b_init=bias, **options)

    return make, array(0, 2, *shape)


def dense(layer, inputs=3, outputs=2, **options):
    def make(kernel, bias):
        return layer(
            3, outputs, w_init=kernel((inputs, outputs)), b_init=bias((outputs,)), **options
        )

    return make, array(0, 2, 3)


def sparse(kernel, bias):
    entries = kernel(MATRIX.data.shape)
    matrix = u.sparse.CSR((entries, MATRIX.indices, MATRIX.indptr), shape=MATRIX.shape)
    return nn.SparseLinear(matrix, b_init=bias((3,)))


def one_to_one(kernel, bias):
    return nn.OneToOne(3, w_init=kernel((3,)), b_init=bias((3,)))


def low_rank(kernel, bias):
    base = nn.Linear(3, 2, w_init=kernel((3, 2)), b_init=bias((2,)))
    layer = nn.LoRA(3, 1, 2, base_module=base, kernel_init=lambda shape, **_: jnp.ones(shape))
    params = layer.weight.value
    layer.weight.value = {**params, "lora_a": kernel(params["lora_a"].shape)}
    return layer


def signed(kernel, bias):
    return nn.SignedWLinear(3, 2, w_init=kernel((3, 2)), w_sign=jnp.array([[1.0], [-1.0], [1.0]]))


def started(kernel, *names):
    """A cell whose states have the unit of its drive."""
    zero = kernel(()) * 0.0
    return {name: lambda shape, **_: jnp.zeros(shape) * zero for name in names}


def independent(kernel, bias):
    start = started(kernel, "state_init")
    return nn.IndRNN(3, 2, w_init=kernel((3, 2)), b_init=bias((2,)), u_init=jnp.ones(2), **start)


def readout(kernel, bias):
    start = started(kernel, "r_initializer")
    return nn.LeakyRateReadout(3, 2, w_init=kernel((3, 2)), b_init=bias((2,)), **start)


def grouped(kernel, bias):
    return nn.GroupedLinear((2, 3), (2, 2), w_init=kernel((2, 3, 2)), b_init=bias((2, 2)))


def words(kernel, bias):
    return nn.Embedding(3, 2, kernel((3, 2)), padding_idx=1, max_norm=0.5)


VECTOR = array(0, 2, 3)
LAYERS = {
    "Linear": dense(nn.Linear),
    "Linear with a mask": dense(nn.Linear, w_mask=jnp.ones((3, 2)) / 2),
    "FeedbackLinear": dense(nn.FeedbackLinear),
    "GroupedLinear": (grouped, array(0, 4, 2, 3)),
    "Embedding": (words, jnp.array([0, 2, 1])),
    "SignedWLinear": (signed, VECTOR),
    "ScaledWSLinear": dense(nn.ScaledWSLinear),
    "ScaledWSLinear without gain": dense(nn.ScaledWSLinear, ws_gain=False),
    "AllToAll": dense(nn.AllToAll, outputs=3, include_self=False),
    "OneToOne": (one_to_one, VECTOR),
    "SparseLinear": (sparse, VECTOR),
    "LoRA": (low_rank, VECTOR),
    "Conv1d": conv(nn.Conv1d, 1),
    "Conv1d with a mask": conv(nn.Conv1d, 1, w_mask=jnp.ones((2, 3, 2)) / 2),
    "Conv2d": conv(nn.Conv2d, 2),
    "Conv3d": conv(nn.Conv3d, 3),
    "ScaledWSConv1d": conv(nn.ScaledWSConv1d, 1),
    "ScaledWSConv2d": conv(nn.ScaledWSConv2d, 2, ws_gain=False),
    "ScaledWSConv3d": conv(nn.ScaledWSConv3d, 3),
    "IndRNN": (independent, VECTOR),
    "LeakyRateReadout": (readout, VECTOR),
}


def output(make, x, kernel_unit, bias_unit):
    """The output for one kernel and bias, in some unit."""
    layer = make(lambda s: array(1, *s) * kernel_unit, lambda s: array(2, *s) * bias_unit)
    if hasattr(layer, "init_state"):
        layer.init_state(batch_size=2)
    with brainstate.environ.context(dt=1.0 * u.ms):
        return brainstate.transform.jit(layer)(x)


@pytest.mark.parametrize("bias", [None, np.full((2, 2), 0.5)], ids=["no bias", "bias"])
def test_groups_have_weights_of_their_own(bias):
    weight, x = np.arange(12.0).reshape(2, 3, 2), np.arange(24.0).reshape(4, 2, 3)
    layer = nn.GroupedLinear((2, 3), (2, 2), w_init=jnp.asarray(weight), b_init=bias)
    expected = np.einsum("bgi,gio->bgo", x, weight) + (0 if bias is None else bias)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-6)


@pytest.mark.rows(
    "Linear with a mask",
    "GroupedLinear",
    "Embedding",
    "SignedWLinear",
    "ScaledWSLinear",
    "ScaledWSLinear without gain",
    "AllToAll",
    "OneToOne",
    "SparseLinear",
    "LoRA",
    "Conv1d",
    "Conv1d with a mask",
    "Conv2d",
    "Conv3d",
    "ScaledWSConv1d",
    "ScaledWSConv3d",
    "IndRNN",
    "LeakyRateReadout",
)
@pytest.mark.parametrize("name", LAYERS)
def test_units_change_no_number(name):
    make, x = LAYERS[name]
    plain = output(make, x, 1.0, 1.0)
    found = output(make, x, u.mA, 1e3 * u.uA)
    assert u.get_unit(found).has_same_dim(u.mA)
    np.testing.assert_allclose(found.to_decimal(u.mA), plain, rtol=1e-5, atol=1e-6)


class Filter(brainstate.nn.Module):
    """A leaky state behind a convolution."""

    def __init__(self, unit):
        super().__init__()
        kernel, bias = array(1, 2, 2, 3, 2) * unit, array(2, 1, 1, 2) * unit
        self.layer = nn.Conv2d((4, 4, 3), 2, kernel_size=2, w_init=kernel, b_init=bias)
        self.unit = unit

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4, 4, 2)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x) / self.unit)
        return self.h.value


@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_a_convolution_with_units_learns_the_same(algorithm):
    xs = array(0, 3, 2, 4, 4, 3)

    def gradient(unit):
        learner = braintrace.compile(Filter(unit), algorithm, xs[0], batch_size=2)
        found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
        ((_, values),) = found.items()
        return {name: u.get_mantissa(value) for name, value in values.items()}

    assert_gradients_close(gradient(u.mA), gradient(1.0), 1e-6, algorithm)

"""SnAp-n keeps what weights reach within n steps: all of it is RTRL, and less is RTRL masked."""

import tracemalloc

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from backpropagation import backpropagated
from drivers import build_learner, sequence_gradient
from matrices import csr
from models import small

import braintrace

BATCH, STEPS = 2, references.LENGTH
DENSE = [catalogue.BY_NAME[name] for name in ("TanhRNN",)]
MORE = [
    catalogue.BY_NAME[name]
    for name in ("LeakyRNN", "GRUResetAfter", "RecurrentLIF", "LSTMFused", "LSTMSeparate")
]


@pytest.mark.usefixtures("float64")
@catalogue.each(DENSE)
def test_a_dense_layer_saturates_in_two_steps(case):
    learner = build_learner(case, "snap", n=2, dtype=np.float64)
    xs, targets = case.sequences(BATCH, STEPS, np.float64)
    for chunk_size in (1, 3):
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, xs, targets, chunk_size=chunk_size)
        assert_gradients_close(found, references.bptt(case), 1e-10, f"{case.name}, {chunk_size}")
    report = learner.report()
    assert report.stored_bytes == report.possible_bytes
    assert not any(diagnostic.level == "warning" for diagnostic in report.diagnostics)


def test_an_entry_of_a_kernel_reaches_its_own_channel():
    @small({"h": (2, 5)}, w=np.ones((2, 1, 3)))
    def convolution(self, x):
        self.h.value = 0.9 * self.h.value + jnp.tanh(braintrace.conv(x, self.w.value))
        return self.h.value

    learner = braintrace.compile(convolution(), "snap", jnp.ones((2, 1, 5)), batch_size=2, n=2)
    pairs = 2 * (4 + 5 + 4)  # of both channels; at the edges there is no input
    assert learner.report().carried_bytes == 4 * BATCH * pairs
    xs = np.float32(np.random.default_rng(3).normal(size=(STEPS, BATCH, 1, 5)))
    found = learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), reduction="sum")
    expected = backpropagated(convolution(), lambda m, x: loss(m(x)), xs, batch_size=BATCH)
    assert_gradients_close(found, expected, 1e-5)


@pytest.mark.parametrize("units", [1, 2])
def test_a_layer_of_few_units_is_backpropagation(units):
    """The outputs of its entries differ in one binary digit, or in none."""
    draw = np.random.default_rng(units).normal

    @small({"h": (units,)}, w_in=draw(size=(3, units)), w=draw(size=(units, units)))
    def layer(self, x):
        recurrent = braintrace.matmul(self.h.value, self.w.value)
        self.h.value = jnp.tanh(braintrace.matmul(x, self.w_in.value) + recurrent)
        return self.h.value

    xs = np.float32(draw(size=(STEPS, BATCH, 3)))
    learner = braintrace.compile(layer(), "snap", xs[0], batch_size=BATCH, n=2)
    found = learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), reduction="sum")
    expected = backpropagated(layer(), lambda m, x: loss(m(x)), xs, batch_size=BATCH)
    assert_gradients_close(found, expected, 1e-5)


def test_a_large_parameter_that_is_summed_takes_little_memory():
    """Which entry reaches which element is no table then, and the gradient is exact."""

    @small({"h": (4,)}, w=np.linspace(-1, 1, 12000).reshape(4, 3000))
    def pooled(self, x):
        gains = jnp.tanh(braintrace.element_wise(self.w.value))
        self.h.value = 0.5 * self.h.value + jnp.mean(gains * x, axis=-1)
        return self.h.value

    @jax.jit
    @jax.grad
    def expected(w):
        h = jnp.zeros(4)
        for x in xs:
            h = 0.5 * h + jnp.mean(jnp.tanh(w) * x, axis=-1)
        return jnp.sum(h**2)

    xs = np.float32(np.random.default_rng(1).normal(size=(3, 3000)))
    model = pooled()
    tracemalloc.start()
    try:
        learner = braintrace.compile(model, "snap", xs[0], n=2)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    for x in xs[:-1]:
        learner(x)
    gradient = brainstate.transform.grad(lambda: jnp.sum(learner(xs[-1]) ** 2), model.w)
    found = brainstate.transform.jit(gradient)()
    np.testing.assert_allclose(found, expected(model.w.value), rtol=1e-4, atol=1e-8)


# --- a sparse net -----------------------------------------------------------------------------

H, INPUTS, DENSITY = 40, 3, 0.05
CONNECTED = np.random.default_rng(0).random((H, H)) < DENSITY
MATRIX = csr(jnp.asarray(np.random.default_rng(1).normal(size=(H, H)) * CONNECTED, jnp.float32))
ROWS, COLUMNS = np.nonzero(CONNECTED)


class SparseNet(brainstate.nn.Module):
    """A leaky layer of which one unit in twenty is connected with another."""

    def __init__(self):
        super().__init__()
        w_in = np.random.default_rng(2).normal(size=(INPUTS, H)) / 2
        self.w_in = brainstate.ParamState(jnp.asarray(w_in, jnp.float32))
        self.w_rec = brainstate.ParamState(MATRIX.data)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        recurrent = braintrace.sparse_matmul(self.h.value, self.w_rec.value, sparse_mat=MATRIX)
        drive = braintrace.matmul(x, self.w_in.value) + recurrent
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive)
        return self.h.value


def plain_step(p, h, x):
    matrix = jnp.zeros((H, H)).at[ROWS, COLUMNS].set(p["w_rec"])
    return 0.5 * h + jnp.tanh(x @ p["w_in"] + h @ matrix)


def loss(h):
    return jnp.sum(h**2 * jnp.linspace(0.5, 1.5, h.shape[-1]))


def neighbours(n):
    """Which units each unit reaches within n steps, itself included."""
    reach = np.eye(H, dtype=bool)
    for _ in range(n - 1):
        reach = reach | reach @ (CONNECTED | np.eye(H, dtype=bool))
    return reach


def masked_recursion(step, parameters, masks, size, xs):
    """Real-time recurrent learning of each sample, its traces masked after every step.

    ``step(parameters, state, x)`` is that of one sample, whose state is a vector of some size.
    """
    facts = jax.jit(
        lambda S, x: (
            step(parameters, S, x),
            jax.jacrev(step, 1)(parameters, S, x),
            jax.jacrev(step)(parameters, S, x),
            jax.grad(loss)(step(parameters, S, x)),
        )
    )
    total = jax.tree.map(np.zeros_like, parameters)
    for sample in range(BATCH):
        S = jnp.zeros(size)
        eps = {name: np.zeros((size, *value.shape)) for name, value in parameters.items()}
        for x in xs[:, sample]:
            S, J, F, signal = facts(S, x)
            for name, mask in masks.items():
                eps[name] = mask * (np.tensordot(J, eps[name], 1) + F[name])
                total[name] = total[name] + np.tensordot(signal, eps[name], 1)
    return total


def literal(xs, n):
    reach = neighbours(n)
    parameters = {"w_in": SparseNet().w_in.value, "w_rec": MATRIX.data}
    masks = {"w_in": reach.T[:, None, :], "w_rec": reach.T[:, COLUMNS]}
    return masked_recursion(plain_step, parameters, masks, H, xs)


class Positions(brainstate.nn.Module):
    """Words at two positions of every sample, with a recurrent matrix each."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(5).normal
        self.table = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, 4)), jnp.float32))
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(4, 4)), jnp.float32))
        self.w_rec = brainstate.ParamState(jnp.asarray(draw(size=(2, 4, 4)) / 4, jnp.float32))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2, 4)))

    def update(self, x):
        rows = braintrace.embedding(x, self.table.value)
        drive = braintrace.einsum("btk,kn->btn", x[..., None] + jnp.arange(4.0), self.w.value)
        recurrent = braintrace.einsum("btk,tkn->btn", self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(0.5 * self.h.value + rows + 0.1 * drive + recurrent)
        return self.h.value


def test_operations_at_several_positions():
    """Which are rows of one operation: of the same sample, one after the other."""
    xs = np.random.default_rng(3).integers(0, INPUTS, (STEPS, BATCH, 2))
    expected = backpropagated(Positions(), lambda model, x: loss(model(x)), xs, batch_size=BATCH)
    learner = braintrace.compile(Positions(), "snap", xs[0], batch_size=BATCH, n=2)
    found = learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), reduction="sum")
    assert_gradients_close(found, expected, 1e-5)


def test_samples_along_another_axis_are_told_apart():
    class Turned(Positions):
        def update(self, x):
            turned = (x[..., None] + jnp.arange(4.0)).swapaxes(0, 1)
            drive = braintrace.einsum("tbk,kn->btn", turned, self.w.value)
            self.h.value = 0.5 * self.h.value + drive
            return self.h.value

    xs = np.random.default_rng(3).integers(0, INPUTS, (STEPS, 3, 2))
    found = {}
    for rule, options in (("snap", {"n": 2}), ("rtrl", {})):
        learner = braintrace.compile(Turned(), rule, xs[0], batch_size=3, **options)
        found[rule] = learner.etrace_grad(xs, step_fn=lambda x, call=learner: loss(call(x)))
    assert_gradients_close(*found.values(), 1e-5)


# --- what is refused --------------------------------------------------------------------------


class MixesSamples(SparseNet):
    """The mean over the batch inhibits every unit."""

    def update(self, x):
        h = super().update(x)
        self.h.value = h - 0.1 * h.mean(0)
        return self.h.value


def test_samples_that_mix_are_refused():
    with pytest.raises(braintrace.CompilationError, match="`SnAp` follows each sample separately"):
        braintrace.compile(MixesSamples(), "snap", jnp.ones((2, INPUTS)), batch_size=2, n=2)

"""Gates that one operation computes, each by itself: the same numbers, names and files."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import braintrace
from braintrace._sharding import Division

INPUTS, UNITS, BATCH, LENGTH = 3, 4, 2, 6
RANDOM = np.random.default_rng(0)
XS = np.float32(RANDOM.normal(size=(LENGTH, BATCH, INPUTS)))


class Pair(brainstate.nn.Module):
    """Two coupled states, gates of a sum of two products, one of which no state remembers."""

    def __init__(self):
        super().__init__()
        self.w, self.r, self.b, self.plain = (
            brainstate.ParamState(jnp.asarray(RANDOM.normal(size=shape) / 2, jnp.float32))
            for shape in [(INPUTS, 4 * UNITS), (UNITS, 4 * UNITS), (4 * UNITS,), (4 * UNITS,)]
        )

    def init_state(self, batch_size=None, **kwargs):
        self.h, self.a, self.o = (
            brainstate.HiddenState(jnp.zeros((batch_size, UNITS))) for _ in range(3)
        )

    def update(self, x):
        y = braintrace.matmul(x, self.w.value, self.b.value)
        y = y + braintrace.matmul(self.o.value, self.r.value)
        gates = jax.nn.sigmoid(2 * y + self.plain.value)
        keep, up, out, slow = (gates[:, i * UNITS : (i + 1) * UNITS] for i in range(4))
        h, a = self.h.value, self.a.value
        self.h.value = keep * h + up - 0.5 * a
        self.a.value = slow * a + 0.1 * h
        self.o.value = out * jnp.tanh(self.h.value)
        return self.o.value


class Reshaped(brainstate.nn.Module):
    """Gates along an axis of their own."""

    def __init__(self):
        super().__init__()
        weight = RANDOM.normal(size=(INPUTS, 2 * UNITS))
        self.w = brainstate.ParamState(jnp.asarray(weight, jnp.float32))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        y = braintrace.matmul(x, self.w.value).reshape(-1, 2, UNITS)
        self.h.value = jax.nn.sigmoid(y[:, 0]) * self.h.value + jnp.tanh(y[:, 1])
        return self.h.value


MODELS = {
    "pair": (Pair, "w"),
    "reshaped": (Reshaped, "w"),
    "lstm": (lambda: braintrace.nn.LSTMCell(INPUTS, UNITS), "W/weight"),
    "gru": (lambda: braintrace.nn.GRUCell(INPUTS, UNITS), "Wrz/weight"),
}
ROWS = [("reshaped", "es_d_rtrl")]


def gradients(learner, xs):
    return learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), chunk_size=2)


def pair_of_learners(name, rule):
    build, path = MODELS[name]
    options = {"d_rtrl": {}, "snap": {"n": 1}, "ottt": {"decay": 0.8}}
    options = options.get(rule, {"decay_or_rank": 0.9})
    first = braintrace.compile(build(), rule, XS[0], batch_size=BATCH, **options)
    second = braintrace.compile(build(), rule, XS[0], batch_size=BATCH, **options)
    second.functional().restore(first.functional().state())
    return first, second, path


@pytest.mark.parametrize(
    ("name", "rule"),
    ROWS,
)
def test_gates_apart_are_those_side_by_side(name, rule):
    whole, apart, path = pair_of_learners(name, rule)
    gradients(whole, XS[:3])
    gradients(apart, XS[:3])
    before = apart.graph
    apart.algorithm.divide(Division(AbstractMesh((2,), ("model",)), None, "model"))
    relations = apart.graph.hidden_param_op_relations
    assert len(relations) > len(before.hidden_param_op_relations)
    assert {r.y_var.aval.shape for r in relations} == {(BATCH, UNITS)}
    found, expected = gradients(apart, XS[3:]), gradients(whole, XS[3:])
    assert_close(found, expected)
    state, own = whole.functional().state(), apart.functional()
    assert own.state().traces.keys() != state.traces.keys() or rule != "d_rtrl"
    assert_close(own.unsharded_state(), state)
    if rule == "d_rtrl":
        assert_close(apart.eligibility(path), whole.eligibility(path))
    own.restore(state)  # also of a learner with its gates joined
    assert_close(gradients(apart, XS[:3]), gradients(whole, XS[:3]))


class Read(brainstate.nn.Module):
    """Four gates, each taken out of a row in some way."""

    def __init__(self, gates_of):
        super().__init__()
        self.gates_of = gates_of
        self.w = brainstate.ParamState(ROW)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        keep, up, out, new = self.gates_of(jnp.tanh(braintrace.matmul(x, self.w.value)))
        self.h.value = jax.nn.sigmoid(keep) * self.h.value + up * jnp.sin(out) - new
        return self.h.value


ROW = jnp.asarray(RANDOM.normal(size=(INPUTS, 4 * UNITS)), jnp.float32)


def quarters(y):
    return jnp.split(y, 4, axis=-1)


def test_a_row_that_is_split_is_taken_apart():
    learner = braintrace.compile(Read(quarters), "d_rtrl", XS[0], batch_size=BATCH)
    learner.algorithm.divide(Division(AbstractMesh((2,), ("model",)), None, "model"))
    relations = learner.graph.hidden_param_op_relations
    assert [r.y_var.aval.shape for r in relations] == [(BATCH, UNITS)] * 4


def halves(y):
    middle = y.shape[-1] // 2
    return y[..., :middle], y[..., middle:]


def halves_of_halves(y):
    return [gate for half in halves(y) for gate in halves(half)]


def halves_of_blocks(y):
    first, second = halves(y.reshape(BATCH, 2, 2 * UNITS))
    return first[:, 0], second[:, 0], first[:, 1], second[:, 1]


def by_columns(y):
    columns = jax.lax.reshape(y, (BATCH, 2 * UNITS, BATCH), (1, 0))  # BATCH halves of the columns
    return jnp.split(columns.reshape(4 * UNITS, BATCH).T, 4, axis=-1)


@pytest.mark.parametrize(
    "gates_of",
    [
        halves_of_halves,
    ],
)
def test_rows_that_are_read_in_another_way(gates_of):
    def learner_of(gates_of):
        return braintrace.compile(Read(gates_of), "d_rtrl", XS[0], batch_size=BATCH)

    plain, other = learner_of(quarters), learner_of(gates_of)
    other.algorithm.divide(Division(AbstractMesh((2,), ("model",)), None, "model"))
    assert_close(gradients(other, XS), gradients(plain, XS))


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)

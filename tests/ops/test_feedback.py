"""Products that go back by a matrix of their own: in layers, as readouts, and as they learn."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from operation_cases import normal
from ops_catalogue import plain_feedback

import braintrace
from braintrace import nn
from braintrace._core.step import chunk_gradient
from braintrace._graph import Records

INPUTS, UNITS, OUTPUTS, BATCH, STEPS = 3, 5, 2, 2, 4
XS = normal(0, STEPS, BATCH, INPUTS)
TARGETS = normal(1, STEPS, BATCH, OUTPUTS)


class Network(brainstate.nn.Module):
    """Leaky units, one layer between them and what reads them out."""

    def __init__(self, adaptive):
        super().__init__()
        with brainstate.random.seed_context(0):
            self.cell = nn.IndRNN(INPUTS, UNITS, activation="tanh")
            self.hidden = nn.FeedbackLinear(UNITS, 4, adaptive=adaptive)
            self.readout = nn.FeedbackLinear(4, OUTPUTS, adaptive=adaptive)

    def init_state(self, batch_size=None, **_):
        self.cell.init_state(batch_size)

    def update(self, x):
        return self.readout(jnp.tanh(self.hidden(self.cell(x))))


def backpropagated(network):
    """The gradient of the summed loss, in plain JAX."""
    parameters = {path: s.value for path, s in network.states(brainstate.ParamState).items()}
    matrices = {name: getattr(network, name).feedback.value for name in ("hidden", "readout")}

    def total(p):
        feedback = {name: p.get((name, "feedback"), matrices[name]) for name in matrices}

        def layer(name, x):
            weight = p[(name, "weight")]
            return plain_feedback(x, weight["weight"], feedback[name]) + weight["bias"]

        h, value = jnp.zeros((BATCH, UNITS)), 0.0
        for x, target in zip(XS, TARGETS, strict=True):
            w = p[("cell", "W", "weight")]
            h = jnp.tanh(x @ w["weight"] + w["bias"] + p[("cell", "u")] * h)
            value += jnp.sum((layer("readout", jnp.tanh(layer("hidden", h))) - target) ** 2)
        return value

    return jax.jit(jax.grad(total))(parameters)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_readouts_under_d_rtrl_and_backpropagation(adaptive):
    """Nothing mixes from step to step: both give the gradient of plain JAX, matrices by matrices.

    ``strict`` refuses what bends a gradient: such a product does not.
    """
    network = Network(adaptive)
    parameters = network.states(brainstate.ParamState)
    expected = backpropagated(network)
    learner = braintrace.compile(network, "d_rtrl", XS[0], batch_size=BATCH, strict=True)

    def loss(step):
        return lambda x, target: jnp.sum((step(x) - target) ** 2)

    found = learner.etrace_grad(XS, TARGETS, step_fn=loss(learner), reduction="sum")
    assert_gradients_close(dict(found), expected, 1e-5)

    def total():
        network.init_state(BATCH)
        return brainstate.transform.for_loop(loss(network), XS, TARGETS).sum()

    backwards = brainstate.transform.jit(brainstate.transform.grad(total, parameters))()
    assert_gradients_close(backwards, expected, 1e-5)
    feedback = {path for path in expected if path[-1] == "feedback"}
    assert len(feedback) == 2 * adaptive
    for path in feedback:
        np.testing.assert_array_equal(found[path], found[(path[0], "weight")]["weight"])


def test_decay_makes_an_adaptive_feedback_like_the_weight():
    with brainstate.random.seed_context(0):
        layer = nn.FeedbackLinear(INPUTS, OUTPUTS, b_init=None, adaptive=True)
    values = {path: state.value for path, state in layer.states(brainstate.ParamState).items()}
    weight, feedback = values[("weight",)]["weight"], values[("feedback",)]

    def loss(weight, feedback, x):
        return jnp.sum((braintrace.feedback_matmul(x, weight, feedback) - TARGETS[0]) ** 2)

    def step(matrices, _):
        gradients = jax.grad(loss, (0, 1))(*matrices, XS[0])
        return [0.9 * w - 0.05 * g for w, g in zip(matrices, gradients, strict=True)], None

    (weight_now, feedback_now), _ = jax.lax.scan(step, [weight, feedback], length=100)
    assert jnp.abs(weight_now).max() > 1e-2
    np.testing.assert_allclose(
        weight_now, feedback_now, atol=1e-4 * np.abs(weight - feedback).max()
    )


def test_a_feedback_without_a_unit_is_in_that_of_the_weight():
    options = {"w_init": np.ones((3, 2)) * u.mS, "b_init": None}
    layer = nn.FeedbackLinear(3, 2, feedback_init=np.full((3, 2), 5.0), **options)
    assert u.get_unit(layer.feedback.value) == u.mS
    gradient = jax.grad(lambda x: (layer(x) / u.siemens).sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, 1e-2, rtol=1e-6)


class Leaky(brainstate.nn.Module):
    """A leaky layer behind such a product."""

    def __init__(self, kind):
        super().__init__()
        self.w = brainstate.ParamState(normal(2, INPUTS, UNITS))
        self.feedback = kind(normal(3, INPUTS, UNITS))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        drive = braintrace.feedback_matmul(x, self.w.value, self.feedback.value)
        self.h.value = 0.8 * self.h.value + drive
        return self.h.value


@pytest.mark.parametrize("kind", [brainstate.LongTermState, brainstate.ParamState])
def test_only_what_learns_has_a_gradient_in_a_chunk(kind):
    """What is added up over chunks is computed, whether somebody reads the sum or not."""
    model = Leaky(kind)
    model.init_state(BATCH)
    graph = braintrace.compile_etrace_graph(model, XS[0])
    (relation,) = graph.hidden_param_op_relations
    weights = {relation.key: {"weight": model.w.value, "feedback": model.feedback.value}}
    ones = jnp.ones((STEPS, BATCH, UNITS))
    records = Records(x={relation.key: XS}, D={"h<h": 0.8 * ones}, Df={f"{relation.key}>h": ones})
    method = braintrace.D_RTRL(model).method
    found, _ = chunk_gradient(graph, method, weights, records, {"h": ones}, {})
    learns = kind is brainstate.ParamState
    expected = found[relation.key]["weight"]
    assert np.any(expected)
    np.testing.assert_array_equal(found[relation.key]["feedback"], expected if learns else 0.0)

"""Products that go back by a matrix of their own: in layers, as readouts, and as they learn."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from operations import BATCH, PLAIN, STEPS, assert_close, normal

import braintrace
from braintrace import nn

INPUTS, UNITS, OUTPUTS = 3, 5, 2
XS, TARGETS = (np.float32(normal(i, STEPS, BATCH, n)) for i, n in ((0, INPUTS), (1, OUTPUTS)))


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
        def layer(name, x):
            own, feedback = p[(name, "weight")], p.get((name, "feedback"), matrices[name])
            return PLAIN.feedback_matmul(x, own["weight"], feedback, own["bias"])

        h, value = jnp.zeros((BATCH, UNITS)), 0.0
        for x, target in zip(XS, TARGETS, strict=True):
            w = p[("cell", "W", "weight")]
            h = jnp.tanh(x @ w["weight"] + w["bias"] + p[("cell", "u")] * h)
            value += jnp.sum((layer("readout", jnp.tanh(layer("hidden", h))) - target) ** 2)
        return value

    return jax.jit(jax.grad(total))(parameters)


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_a_network_learns_by_its_feedback(adaptive):
    """Nothing is cut: `strict` accepts the model."""
    network = Network(adaptive)
    expected = backpropagated(network)
    learner = braintrace.compile(network, "d_rtrl", XS[0], batch_size=BATCH, strict=True)

    def loss(x, target):
        return jnp.sum((learner(x) - target) ** 2)

    found = dict(learner.etrace_grad(XS, TARGETS, step_fn=loss, reduction="sum"))
    assert_close(found, {path: expected[path] for path in found})
    assert expected.keys() == found.keys()
    matrices = [path for path in expected if path[-1] == "feedback"]
    assert len(matrices) == 2 * adaptive
    for path in matrices:
        np.testing.assert_array_equal(found[path], found[(path[0], "weight")]["weight"])


def test_decay_makes_an_adaptive_feedback_like_the_weight():
    with brainstate.random.seed_context(0):
        layer = nn.FeedbackLinear(INPUTS, OUTPUTS, b_init=None, adaptive=True)
    start = [layer.weight.value["weight"], layer.feedback.value]

    def loss(weight, feedback):
        y = braintrace.feedback_matmul(XS[0], weight, feedback)
        return jnp.sum((y - TARGETS[0]) ** 2)

    def step(matrices, _):
        gradients = jax.grad(loss, (0, 1))(*matrices)
        return [0.9 * w - 0.05 * g for w, g in zip(matrices, gradients, strict=True)], None

    (weight, feedback), _ = jax.lax.scan(step, start, length=100)
    assert jnp.abs(weight).max() > 1e-2
    np.testing.assert_allclose(weight, feedback, atol=1e-4 * np.abs(start[0] - start[1]).max())


def test_a_feedback_without_a_unit_is_in_that_of_the_weight():
    options = {"w_init": np.ones((3, 2)) * u.mS, "b_init": None}
    layer = nn.FeedbackLinear(3, 2, feedback_init=np.full((3, 2), 5.0), **options)
    assert u.get_unit(layer.feedback.value) == u.mS
    gradient = jax.grad(lambda x: (layer(x) / u.siemens).sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, 1e-2, rtol=1e-6)

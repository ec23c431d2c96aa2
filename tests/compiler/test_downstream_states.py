"""States that no later step reads see the new values of the others, as an output does."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import through_time
from drivers import calls_gradient
from models import small

import braintrace

INPUTS, H, STEPS, BATCH = 3, 4, 6, 2
pytestmark = pytest.mark.usefixtures("float64")


def normalised(c):
    centred = c - c.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)


def cell(params, c, x, matmul):
    """A gated cell without recurrent weights; its output mixes the cells of a sample."""
    forget, enter, out = jnp.split(matmul(x, params["w"]), 3, axis=-1)
    c = jax.nn.sigmoid(forget) * c + jnp.tanh(enter)
    return c, jax.nn.sigmoid(out) * normalised(c)


class GatedCell(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(INPUTS, 3 * H))))

    def init_state(self, batch_size=None, **_):
        self.c = brainstate.HiddenState(jnp.full((batch_size, H), 0.3))
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        params = {"w": self.w.value}
        self.c.value, self.h.value = cell(params, self.c.value, x, braintrace.matmul)
        return self.h.value


class Spiking(GatedCell):
    """The spikes of a step are read by the next."""

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)[..., :H]
        self.c.value = 0.9 * self.c.value + drive - self.h.value
        self.h.value = jax.nn.sigmoid(self.c.value)
        return self.h.value


class Filtered(GatedCell):
    """A state reads another in the same step that no later step reads."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.slow = brainstate.HiddenState(jnp.zeros((batch_size, H)))

    def update(self, x):
        output = super().update(x)
        self.slow.value = 0.5 * self.slow.value + self.c.value * jnp.sin(output)
        return output


@small({"c": (1,), "h": (1,)}, w=np.ones((INPUTS, 1)))
def one_neuron(self, x):
    """The same of the only unit."""
    self.c.value = 0.9 * self.c.value + braintrace.matmul(x, self.w.value) - self.h.value
    self.h.value = jax.nn.sigmoid(self.c.value)
    return self.h.value


def data():
    rng = np.random.default_rng(1)
    xs, targets = rng.normal(size=(STEPS, BATCH, INPUTS)), rng.normal(size=(STEPS, BATCH, H))
    return jnp.asarray(xs), jnp.asarray(targets)


def compiled(model, **options):
    return braintrace.compile(model(), "d_rtrl", data()[0][0], batch_size=BATCH, **options)


def loss_of(output, target):
    return jnp.mean((output - target) ** 2)


def plain_step(params, c, x, target):
    c, h = cell(params, c, x, jnp.matmul)
    return c, loss_of(h, target)


@pytest.mark.parametrize("way", ["chunks", "step by step"])
@pytest.mark.core
@pytest.mark.usefixtures("optimised")
def test_mixing_on_the_way_to_them_is_exact(way):
    xs, targets = data()
    learner = compiled(GatedCell, strict=True)  # no part of the gradient is cut

    def loss(x, target):
        return loss_of(learner(x), target)

    if way == "step by step":
        found = calls_gradient(learner.algorithm.model, loss, xs, targets)
    else:
        chunk_size = STEPS if way == "sequence" else 2
        options = {"reduction": "sum", "chunk_size": chunk_size}
        found = learner.etrace_grad(xs, targets, step_fn=loss, **options)
    start, params = jnp.full((BATCH, H), 0.3), {"w": GatedCell().w.value}
    expected = through_time(plain_step, params, start, xs, targets)
    assert_gradients_close({"w": found[("w",)]}, expected, 1e-10)
    (trace,) = jax.tree.leaves(learner.algorithm.traces.value)
    assert trace.shape == (BATCH, INPUTS, 2 * H)  # the output gate never enters it


def names_of_downstream(learner):
    (group,) = learner.graph.hidden_groups
    return [group.states[a].name for a in group.downstream]


def test_which_states_are_downstream():
    assert names_of_downstream(compiled(GatedCell)) == ["h"]
    assert names_of_downstream(compiled(Spiking)) == []
    one_sample = braintrace.compile(one_neuron(), "d_rtrl", jnp.ones((1, INPUTS)), batch_size=1)
    assert names_of_downstream(one_sample) == []
    with pytest.warns(braintrace.ApproximationWarning, match="'slow'"):
        learner = compiled(Filtered)
    assert names_of_downstream(learner) == ["h"]
    # A window's gradient goes back to every state before it.
    with pytest.warns(braintrace.ApproximationWarning):
        learner = compiled(GatedCell, window=2)
    assert names_of_downstream(learner) == []

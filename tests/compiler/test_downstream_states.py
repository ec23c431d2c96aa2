"""States that no later step reads see the new values of the others, as an output does."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
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


def learner_of(model, algorithm="d_rtrl", **options):
    return braintrace.compile(model(), algorithm, data()[0][0], batch_size=BATCH, **options)


def loss_of(output, target):
    return jnp.mean((output - target) ** 2)


def bptt():
    xs, targets = data()

    def loss(params):
        def step(c, now):
            c, h = cell(params, c, now[0], jnp.matmul)
            return c, loss_of(h, now[1])

        return jnp.sum(jax.lax.scan(step, jnp.full((BATCH, H), 0.3), (xs, targets))[1])

    return jax.jit(jax.grad(loss))({"w": GatedCell().w.value})


@pytest.mark.by_day("chunks", "step by step")
@pytest.mark.core
@pytest.mark.optimised
@pytest.mark.parametrize("way", ["sequence", "chunks", "step by step"])
def test_mixing_on_the_way_to_them_is_exact(way):
    xs, targets = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no part of the gradient is cut
        learner = learner_of(GatedCell, strict=True)
    if way == "step by step":
        weights = learner.algorithm.model.states(brainstate.ParamState)

        @brainstate.transform.jit
        def gradient(x, target):
            return brainstate.transform.grad(lambda: loss_of(learner(x), target), weights)()

        steps = [gradient(x, target) for x, target in zip(xs, targets, strict=True)]
        found = jax.tree.map(lambda *leaves: sum(leaves), *steps)
    else:
        found = learner.etrace_grad(
            xs,
            targets,
            step_fn=lambda x, target: loss_of(learner(x), target),
            reduction="sum",
            chunk_size=STEPS if way == "sequence" else 2,
        )
    assert_gradients_close({"w": found[("w",)]}, bptt(), 1e-10)
    (trace,) = jax.tree.leaves(learner.algorithm.traces.value)
    assert trace.shape == (BATCH, INPUTS, 2 * H)  # the output gate never enters it


def names_of_downstream(learner):
    (group,) = learner.graph.hidden_groups
    return [group.states[a].name for a in group.downstream]


def test_which_states_are_downstream():
    assert names_of_downstream(learner_of(GatedCell)) == ["h"]
    assert names_of_downstream(learner_of(Spiking)) == []
    one_sample = braintrace.compile(one_neuron(), "d_rtrl", jnp.ones((1, INPUTS)), batch_size=1)
    assert names_of_downstream(one_sample) == []
    with pytest.warns(braintrace.ApproximationWarning, match="'slow'"):
        learner = learner_of(Filtered)
    assert names_of_downstream(learner) == ["h"]
    # A window's gradient goes back to every state before it.
    with pytest.warns(braintrace.ApproximationWarning):
        learner = learner_of(GatedCell, window=2)
    assert names_of_downstream(learner) == []

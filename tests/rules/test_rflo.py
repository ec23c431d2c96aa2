"""RFLO equals its definition, and refuses networks without random feedback."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close

import braintrace
from braintrace import nn

INPUTS, UNITS, OUTPUTS, BATCH, STEPS, TAU = 3, 5, 2, 2, 6, 4.0

pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


XS, TARGETS = draw(0, STEPS, BATCH, INPUTS), draw(1, STEPS, BATCH, OUTPUTS)


class LeakyTanh(brainstate.nn.Module):
    """A leaky tanh RNN with a linear readout, of which the error goes back by ``B``."""

    def __init__(self, readout=None):
        super().__init__()
        weights = {"W": (UNITS, UNITS), "W_in": (INPUTS, UNITS)}
        for seed, (name, shape) in enumerate(weights.items()):
            value = jnp.asarray(draw(seed + 2, *shape) / np.sqrt(shape[0]))
            setattr(self, name, brainstate.ParamState(value))
        matrices = {"w_init": draw(4, UNITS, OUTPUTS), "feedback_init": draw(5, UNITS, OUTPUTS)}
        own = nn.FeedbackLinear(UNITS, OUTPUTS, b_init=None, **matrices)
        self.readout = own if readout is None else readout

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.broadcast_to(draw(6, UNITS), (*batch, UNITS)))

    def update(self, x):
        recurrent = braintrace.matmul(self.h.value, self.W.value)
        u = recurrent + braintrace.matmul(x, self.W_in.value)
        self.h.value = (1 - 1 / TAU) * self.h.value + jnp.tanh(u) / TAU
        return self.readout(self.h.value)


def literal_rflo(network):
    """Gradients by the equations of the paper, sample by sample, in NumPy."""
    W, W_in = (np.asarray(network.states()[(name,)].value) for name in ("W", "W_in"))
    W_out = np.asarray(network.readout.weight.value["weight"])
    B = np.asarray(network.readout.feedback.value)
    to_W, to_W_in, to_W_out = (np.zeros_like(w) for w in (W, W_in, W_out))
    for sample in range(BATCH):
        h, p, q = draw(6, UNITS), np.zeros_like(W), np.zeros_like(W_in)
        for x, target in zip(XS[:, sample], TARGETS[:, sample], strict=True):
            u = h @ W + x @ W_in
            slope = 1 - np.tanh(u) ** 2
            p = (1 - 1 / TAU) * p + np.outer(h, slope) / TAU
            q = (1 - 1 / TAU) * q + np.outer(x, slope) / TAU
            h = (1 - 1 / TAU) * h + np.tanh(u) / TAU
            error = h @ W_out - target
            to_W += (B @ error) * p
            to_W_in += (B @ error) * q
            to_W_out += np.outer(h, error)
    return {("W",): to_W, ("W_in",): to_W_in, ("readout", "weight"): {"weight": to_W_out}}


def loss_of(learner):
    return lambda x, target: 0.5 * jnp.sum((learner(x) - target) ** 2)


@pytest.mark.parametrize("mapped", [True])
def test_equals_its_definition(mapped):
    network = LeakyTanh()
    options = {"batch_size": BATCH, "vmap": mapped}
    learner = braintrace.compile(network, "rflo", jnp.asarray(XS[0]), **options)
    expected, loss = literal_rflo(network), loss_of(learner)
    for chunk_size in (1, 4, STEPS):
        learner.reset_state(BATCH)
        found = learner.etrace_grad(
            XS, TARGETS, step_fn=loss, reduction="sum", chunk_size=chunk_size
        )
        assert_gradients_close(dict(found), expected, 1e-12, f"chunks of {chunk_size}")
    learner.reset_state(BATCH)
    step = brainstate.transform.grad(loss, network.states(brainstate.ParamState))
    each = brainstate.transform.for_loop(step, jnp.asarray(XS), jnp.asarray(TARGETS))
    summed = jax.tree.map(lambda leaf: leaf.sum(0), each)
    assert_gradients_close(summed, expected, 1e-12, "step by step")


class Leaky(brainstate.nn.Module):
    """A readout with a memory."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def init_state(self, batch_size=None, **_):
        self.o = brainstate.HiddenState(jnp.zeros((batch_size, OUTPUTS)))

    def update(self, h):
        self.o.value = 0.8 * self.o.value + self.layer(h)
        return jax.nn.softmax(self.o.value)


class Hidden(brainstate.nn.Module):
    """Another layer before the readout."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def update(self, h):
        return self.last(jnp.tanh(self.first(h)))


class WithRates(brainstate.nn.Module):
    """An output that has the rates as well."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def update(self, h):
        return self.layer(h), h.mean()


def random(inputs=UNITS):
    return nn.FeedbackLinear(inputs, OUTPUTS)


@pytest.mark.parametrize(
    "readout",
    [
        lambda: Leaky(random()),
        lambda: Hidden(nn.Linear(UNITS, 4), random(4)),
        lambda: WithRates(random()),
    ],
    ids=["leaky", "after another layer", "with rates"],
)
def test_accepts_readouts_with_random_feedback(readout):
    braintrace.compile(LeakyTanh(readout()), "rflo", jnp.asarray(XS[0]), batch_size=BATCH)


class InTheRecurrence(LeakyTanh):
    """Random feedback from state to state, and a state that is an output."""

    def update(self, x):
        drive = braintrace.matmul(x, self.W_in.value)
        recurrent = braintrace.feedback_matmul(self.h.value, self.W.value, self.W.value.T)
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value


class OfTheInput(LeakyTanh):
    """Random feedback in a layer that reads no state."""

    def update(self, x):
        super().update(x)
        return self.h.value.mean() + braintrace.feedback_matmul(x, self.W_in.value, self.W_in.value)


@pytest.mark.parametrize(
    "network",
    [
        lambda: LeakyTanh(nn.Linear(UNITS, OUTPUTS)),
        lambda: LeakyTanh(Hidden(random(), nn.Linear(OUTPUTS, OUTPUTS))),
        InTheRecurrence,
        OfTheInput,
    ],
    ids=["plain readout", "plain layer behind it", "in the recurrence", "of the input"],
)
def test_refuses_other_readouts_by_name(network):
    with pytest.raises(braintrace.CompilationError, match=r"`RFLO`.*`feedback_matmul`.*'h'"):
        braintrace.compile(network(), braintrace.RFLO, jnp.asarray(XS[0]), batch_size=BATCH)

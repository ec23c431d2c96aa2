"""OSTL of feed-forward networks equals its definition, and refuses recurrence through products."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ
from catalogue import BATCH, BY_NAME, Cell

import braintrace
from braintrace import nn

INPUTS, LOWER, UPPER, OUTPUTS, STEPS = 3, 5, 4, 2, 6
DECAY, ADAPTATION = 0.8, 0.9

pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


XS, TARGETS = 2 * draw(0, STEPS, BATCH, INPUTS), draw(1, STEPS, BATCH, OUTPUTS)
WEIGHTS = {"lower": draw(2, INPUTS, LOWER), "upper": draw(3, LOWER, UPPER)}
W_OUT = draw(4, UPPER, OUTPUTS)


def spikes(state):
    """Of a potential and its adaptation; they start below the threshold."""
    V, a = state
    return nn.surrogate.triangle(V - 0.6 - 0.5 * a, gamma=1.0)


def next_state(state, drive):
    """Adaptive leaky units, reset by their last spike."""
    V, a = state
    z = spikes(state)
    return jnp.stack([DECAY * V + drive - 0.6 * z, ADAPTATION * a + 0.3 * z])


class Layer(brainstate.nn.Module):
    """One layer of adaptive units."""

    def __init__(self, weight):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(weight))

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        shape = (*batch, self.w.value.shape[1])
        self.V, self.a = (brainstate.HiddenState(jnp.zeros(shape)) for _ in range(2))

    def update(self, x):
        old = jnp.stack([self.V.value, self.a.value])
        self.V.value, self.a.value = next_state(old, braintrace.matmul(x, self.w.value))
        return spikes((self.V.value, self.a.value))


class TwoLayers(brainstate.nn.Module):
    """A feed-forward spiking network, its output read out plainly."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = Layer(WEIGHTS["lower"]), Layer(WEIGHTS["upper"])
        self.w_out = brainstate.ParamState(jnp.asarray(W_OUT))

    def update(self, x):
        return self.upper(self.lower(x)) @ self.w_out.value


def loss_of(y, target):
    return 0.5 * jnp.sum((y - target) ** 2)


def up_from(state, old_upper, W_upper):
    """The new state of the upper layer, given that of the lower one."""
    return next_state(old_upper, spikes(state) @ W_upper)


@functools.partial(jax.jit, static_argnums=3)
def derivatives_of_layer(state, below, W, takes_spikes):
    """The new state of a layer, its spikes, and its derivatives by the old one and the weight."""

    def new(state, W):
        return next_state(state, (spikes(below) if takes_spikes else below) @ W)

    after = new(state, W)
    return after, spikes(after), jax.jacrev(new, (0, 1))(state, W)


@jax.jit
def signals(lower, upper, old_upper, target):
    """What arrives at both layers within the step, and the gradient of the readout."""

    def of_upper(upper, W_out):
        return loss_of(spikes(upper) @ W_out, target)

    def of_lower(lower):
        return of_upper(up_from(lower, old_upper, WEIGHTS["upper"]), W_OUT)

    return (jax.grad(of_lower)(lower), *jax.grad(of_upper, (0, 1))(upper, W_OUT))


@functools.cache
def literal_ostl():
    """The recursion of the paper with full Jacobians of each layer, samples and all."""
    lower, upper = np.zeros((2, BATCH, LOWER)), np.zeros((2, BATCH, UPPER))
    traces = {"lower": 0.0, "upper": 0.0}
    total = {name: np.zeros_like(w) for name, w in {**WEIGHTS, "w_out": W_OUT}.items()}
    count = 0.0
    for x, target in zip(XS, TARGETS, strict=True):
        old_upper = upper
        of_layer = derivatives_of_layer(lower, x, WEIGHTS["lower"], False)
        lower, z_lower, of_lower = jax.tree.map(np.asarray, of_layer)
        of_layer = derivatives_of_layer(upper, lower, WEIGHTS["upper"], True)
        upper, z_upper, of_upper = jax.tree.map(np.asarray, of_layer)
        count += z_lower.mean() + z_upper.mean()
        for name, (by_state, by_weight) in {"lower": of_lower, "upper": of_upper}.items():
            carried = np.tensordot(by_state, traces[name], 3) if np.ndim(traces[name]) else 0.0
            traces[name] = carried + np.asarray(by_weight)
        to_lower, to_upper, to_readout = signals(lower, upper, old_upper, target)
        total["lower"] += np.tensordot(to_lower, traces["lower"], 3)
        total["upper"] += np.tensordot(to_upper, traces["upper"], 3)
        total["w_out"] += to_readout
    assert 0.1 < count / (2 * STEPS) < 0.9
    paths = {"lower": ("lower", "w"), "upper": ("upper", "w"), "w_out": ("w_out",)}
    return {paths[name]: gradient for name, gradient in total.items()}


@pytest.mark.parametrize(
    "mapped",
    [
        pytest.param(False, id="batch axis"),
    ],
)
def test_equals_its_definition(mapped):
    options = {"batch_size": BATCH, "vmap": mapped}
    learner = braintrace.compile(TwoLayers(), "ostl_feedforward", jnp.asarray(XS[0]), **options)
    expected = literal_ostl()

    def loss(x, target):
        return loss_of(learner(x), target)

    for chunk_size in (1, 4):
        learner.reset_state(BATCH)
        found = learner.etrace_grad(
            XS, TARGETS, step_fn=loss, reduction="sum", chunk_size=chunk_size
        )
        assert_gradients_close(dict(found), expected, 1e-12, f"chunks of {chunk_size}")
    if not mapped:
        assert_gradients_differ(backpropagated(), expected, 1e-3)


def backpropagated():
    """The gradient of the whole sequence, which has more for the lower layer."""

    def total(weights):
        def step(layers, now):
            lower, upper = layers
            x, target = now
            lower = next_state(lower, x @ weights["lower", "w"])
            upper = up_from(lower, upper, weights["upper", "w"])
            return (lower, upper), loss_of(spikes(upper) @ weights["w_out",], target)

        start = jnp.zeros((2, BATCH, LOWER)), jnp.zeros((2, BATCH, UPPER))
        return jax.lax.scan(step, start, (XS, TARGETS))[1].sum()

    weights = {(name, "w"): jnp.asarray(w) for name, w in WEIGHTS.items()}
    return jax.jit(jax.grad(total))({**weights, ("w_out",): jnp.asarray(W_OUT)})


class PlainRecurrence(Cell):
    """A recurrent weight that is not marked."""

    weights = {"w_in": (INPUTS, 4), "w_rec": (4, 4)}
    states_of = {"h": (4,)}

    def recurrent(self):
        return self.h.value @ self.w_rec.value

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive + self.recurrent())
        return self.h.value


class HeldRecurrence(PlainRecurrence):
    """A recurrence that no gradient passes."""

    def recurrent(self):
        return jax.lax.stop_gradient(self.h.value) @ self.w_rec.value


class OutputFedBack(PlainRecurrence):
    """What is fed back is kept in a State that is no hidden state."""

    def init_state(self, batch_size=None, **options):
        super().init_state(batch_size, **options)
        self.last = brainstate.ShortTermState(jnp.zeros((batch_size, 4)))

    def recurrent(self):
        return braintrace.matmul(self.last.value, self.w_rec.value)

    def update(self, x):
        self.last.value = jnp.tanh(super().update(x))
        return self.last.value


def compiled(model):
    return braintrace.compile(model, "ostlfeedforward", jnp.asarray(XS[0]), batch_size=BATCH)


@pytest.mark.parametrize("name", ["TwoLayers", "ALIF", "ConvolutionalLIF"])
def test_accepts_feed_forward_networks_of_the_zoo(name):
    entry = BY_NAME[name]
    x = jnp.zeros(entry.shape)
    braintrace.compile(entry.module(), braintrace.OSTLFeedforward, x, batch_size=BATCH)


def test_accepts_a_recurrence_that_no_gradient_passes():
    compiled(HeldRecurrence())


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize(
    ("model", "states"),
    [
        (PlainRecurrence, "'h' .*reaches 'h' through `dot_general`"),
        (BY_NAME["TanhRNN"].module, "'h' .*reaches 'h' through `etp_mm`"),
        (BY_NAME["DelayLineForAMarkedOperation"].module, "'line' .*reaches 'h' through `etp_mm`"),
        (OutputFedBack, "'last' .*reaches 'h' through `etp_mm`"),
    ],
    ids=["plain", "marked", "by a delay line", "by another State"],
)
def test_refuses_recurrence_through_a_product_by_name(model, states):
    with pytest.raises(braintrace.CompilationError, match=f"`OSTLFeedforward`.*{states}"):
        compiled(model())

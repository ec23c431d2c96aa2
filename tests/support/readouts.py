"""Feed-forward layers below readouts that remember, some of them linear, some not quite."""

import dataclasses
from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

INPUTS, H, OUTPUTS, BATCH, STEPS = 3, 4, 2, 2, 5


def values(seed, *shape, scale=0.8):
    return scale * np.random.default_rng(seed).standard_normal(shape)


def data(batch=BATCH):
    return 1.5 * values(1, STEPS, batch, INPUTS), values(2, STEPS, batch, OUTPUTS)


spike = braintrace.nn.surrogate.triangle


def with_states(*names):
    """Give a part of a model the names of the weights and states that it uses."""

    def named(part):
        part.states = names
        return part

    return named


# --- layers: what they hand on is a function of their states, elementwise function


@with_states("h", "w_in")
def rates(net, x):
    net.h.value = 0.7 * net.h.value + jnp.tanh(braintrace.matmul(x, net.w_in.value))
    return net.h.value**2


@with_states("h", "w_in")
def lif(net, x):
    left = 0.8 * net.h.value * (1 - spike(net.h.value - 0.5))
    net.h.value = left + braintrace.matmul(x, net.w_in.value)
    return spike(net.h.value - 0.5)


@with_states("h", "a", "w_in")
def alif(net, x):
    z = spike(net.h.value - 0.3 - 0.5 * net.a.value)
    net.a.value = 0.9 * net.a.value + z
    net.h.value = 0.8 * net.h.value - 0.4 * z + braintrace.matmul(x, net.w_in.value)
    return spike(net.h.value - 0.3 - 0.5 * net.a.value)


@with_states("h", "w_in", "b", "k")
def decaying(net, x):
    """Neither the decay nor the bias is its own."""
    kappa = braintrace.element_wise(net.k.value, jax.nn.sigmoid)
    bias = jnp.tile(net.b.value, 2)
    net.h.value = kappa * net.h.value + jnp.tanh(braintrace.matmul(x, net.w_in.value, bias))
    return net.h.value**2


# --- readouts


@with_states("o", "w_out")
def plain(net, z, x):
    net.o.value = 0.8 * net.o.value + z @ net.w_out.value
    return net.o.value


@with_states("o", "w_out", "b", "k")
def with_everything(net, z, x):
    """A decay that learns, coefficients that share it, a marked weight with a bias, a constant."""
    kappa = jax.nn.sigmoid(net.k.value)
    current = braintrace.matmul(z, net.w_out.value, net.b.value) + 0.3
    net.o.value = kappa * net.o.value + (1 - kappa) * current
    return jax.nn.softmax(net.o.value)


@with_states("o", "w_out", "b", "gain", "tau")
def in_small_steps(net, z, x):
    """One step of Euler's method; gains of the units below; the loss reads the State itself."""
    current = (z * net.gain.value) @ net.w_out.value + net.b.value
    net.o.value = net.o.value + (current - net.o.value) / net.tau.value
    return net.o.value


@with_states("o", "p", "q", "w_out", "w_two")
def several(net, z, x):
    """Two with one decay, one with another, behind one product each or together: a filter each."""
    y = z @ net.w_out.value
    net.o.value = 0.8 * net.o.value + y
    net.p.value = 0.8 * net.p.value + z @ net.w_two.value
    net.q.value = 0.5 * net.q.value + y
    return net.o.value + net.p.value * net.q.value


@with_states("h", "g", "o", "w_long", "s")
def of_several(net, z, x):
    """Parts of two states and of data, side by side, and data with a gain that learns."""
    net.g.value = 0.6 * net.g.value + z
    parts = jnp.concatenate([net.g.value[..., 1:], net.h.value, x[..., :2]], axis=-1)
    drive = parts @ net.w_long.value + net.s.value * jnp.sin(x[..., :OUTPUTS])
    net.o.value = 0.8 * net.o.value + drive - 0.1
    return net.o.value


@with_states("o", "p", "w_out", "w_up", "b", "k")
def cascade(net, z, x):
    """A synapse behind the weights, and a leaky unit behind weights of its own."""
    rho = jax.nn.sigmoid(net.k.value)
    drive = braintrace.matmul(z, net.w_out.value, net.b.value) + 0.3 * x[..., :OUTPUTS] + 0.2
    net.p.value = rho * net.p.value + drive
    net.o.value = 0.7 * net.o.value + net.p.value @ net.w_up.value
    return net.o.value


@with_states("o", "p", "w_out")
def synapse_and_unit(net, z, x):
    """The same elementwise function, without a start value that somebody needs."""
    net.p.value = 0.6 * net.p.value + z @ net.w_out.value
    net.o.value = 0.7 * net.o.value + 0.3 * net.p.value
    return net.o.value


@with_states("o", "w_out", "up", "k")
def marked_decay(net, z, x):
    kappa = braintrace.element_wise(net.k.value, jax.nn.sigmoid)
    net.o.value = kappa * net.o.value + braintrace.lora_matmul(z, net.w_out.value, net.up.value)
    return net.o.value


@with_states("o", "w_out", "b", "back")
def with_feedback(net, z, x):
    """A way back of its own, under backpropagation through time as well."""
    y = braintrace.feedback_matmul(z, net.w_out.value, net.back.value, net.b.value)
    net.o.value = 0.8 * net.o.value + y
    return jnp.tanh(net.o.value)


@with_states("o", "p", "w_out", "w_up", "b", "k")
def read_late(net, z, x):
    """The outputs read what was there before the step, of a cascade whose decay learns."""
    before = net.o.value, net.p.value
    rho = jax.nn.sigmoid(net.k.value)
    drive = braintrace.matmul(z, net.w_out.value, net.b.value) + 0.3 * x[..., :OUTPUTS]
    net.p.value = rho * net.p.value + drive
    net.o.value = 0.7 * net.o.value + net.p.value @ net.w_up.value
    return net.o.value + jnp.tanh(before[0]) * before[1]


@with_states("o", "p", "w_out")
def seen_by_another(net, z, x):
    """Another state reads it without a gradient."""
    net.o.value = net.o.value / 1.3 + z @ net.w_out.value
    net.p.value = 0.5 * net.p.value + jnp.tanh(jax.lax.stop_gradient(net.o.value))
    return net.o.value + net.p.value


@with_states("o", "w_out", "w_two")
def twice(net, z, x):
    """Updated twice in a step; the value in between is read as well."""
    net.o.value = 0.8 * net.o.value + z @ net.w_out.value
    between = net.o.value
    net.o.value = 0.9 * net.o.value + z @ net.w_two.value
    return net.o.value + jnp.tanh(between)


@with_states("o", "w_in", "b", "k")
def of_the_layer(net, z, x):
    """Weights, bias and decay are those of the layer below."""
    out = braintrace.matmul(z, net.w_in.value[:OUTPUTS].T, net.b.value)
    net.o.value = jax.nn.sigmoid(net.k.value) * net.o.value + out
    return net.o.value


@with_states("o", "w_out", "on")
def wrapped(net, z, x):
    """In a checkpoint, behind a branch that is taken at every step."""
    z = jax.lax.cond(net.on.value > 0, lambda z: 0.5 * z, lambda z: z, z)
    net.o.value = jax.checkpoint(lambda o, w: 0.5 * o + z @ w)(net.o.value, net.w_out.value)
    return net.o.value


@with_states("o", "w_out", "theta")
def of_thresholds(net, z, x):
    """What is filtered has a parameter in it, with a mark."""
    past = jnp.tanh(z - braintrace.element_wise(net.theta.value))
    net.o.value = 0.8 * net.o.value + past @ net.w_out.value
    return net.o.value


# --- readouts that are none


@with_states("o", "w_out", "d")
def decay_per_unit(net, z, x):
    net.o.value = net.d.value * net.o.value + z @ net.w_out.value
    return net.o.value


@with_states("o", "w_out")
def nonlinear_inside(net, z, x):
    net.o.value = jnp.tanh(0.8 * net.o.value + z @ net.w_out.value)
    return net.o.value


@with_states("o", "p", "w_out", "w_up")
def nonlinear_between(net, z, x):
    net.p.value = 0.6 * net.p.value + z @ net.w_out.value
    net.o.value = 0.7 * net.o.value + jnp.tanh(net.p.value) @ net.w_up.value
    return net.o.value


@with_states("o", "w_out")
def nonlinear_before(net, z, x):
    net.o.value = 0.8 * net.o.value + jax.nn.softmax(z) @ net.w_out.value
    return net.o.value


@with_states("o", "p", "w_out")
def read_by_another(net, z, x):
    net.o.value = 0.8 * net.o.value + z @ net.w_out.value
    net.p.value = 0.5 * net.p.value * jnp.tanh(net.o.value)
    return net.o.value + net.p.value


@with_states("o", "w_out")
def decay_of_data(net, z, x):
    net.o.value = jax.nn.sigmoid(x.sum()) * net.o.value + z @ net.w_out.value
    return net.o.value


@jax.custom_vjp
def clipped(value):
    return value


clipped.defvjp(lambda value: (value, None), lambda _, cotangent: (jnp.clip(cotangent, -0.1, 0.1),))


@with_states("o", "w_out")
def clipped_on_the_way(net, z, x):
    net.o.value = 0.8 * net.o.value + clipped(z @ net.w_out.value)
    return net.o.value


@with_states("o", "w_out", "theta")
def plain_inside(net, z, x):
    """The parameter in what is filtered has no mark."""
    net.o.value = 0.8 * net.o.value + jnp.tanh(z - net.theta.value) @ net.w_out.value
    return net.o.value


@with_states("both", "w_out", "w_two")
def in_one_state(net, z, x):
    first, second = z @ net.w_out.value, z @ net.w_two.value
    net.both.value = 0.8 * net.both.value + jnp.stack([first, second], axis=-1)
    return net.both.value.sum(-1)


WEIGHTS = {
    "w_in": values(3, INPUTS, H),
    "w_out": values(4, H, OUTPUTS),
    "w_two": values(5, H, OUTPUTS),
    "w_long": values(6, 2 * H + 1, OUTPUTS),
    "w_up": values(7, OUTPUTS, OUTPUTS),
    "up": values(8, OUTPUTS, OUTPUTS),
    "b": values(9, OUTPUTS),
    "gain": 1 + values(10, H, scale=0.2),
    "k": np.asarray(1.1),
    "s": np.asarray(0.4),
    "tau": np.asarray(2.5),
    "d": np.linspace(0.6, 0.9, OUTPUTS),
    "theta": values(12, H, scale=0.3),
}
FIXED = {"back": values(11, H, OUTPUTS), "on": np.asarray(1.0)}
STATES = {
    "h": (H, 0.0),
    "a": (H, 0.0),
    "g": (H, 0.2),
    "o": (OUTPUTS, 0.5),
    "p": (OUTPUTS, -0.4),
    "q": (OUTPUTS, 0.3),
    "both": ((OUTPUTS, 2), 0.3),
}


class Net(brainstate.nn.Module):
    """A layer and a readout, with their weights and states."""

    def __init__(self, layer, readout):
        super().__init__()
        self.layer, self.readout = layer, readout
        names = {*layer.states, *readout.states}
        self.own = [name for name in STATES if name in names]
        for name in WEIGHTS:
            if name in names:
                setattr(self, name, brainstate.ParamState(jnp.asarray(WEIGHTS[name])))
        for name in FIXED:
            if name in names:
                setattr(self, name, brainstate.State(jnp.asarray(FIXED[name])))

    def init_state(self, batch_size=None):
        for name in self.own:
            size, start = STATES[name]
            shape = (*(() if batch_size is None else (batch_size,)), *np.atleast_1d(size))
            kind = brainstate.HiddenState if np.ndim(size) == 0 else brainstate.HiddenGroupState
            setattr(self, name, kind(jnp.full(shape, start)))

    def update(self, x):
        return self.readout(self, self.layer(self, x), x)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model, how many filters it gets, or why its readout gets none, and what is exact then."""

    layer: Callable
    readout: Callable
    filters: int = 0
    why: str = ""
    exact: tuple[str, ...] = ()

    @property
    def name(self):
        return f"{self.layer.__name__}-{self.readout.__name__}"

    def module(self):
        return Net(self.layer, self.readout)


LINEAR = [
    Row(rates, plain, 1),
    Row(lif, plain, 1),
    Row(alif, with_everything, 3),
    Row(lif, in_small_steps, 3),
    Row(alif, several, 3),
    Row(rates, of_several, 4),
    Row(lif, marked_decay, 2),
    Row(alif, with_feedback, 2),
]
ODD = [
    Row(rates, seen_by_another, 1),
    Row(decaying, of_the_layer, 3),
    Row(lif, wrapped, 1),
    Row(rates, of_thresholds, 1),
]
"""Linear ones that are written in another way."""
OTHERS = [
    Row(rates, decay_per_unit, why="multiplied by one scalar"),
    Row(lif, nonlinear_inside, why="not linear in its previous value"),
    Row(alif, nonlinear_between, 1, why="'o' reads it", exact=("w_up",)),
    Row(rates, nonlinear_before, why="elementwise function"),
    Row(rates, read_by_another, why="'p' reads it"),
    Row(rates, clipped_on_the_way, why="elementwise function"),
    Row(rates, decay_of_data, why="not linear in its previous value"),
    Row(rates, in_one_state, why="a part of a `HiddenGroupState`"),
    Row(lif, read_late, why="depend on its previous value"),
    Row(rates, cascade, 1, why="'o' reads it", exact=("w_out", "w_up", "b")),
    Row(alif, synapse_and_unit, why="a chain of readouts has no filters"),
    Row(alif, twice, why="depend on its previous value"),
]

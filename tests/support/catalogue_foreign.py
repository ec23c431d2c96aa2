"""Models of the catalogue from other libraries, and layers of `braintrace.nn`."""

import functools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from catalogue_models import BATCH, INPUTS, OUTPUTS, Cell, H, add, spike

import braintrace
from braintrace import nn

VMAPPED = (("vmap", True),)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0]), float)


# --- layers of braintrace.nn ----------------------------------------------------------------


class ReadOut(brainstate.nn.Module):
    """A cell in front of an ordinary readout."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.w_out = brainstate.ParamState(draw(5, H, OUTPUTS))

    def update(self, x):
        return self.cell(x) @ self.w_out.value


class Filtered(Cell):
    """A layer that feeds a leaky state."""

    def __init__(self, layer):
        self.weights = {"w_out": (int(np.prod(layer.out_size)), OUTPUTS)}
        self.states_of = {"h": tuple(layer.out_size)}
        super().__init__()
        self.layer = layer

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x))
        return self.h.value.reshape(len(x), -1) @ self.w_out.value


class Driven(brainstate.nn.Module):
    """Neurons that inputs drive, and their own spikes if they are recurrent."""

    def __init__(self, neuron, is_recurrent=False):
        super().__init__()
        size = INPUTS + H * is_recurrent
        self.dense = nn.Linear(size, H, w_init=draw(3, size, H) * 20 * u.mA, b_init=None)
        self.neuron, self.is_recurrent = neuron, is_recurrent
        self.readout = nn.LeakyRateReadout(H, OUTPUTS)

    def update(self, x):
        with brainstate.environ.context(dt=1.0 * u.ms):
            if self.is_recurrent:
                x = jnp.concatenate([x, self.neuron.get_spike()], axis=-1)
            return self.readout(self.neuron(self.dense(x)))


def sparse_layer():
    matrix = u.sparse.CSR.fromdense(jnp.asarray(np.eye(INPUTS, H) + np.eye(INPUTS, H, 1)))
    return nn.SparseLinear(matrix, np.ones(H), INPUTS)


def layer_of(name):
    return ReadOut(getattr(nn, name)(INPUTS, H))


for name in ("GRUCell", "LSTMCell", "MGUCell", "MinimalRNNCell"):
    add(f"nn.{name}", functools.partial(layer_of, name))
for name in ("LRUCell", "RTUCell", "MiniGRU"):
    add(f"nn.{name}", functools.partial(layer_of, name), is_exact=True)
add("nn.SparseLinear", lambda: Filtered(sparse_layer()), is_exact=True)
add("nn.Conv2d", lambda: Filtered(nn.Conv2d((3, 2, 2), 2, 2)), shape=(3, 2, 2), is_exact=True)
add(
    "nn.LoRA",
    lambda: Filtered(nn.LoRA(INPUTS, 2, H, base_module=nn.Linear(INPUTS, H))),
    is_exact=True,
)
add("nn.LIF", lambda: Driven(nn.LIF(H, spk_fun=spike)), is_exact=True)
add("nn.ALIF, recurrent", lambda: Driven(nn.ALIF(H, spk_fun=spike), is_recurrent=True))


# --- Flax and Equinox -----------------------------------------------------------------------


def flax_nnx():
    with warnings.catch_warnings():  # Flax reads names that the oldest JAX has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from flax import nnx
    return nnx


def flax_cell(name):
    nnx = flax_nnx()

    cell = getattr(nnx, name)(INPUTS, H, dtype=float, param_dtype=float, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(cell)
    carry = cell.initialize_carry((BATCH, INPUTS), nnx.Rngs(0))
    carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, float), carry)

    def step(params, carry, x):
        return nnx.merge(graphdef, params)(carry, x)

    return braintrace.from_function(step, params, carry)


def flax_network():
    """A cell with dropout and a readout; random counts are carried along."""
    nnx = flax_nnx()

    class Network(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": float, "param_dtype": float, "rngs": rngs}
            self.cell = nnx.GRUCell(INPUTS, H, **options)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.readout = nnx.Linear(H, OUTPUTS, **options)

        def __call__(self, h, x):
            h, output = self.cell(h, x)
            return h, self.readout(self.dropout(output))

    graphdef, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, state, x):
        h, rest = state
        network = nnx.merge(graphdef, params, rest)
        h, output = network(h, x)
        return (h, nnx.state(network, nnx.Not(nnx.Param))), output

    return braintrace.from_function(step, params, (jnp.zeros((BATCH, H)), rest))


def equinox_cell(name):
    import equinox as eqx

    cell = getattr(eqx.nn, name)(INPUTS, H, dtype=jnp.float64, key=jax.random.key(0))
    h = jnp.zeros(H)

    def step(cell, state, x):
        state = cell(x, state)
        return state, state[0] if isinstance(state, tuple) else state

    return braintrace.from_function(step, cell, (h, h) if name == "LSTMCell" else h)


for name in ("GRUCell", "OptimizedLSTMCell", "SimpleCell"):
    add(f"flax.nnx.{name}", functools.partial(flax_cell, name))
add("flax.nnx, a network with dropout", flax_network)
for name in ("GRUCell", "LSTMCell"):
    add(f"equinox.nn.{name}", functools.partial(equinox_cell, name), options=VMAPPED)


# --- plain JAX ------------------------------------------------------------------------------


def gated_function():
    """Fused gates, a transposed weight, a gain, and a jitted step with its readout."""
    params = {"w": draw(1, INPUTS, 2 * H), "r": draw(2, 2 * H, H), "out": draw(5, H, OUTPUTS)}
    params |= {"bias": jnp.zeros(2 * H), "gain": jnp.ones(H)}

    @jax.jit
    def step(params, h, x):
        gates = x @ params["w"] + h @ params["r"].T + params["bias"]
        gate, value = jnp.split(gates, 2, axis=-1)
        gate = jax.nn.sigmoid(gate)
        h = gate * h + (1 - gate) * jnp.tanh(value) * params["gain"]
        return h, h @ params["out"]

    return braintrace.from_function(step, params, jnp.zeros((BATCH, H)))


def spiking_function():
    """Recurrent adaptive neurons with a leaky readout, the network of the field."""
    params = {"w": draw(1, INPUTS + H, H) * 2, "out": draw(2, H, OUTPUTS), "b": jnp.zeros(OUTPUTS)}

    def step(params, state, x):
        z = spike(state["v"] - 0.6 - 0.2 * state["a"])
        v = 0.95 * state["v"] + jnp.concatenate([x, z], -1) @ params["w"] - 0.6 * z
        a = 0.99 * state["a"] + z
        out = spike(v - 0.6 - 0.2 * a)
        y = 0.9 * state["y"] + out @ params["out"] + params["b"]
        return {"v": v, "a": a, "y": y}, y

    zeros = {name: jnp.zeros((BATCH, H)) for name in ("v", "a")}
    return braintrace.from_function(step, params, zeros | {"y": jnp.zeros((BATCH, OUTPUTS))})


def linear_readout():
    """An input-driven neuron with a leaky readout."""
    params = {"w": draw(1, INPUTS, H) * 2, "out": draw(2, H, OUTPUTS)}

    def step(params, state, x):
        v, y = state
        z = spike(v - 0.5)
        v = 0.9 * v + x @ params["w"] - z
        y = 0.8 * y + spike(v - 0.5) @ params["out"]
        return (v, y), y

    start = (jnp.zeros((BATCH, H)), jnp.zeros((BATCH, OUTPUTS)))
    return braintrace.from_function(step, params, start)


def state_space_function():
    """A complex diagonal state space."""
    params = {"nu": jnp.linspace(-2.0, 0.0, H), "theta": jnp.linspace(0.1, 1.0, H)}
    params |= {"b": draw(1, INPUTS, 2 * H), "c": draw(2, 2 * H, OUTPUTS)}

    def step(params, state, x):
        re, im = state
        radius = jnp.exp(-jnp.exp(params["nu"]))
        cos, sin = radius * jnp.cos(params["theta"]), radius * jnp.sin(params["theta"])
        drive = x @ params["b"]
        new = cos * re - sin * im + drive[:, :H], sin * re + cos * im + drive[:, H:]
        return new, jnp.concatenate(new, -1) @ params["c"]

    return braintrace.from_function(step, params, (jnp.zeros((BATCH, H)),) * 2)


def dale_function():
    """Excitatory and inhibitory populations, with signs that the weights keep."""
    params = {"w_in": draw(1, INPUTS, H), "w_rec": draw(2, H, H), "out": draw(3, H, OUTPUTS)}
    signs = jnp.asarray([1.0, 1.0, 1.0, -1.0])[:, None]

    def step(params, h, x):
        rates = jax.nn.relu(h)
        recurrent = rates @ (signs * jnp.abs(params["w_rec"]))
        h = 0.8 * h + 0.2 * (x @ params["w_in"] + recurrent)
        return h, jax.nn.relu(h) @ params["out"]

    return braintrace.from_function(step, params, jnp.zeros((BATCH, H)))


add("plain JAX, gates", gated_function)
add("plain JAX, recurrent ALIF with a leaky readout", spiking_function)
add("plain JAX, neurons with a leaky readout", linear_readout, is_exact=True)
add("plain JAX, state space", state_space_function, is_exact=True)
add("plain JAX, Dale", dale_function)


# --- brainpy --------------------------------------------------------------------------------


class BrainpyNetwork(brainstate.nn.Module):
    """Neurons of brainpy behind a layer of brainstate."""

    def __init__(self, name):
        super().__init__()
        neurons = pytest.importorskip("brainpy").state
        weight = draw(1, INPUTS, H) * 30 * u.mA
        self.dense = nn.Linear(INPUTS, H, w_init=weight, b_init=None)
        self.neuron = getattr(neurons, name)(H, spk_fun=spike)
        self.w_out = brainstate.ParamState(draw(5, H, OUTPUTS))

    def update(self, x):
        with brainstate.environ.context(dt=1.0 * u.ms):
            return self.neuron(self.dense(x)) @ self.w_out.value


for name in ("LIF", "ALIF"):
    add(f"brainpy.state.{name}", functools.partial(BrainpyNetwork, name), is_exact=True)

"""The networks that are measured, written once for every way to run them.

A step has three parts, so that the same text serves as a brainstate model, as plain JAX and as
the source of the oracles:

    ys      = drive(ops, parameters, states, x)     the operations that learn online
    states' = cell(states, ys)                      position by position
    output  = readout(parameters, states')          plain

`ops` is `Marked` (the library's operations) or `Plain` (plain JAX, for BPTT). Every array of `ys`
fits the states position by position.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

LEAK = 0.9
Arrays = dict[str, Any]


class Marked:
    """The operations of the library that is being timed."""

    def matmul(self, name: str, x: Any, weight: Any) -> Any:
        return braintrace.matmul(x, weight)


class Plain:
    """Plain JAX, which keeps the inputs of operations by name."""

    def __init__(self) -> None:
        self.inputs: Arrays = {}

    def matmul(self, name: str, x: Any, weight: Any) -> Any:
        self.inputs[name] = x
        return x @ weight


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A network with an ordinary readout.

    ``scales`` has the shape and the standard deviation of the initial values by parameter, and
    ``states`` the units by state. `drive`, `cell` and `readout` are the parts of a step. Where
    inputs and units are spikes, `events` returns those of the units.
    """

    name: str
    inputs: int
    outputs: int
    scales: Mapping[str, tuple[tuple[int, ...], float]]
    states: Mapping[str, int]
    drive: Callable[[Any, Arrays, Arrays, Any], Arrays]
    cell: Callable[[Arrays, Arrays], Arrays]
    readout: Callable[[Arrays, Arrays], Any]
    events: Callable[[Arrays], Any] | None = None

    def parameters(self) -> Arrays:
        """Return the initial parameters; the same at every call."""
        keys = jax.random.split(jax.random.key(0), len(self.scales))
        return {
            name: scale * jax.random.normal(key, shape)
            for key, (name, (shape, scale)) in zip(keys, self.scales.items(), strict=True)
        }

    def start(self, batch: int) -> Arrays:
        return {name: jnp.zeros((batch, size)) for name, size in self.states.items()}

    def data(self, steps: int, batch: int) -> tuple[Any, Any]:
        """Return inputs and targets, time first."""
        keys = jax.random.split(jax.random.key(1), 2)
        shape = (steps, batch, self.inputs)
        if self.events is None:
            xs = jax.random.normal(keys[0], shape)
        else:
            xs = jax.random.bernoulli(keys[0], 0.1, shape).astype(jnp.float32)
        return xs, jax.random.normal(keys[1], (steps, batch, self.outputs))

    def model(self) -> "Model":
        """Return a new module; its parameters are the same at every call."""
        return Model(self)

    def step(self, ops: Any, parameters: Arrays, states: Arrays, x: Any) -> tuple[Arrays, Any]:
        """Return the states after a step, and its output."""
        new = self.cell(states, self.drive(ops, parameters, states, x))
        return new, self.readout(parameters, new)


class Model(brainstate.nn.Module):
    """A network as a brainstate module that calls the library's operations."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        for name, value in network.parameters().items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        for name, value in self.network.start(batch_size or 1).items():
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x: Any) -> Any:
        parameters = {name: getattr(self, name).value for name in self.network.scales}
        states = {name: getattr(self, name).value for name in self.network.states}
        states, output = self.network.step(Marked(), parameters, states, x)
        for name, value in states.items():
            getattr(self, name).value = value
        return output


def squared_error(output: Any, target: Any) -> Any:
    return jnp.mean((output - target) ** 2)


def sequence_loss(network: Network, ops: Any, parameters: Arrays, xs: Any, targets: Any) -> Any:
    def step(states: Arrays, now: Any) -> Any:
        x, target = now
        states, output = network.step(ops, parameters, states, x)
        return states, squared_error(output, target)

    start = network.start(xs.shape[1])
    return jnp.mean(jax.lax.scan(step, start, (xs, targets))[1])


def _leaky_cell(states: Arrays, ys: Arrays) -> Arrays:
    return {"h": LEAK * states["h"] + (1 - LEAK) * jnp.tanh(ys["drive"])}


def _linear_readout(parameters: Arrays, states: Arrays) -> Any:
    return states["h"] @ parameters["w_out"]


def _matrix(rows: int, columns: int) -> tuple[tuple[int, int], float]:
    return (rows, columns), rows**-0.5


def dense(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        recurrent = ops.matmul("w_rec", states["h"], p["w_rec"])
        return {"drive": ops.matmul("w_in", x, p["w_in"]) + recurrent}

    weights = {"w_in": _matrix(inputs, hidden), "w_rec": _matrix(hidden, hidden)}
    weights["w_out"] = _matrix(hidden, outputs)
    parts = drive, _leaky_cell, _linear_readout
    return Network("dense", inputs, outputs, weights, {"h": hidden}, *parts)


def lstm(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return an LSTM with one matrix for its four gates."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        both = jnp.concatenate([x, states["h"]], axis=-1)
        gates = ops.matmul("gates", both, p["gates"])
        return dict(zip("ifgo", jnp.split(gates, 4, axis=-1), strict=True))

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        i, f, o = (jax.nn.sigmoid(ys[gate]) for gate in "ifo")
        c = f * states["c"] + i * jnp.tanh(ys["g"])
        return {"c": c, "h": o * jnp.tanh(c)}

    weights = {"gates": _matrix(inputs + hidden, 4 * hidden), "w_out": _matrix(hidden, outputs)}
    states = {"c": hidden, "h": hidden}
    return Network("lstm", inputs, outputs, weights, states, drive, cell, _linear_readout)


def gru(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return a GRU with the reset gate after the recurrent product, as in cuDNN."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        from_x = jnp.split(ops.matmul("w_in", x, p["w_in"]), 3, axis=-1)
        from_h = jnp.split(ops.matmul("w_rec", states["h"], p["w_rec"]), 3, axis=-1)
        z, r = (a + b for a, b in zip(from_x[:2], from_h[:2], strict=True))
        return {"z": z, "r": r, "n_in": from_x[2], "n_rec": from_h[2]}

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        z, r = jax.nn.sigmoid(ys["z"]), jax.nn.sigmoid(ys["r"])
        new = jnp.tanh(ys["n_in"] + r * ys["n_rec"])
        return {"h": states["h"] + z * (new - states["h"])}

    weights = {"w_in": _matrix(inputs, 3 * hidden), "w_rec": _matrix(hidden, 3 * hidden)}
    weights["w_out"] = _matrix(hidden, outputs)
    states = {"h": hidden}
    return Network("gru", inputs, outputs, weights, states, drive, cell, _linear_readout)


@jax.custom_jvp
def spike(v: Any) -> Any:
    """Return 1 where a neuron is above its threshold; its derivative is smooth."""
    return (v >= 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + 2 * jnp.abs(v)) ** 2


def alif(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return recurrent adaptive leaky integrate-and-fire neurons."""

    def spikes(states: Arrays) -> Any:
        return spike(states["V"] - 1 - 0.3 * states["a"])

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        recurrent = ops.matmul("w_rec", spikes(states), p["w_rec"])
        return {"current": ops.matmul("w_in", x, p["w_in"]) + recurrent}

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        z = spikes(states)
        V = 0.9 * states["V"] - z + ys["current"]
        return {"V": V, "a": 0.95 * states["a"] + z}

    def readout(parameters: Arrays, states: Arrays) -> Any:
        return spikes(states) @ parameters["w_out"]

    weights = {"w_in": ((inputs, hidden), 2.0 * (0.1 * inputs) ** -0.5 / 4)}
    weights |= {"w_rec": _matrix(hidden, hidden), "w_out": _matrix(hidden, outputs)}
    states = {"V": hidden, "a": hidden}
    return Network("alif", inputs, outputs, weights, states, drive, cell, readout, spikes)


NETWORKS: dict[str, Callable[..., Network]] = {
    make.__name__: make for make in (dense, gru, lstm, alif)
}

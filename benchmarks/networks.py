"""The networks that are measured, written once for every way to run them.

A step has three parts, so that the same text serves as a brainstate model, as plain JAX and as
the source of the oracles:

    ys      = drive(ops, parameters, states, x)     the operations that learn online
    states' = cell(states, ys)                      position by position
    output  = readout(parameters, states')          plain

`ops` is `MarkedOps` (the library's operations) or `PlainOps` (plain JAX, for BPTT). Every array
of `ys` fits the states position by position.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LEAK = 0.9
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Where the entries of a sparse matrix stand, row by row."""

    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network with an ordinary readout.

    Attributes
    ----------
    name
        For tables.
    input_shape, outputs
        Of one sample.
    scales
        ``{parameter: (shape, standard deviation of the initial values)}``.
    states
        ``{state: shape}``, of one sample.
    drive, cell, readout
        The parts of a step; see the module's docstring.
    events
        Share of the units that are active, where inputs and units are spikes.
    """

    name: str
    input_shape: tuple[int, ...]
    outputs: int
    scales: Mapping[str, tuple[tuple[int, ...], float]]
    states: Mapping[str, tuple[int, ...]]
    drive: Callable[[Any, Arrays, Arrays, Any], Arrays]
    cell: Callable[[Arrays, Arrays], Arrays]
    readout: Callable[[Arrays, Arrays], Any]
    events: Callable[[Arrays], Any] | None = None

    def parameters(self, dtype: Any = jnp.float32) -> Arrays:
        """Return the initial parameters; the same at every call."""
        keys = jax.random.split(jax.random.key(0), len(self.scales))
        return {
            name: (scale * jax.random.normal(key, shape)).astype(dtype)
            for key, (name, (shape, scale)) in zip(keys, self.scales.items(), strict=True)
        }

    def start(self, batch: int, dtype: Any = jnp.float32) -> Arrays:
        """Return the states before the first step."""
        return {name: jnp.zeros((batch, *shape), dtype) for name, shape in self.states.items()}

    def data(self, steps: int, batch: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        """Return inputs and targets, time first."""
        keys = jax.random.split(jax.random.key(1), 2)
        shape = (steps, batch, *self.input_shape)
        if self.events is None:
            xs = jax.random.normal(keys[0], shape).astype(dtype)
        else:
            xs = jax.random.bernoulli(keys[0], 0.1, shape).astype(dtype)
        return xs, jax.random.normal(keys[1], (steps, batch, self.outputs)).astype(dtype)

    def step(self, ops: Any, parameters: Arrays, states: Arrays, x: Any) -> tuple[Arrays, Any]:
        """Return the states after a step, and its output."""
        new = self.cell(states, self.drive(ops, parameters, states, x))
        return new, self.readout(parameters, new)


def squared_error(output: Any, target: Any) -> Any:
    """Return the loss of one step."""
    return jnp.mean((output - target) ** 2)


def sequence_loss(network: Network, ops: Any, parameters: Arrays, xs: Any, targets: Any) -> Any:
    """Return the mean of the losses of all steps."""

    def step(states: Arrays, now: Any) -> Any:
        x, target = now
        states, output = network.step(ops, parameters, states, x)
        return states, squared_error(output, target)

    start = network.start(xs.shape[1], xs.dtype)
    return jnp.mean(jax.lax.scan(step, start, (xs, targets))[1])


def _leaky_cell(states: Arrays, ys: Arrays) -> Arrays:
    return {"h": LEAK * states["h"] + (1 - LEAK) * jnp.tanh(ys["drive"])}


def _linear_readout(parameters: Arrays, states: Arrays) -> Any:
    h = states["h"]
    return h.reshape(h.shape[0], -1) @ parameters["w_out"]


def dense(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return a leaky tanh RNN."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        recurrent = ops.matmul("w_rec", ops.mixing(states["h"]), p["w_rec"])
        return {"drive": ops.matmul("w_in", x, p["w_in"]) + recurrent}

    return Network(
        name="dense",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((inputs, hidden), inputs**-0.5),
            "w_rec": ((hidden, hidden), hidden**-0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"h": (hidden,)},
        drive=drive,
        cell=_leaky_cell,
        readout=_linear_readout,
    )


def conv(size: int = 8, channels: int = 16, inputs: int = 3, outputs: int = 10) -> Network:
    """Return a leaky tanh RNN of feature maps with 3 x 3 kernels."""
    features = (channels, size, size)
    units = math.prod(features)

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        recurrent = ops.conv("k_rec", ops.mixing(states["h"]), p["k_rec"])
        return {"drive": ops.conv("k_in", x, p["k_in"]) + recurrent}

    return Network(
        name="conv",
        input_shape=(inputs, size, size),
        outputs=outputs,
        scales={
            "k_in": ((channels, inputs, 3, 3), (9 * inputs) ** -0.5),
            "k_rec": ((channels, channels, 3, 3), (9 * channels) ** -0.5),
            "w_out": ((units, outputs), units**-0.5),
        },
        states={"h": features},
        drive=drive,
        cell=_leaky_cell,
        readout=_linear_readout,
    )


def lora(inputs: int = 64, hidden: int = 256, rank: int = 8, outputs: int = 10) -> Network:
    """Return a leaky tanh RNN with frozen weights and low-rank weights that learn."""
    keys = jax.random.split(jax.random.key(2), 2)
    frozen_in = np.asarray(jax.random.normal(keys[0], (inputs, hidden)) * inputs**-0.5)
    frozen_rec = np.asarray(jax.random.normal(keys[1], (hidden, hidden)) * hidden**-0.5)

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        h = ops.mixing(states["h"])
        y = x @ jnp.asarray(frozen_in, x.dtype) + h @ jnp.asarray(frozen_rec, x.dtype)
        y += ops.lora_matmul("in", x, p["B_in"], p["A_in"])
        return {"drive": y + ops.lora_matmul("rec", h, p["B_rec"], p["A_rec"])}

    return Network(
        name="lora",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "B_in": ((inputs, rank), inputs**-0.5),
            "A_in": ((rank, hidden), 0.3 * rank**-0.5),
            "B_rec": ((hidden, rank), hidden**-0.5),
            "A_rec": ((rank, hidden), 0.3 * rank**-0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"h": (hidden,)},
        drive=drive,
        cell=_leaky_cell,
        readout=_linear_readout,
    )


def _random_sparsity(shape: tuple[int, int], density: float, seed: int) -> Sparsity:
    rows, columns = np.nonzero(np.random.default_rng(seed).random(shape) < density)
    return Sparsity(rows, columns, shape)


def sparse(inputs: int = 64, hidden: int = 256, density: float = 0.1, outputs: int = 10) -> Network:
    """Return a leaky tanh RNN with sparse weights."""
    into, among = (
        _random_sparsity((rows, hidden), density, seed)
        for seed, rows in enumerate((inputs, hidden))
    )

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        recurrent = ops.sparse_matmul("w_rec", ops.mixing(states["h"]), p["w_rec"], among)
        return {"drive": ops.sparse_matmul("w_in", x, p["w_in"], into) + recurrent}

    return Network(
        name="sparse",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((into.rows.size,), (density * inputs) ** -0.5),
            "w_rec": ((among.rows.size,), (density * hidden) ** -0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"h": (hidden,)},
        drive=drive,
        cell=_leaky_cell,
        readout=_linear_readout,
    )


def element_wise(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return an IndRNN: every unit is connected with itself."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        u = jnp.broadcast_to(ops.element_wise("u", p["u"]), states["h"].shape)
        return {"drive": ops.matmul("w_in", x, p["w_in"]), "u": u}

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        return {"h": jnp.tanh(ys["drive"] + ys["u"] * states["h"])}

    return Network(
        name="element_wise",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((inputs, hidden), inputs**-0.5),
            "u": ((hidden,), 0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"h": (hidden,)},
        drive=drive,
        cell=cell,
        readout=_linear_readout,
    )


def lstm(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return an LSTM with one matrix for its four gates."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        both = jnp.concatenate([x, ops.mixing(states["h"])], axis=-1)
        gates = ops.matmul("gates", both, p["gates"])
        return dict(zip("ifgo", jnp.split(gates, 4, axis=-1), strict=True))

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        i, f, o = (jax.nn.sigmoid(ys[gate]) for gate in "ifo")
        c = f * states["c"] + i * jnp.tanh(ys["g"])
        return {"c": c, "h": o * jnp.tanh(c)}

    return Network(
        name="lstm",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "gates": ((inputs + hidden, 4 * hidden), (inputs + hidden) ** -0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"c": (hidden,), "h": (hidden,)},
        drive=drive,
        cell=cell,
        readout=_linear_readout,
    )


def gru(inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Network:
    """Return a GRU with the reset gate after the recurrent product, as in cuDNN."""

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        from_x = jnp.split(ops.matmul("w_in", x, p["w_in"]), 3, axis=-1)
        from_h = jnp.split(ops.matmul("w_rec", ops.mixing(states["h"]), p["w_rec"]), 3, axis=-1)
        z, r = (a + b for a, b in zip(from_x[:2], from_h[:2], strict=True))
        return {"z": z, "r": r, "n_in": from_x[2], "n_rec": from_h[2]}

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        z, r = jax.nn.sigmoid(ys["z"]), jax.nn.sigmoid(ys["r"])
        new = jnp.tanh(ys["n_in"] + r * ys["n_rec"])
        return {"h": states["h"] + z * (new - states["h"])}

    return Network(
        name="gru",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((inputs, 3 * hidden), inputs**-0.5),
            "w_rec": ((hidden, 3 * hidden), hidden**-0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"h": (hidden,)},
        drive=drive,
        cell=cell,
        readout=_linear_readout,
    )


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
        recurrent = ops.matmul("w_rec", ops.mixing(spikes(states)), p["w_rec"])
        return {"current": ops.matmul("w_in", x, p["w_in"]) + recurrent}

    def cell(states: Arrays, ys: Arrays) -> Arrays:
        z = spikes(states)
        V = 0.9 * states["V"] - z + ys["current"]
        return {"V": V, "a": 0.95 * states["a"] + z}

    def readout(parameters: Arrays, states: Arrays) -> Any:
        return spikes(states) @ parameters["w_out"]

    return Network(
        name="alif",
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((inputs, hidden), 2.0 * (0.1 * inputs) ** -0.5 / 4),
            "w_rec": ((hidden, hidden), hidden**-0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={"V": (hidden,), "a": (hidden,)},
        drive=drive,
        cell=cell,
        readout=readout,
        events=spikes,
    )


NETWORKS: dict[str, Callable[..., Network]] = {
    make.__name__: make for make in (dense, conv, lora, sparse, element_wise, gru, lstm, alif)
}

"""Networks of the benchmarks, each as one pure step.

The same text runs as plain JAX, for backpropagation through time, and as a brainstate module with
ETP operations: a step calls the operations of `ops`, which is `Plain` or `Marked`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace

Arrays = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
LAYOUT = ("NHWC", "HWIO", "NHWC")


class Operations(Protocol):
    """Operations that a trained recurrent weight takes part in."""

    def matmul(self, x: Any, weight: Any) -> Any: ...
    def conv(self, x: Any, kernel: Any) -> Any: ...
    def sparse(self, x: Any, weight: Any, pattern: "Pattern") -> Any: ...
    def scale(self, weight: Any, function: Callable[[Any], Any]) -> Any: ...


class Marked:
    """ETP operations."""

    def matmul(self, x: Any, weight: Any) -> Any:
        return braintrace.matmul(x, weight)

    def conv(self, x: Any, kernel: Any) -> Any:
        return braintrace.conv(x, kernel, dimension_numbers=LAYOUT)

    def sparse(self, x: Any, weight: Any, pattern: "Pattern") -> Any:
        matrix = saiunit.sparse.CSR((weight, pattern.columns, pattern.ends), shape=pattern.shape)
        return braintrace.sparse_matmul(x, weight, sparse_mat=matrix)

    def scale(self, weight: Any, function: Callable[[Any], Any]) -> Any:
        return braintrace.element_wise(weight, function)


class Plain:
    """The same in plain JAX."""

    def matmul(self, x: Any, weight: Any) -> Any:
        return x @ weight

    def conv(self, x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=LAYOUT)

    def sparse(self, x: Any, weight: Any, pattern: "Pattern") -> Any:
        terms = (x[:, pattern.rows] * weight).T
        return jax.ops.segment_sum(terms, pattern.columns, pattern.shape[1]).T

    def scale(self, weight: Any, function: Callable[[Any], Any]) -> Any:
        return function(weight)


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A recurrent network with its loss.

    Attributes
    ----------
    parameters
        Draws the initial parameters, the same at every call.
    states
        Shape of each hidden state, without the batch axis.
    inputs
        Shape of an input, without time and batch.
    step
        ``(ops, parameters, states, x) -> (states, output)``.
    outputs
        Number of outputs.
    is_spiking
        Whether inputs are spikes; the loss is then a cross-entropy.
    """

    parameters: Callable[[], Arrays]
    states: Shapes
    inputs: tuple[int, ...]
    step: Callable[[Operations, Arrays, Arrays, Any], tuple[Arrays, Any]]
    outputs: int
    is_spiking: bool = False

    def start(self, batch: int) -> Arrays:
        return {name: jnp.zeros((batch, *shape)) for name, shape in self.states.items()}

    def data(self, steps: int, batch: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(1))
        shape = (steps, batch, *self.inputs)
        if self.is_spiking:
            labels = jax.random.randint(keys[1], (batch,), 0, self.outputs)
            spikes = jax.random.bernoulli(keys[0], 0.05, shape).astype(float)
            return spikes, jnp.broadcast_to(labels, (steps, batch))
        targets = jax.random.normal(keys[1], (steps, batch, self.outputs))
        return jax.random.normal(keys[0], shape), targets

    def loss(self, output: Any, target: Any) -> Any:
        if self.is_spiking:
            scores = jax.nn.log_softmax(output)
            return -jnp.mean(jnp.take_along_axis(scores, target[:, None], axis=1))
        return jnp.mean((output - target) ** 2)


class Model(brainstate.nn.Module):
    """A network as a brainstate module with ETP operations."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.names = tuple(network.parameters())
        for name, value in network.parameters().items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        for name, value in self.network.start(batch_size or 1).items():
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x: Any) -> Any:
        parameters = {name: getattr(self, name).value for name in self.names}
        states = {name: getattr(self, name).value for name in self.network.states}
        states, output = self.network.step(Marked(), parameters, states, x)
        for name, value in states.items():
            getattr(self, name).value = value
        return output


def draw(shapes: Shapes, scale: float = 1.0) -> Callable[[], Arrays]:
    """Return a function that draws normal weights with a standard deviation of 1 / sqrt(inputs)."""

    def parameters() -> Arrays:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: scale * jax.random.normal(key, shape) / np.prod(shape[:-1]) ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    return parameters


def leaky(
    inputs: int = 64, hidden: int = 128, outputs: int = 10, layers: int = 1, delay: int = 0
) -> Network:
    """Return leaky layers; with ``delay``, the outputs of each arrive this many steps later."""

    def cell(ops: Operations, w: list[Any], h: list[Any], x: Any) -> tuple[list[Any], Any]:
        drive = ops.matmul(x, w[0]) + ops.matmul(h[0], w[1])
        new = 0.9 * h[0] + 0.1 * jnp.tanh(drive)
        return [new], new

    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, hidden), (hidden, hidden)]

    return _stack(cell, shapes, 1, inputs, hidden, outputs, layers, delay)


def gru(inputs: int = 64, hidden: int = 128, outputs: int = 10, layers: int = 1) -> Network:
    """Return a GRU with the reset gate after the recurrent product, as in cuDNN."""

    def cell(ops: Operations, w: list[Any], h: list[Any], x: Any) -> tuple[list[Any], Any]:
        from_x = jnp.split(ops.matmul(x, w[0]), 3, axis=-1)
        from_h = jnp.split(ops.matmul(h[0], w[1]), 3, axis=-1)
        z = jax.nn.sigmoid(from_x[0] + from_h[0])
        r = jax.nn.sigmoid(from_x[1] + from_h[1])
        new = h[0] + z * (jnp.tanh(from_x[2] + r * from_h[2]) - h[0])
        return [new], new

    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, 3 * hidden), (hidden, 3 * hidden)]

    return _stack(cell, shapes, 1, inputs, hidden, outputs, layers)


def lstm(inputs: int = 64, hidden: int = 128, outputs: int = 10, layers: int = 1) -> Network:
    """Return an LSTM with one matrix for its four gates."""

    def cell(ops: Operations, w: list[Any], h: list[Any], x: Any) -> tuple[list[Any], Any]:
        gates = ops.matmul(jnp.concatenate([x, h[1]], axis=-1), w[0])
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * h[0] + jax.nn.sigmoid(i) * jnp.tanh(g)
        new = jax.nn.sigmoid(o) * jnp.tanh(c)
        return [c, new], new

    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n + hidden, 4 * hidden)]

    return _stack(cell, shapes, 2, inputs, hidden, outputs, layers)


def lru(inputs: int = 64, hidden: int = 128, outputs: int = 10, layers: int = 1) -> Network:
    """Return linear recurrent units: a complex diagonal recurrence, as two real states."""

    def cell(ops: Operations, w: list[Any], h: list[Any], x: Any) -> tuple[list[Any], Any]:
        real, imaginary = jnp.split(ops.matmul(x, w[0]), 2, axis=-1)
        cos = ops.scale((w[1], w[2]), lambda p: jax.nn.sigmoid(p[0] + 3) * jnp.cos(p[1]))
        sin = ops.scale((w[1], w[2]), lambda p: jax.nn.sigmoid(p[0] + 3) * jnp.sin(p[1]))
        new = [cos * h[0] - sin * h[1] + real, sin * h[0] + cos * h[1] + imaginary]
        return new, jnp.tanh(jnp.concatenate(new, axis=-1) @ w[3])

    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, 2 * hidden), (hidden,), (hidden,), (2 * hidden, hidden)]

    return _stack(cell, shapes, 2, inputs, hidden, outputs, layers)


def _stack(
    cell: Callable[..., tuple[list[Any], Any]],
    shapes: Callable[[int], list[tuple[int, ...]]],
    count: int,
    inputs: int,
    hidden: int,
    outputs: int,
    layers: int,
    delay: int = 0,
) -> Network:
    """Return layers of a cell with ``count`` states, and an ordinary readout."""
    weights = {
        f"w{layer}{i}": shape
        for layer in range(layers)
        for i, shape in enumerate(shapes(hidden if layer else inputs))
    }
    states: dict[str, tuple[int, ...]] = {
        f"h{layer}{i}": (hidden,) for layer in range(layers) for i in range(count)
    }
    if delay:
        states |= {f"line{layer}": (delay, hidden) for layer in range(layers)}

    def step(ops: Operations, p: Arrays, h: Arrays, x: Any) -> tuple[Arrays, Any]:
        new: Arrays = {}
        for layer in range(layers):
            own = [p[name] for name in weights if name.startswith(f"w{layer}")]
            now = [h[f"h{layer}{i}"] for i in range(count)]
            after, x = cell(ops, own, now, x)
            new |= {f"h{layer}{i}": value for i, value in enumerate(after)}
            if delay:
                line, newest = h[f"line{layer}"], x[:, None]
                x, new[f"line{layer}"] = line[:, -1], jnp.concatenate([newest, line[:, :-1]], 1)
        return new, x @ p["out"]

    parameters = draw(weights | {"out": (hidden, outputs)})
    return Network(parameters, states, (inputs,), step, outputs)


@jax.custom_jvp
def spike(v: Any) -> Any:
    """Return 1 above the threshold, with a triangle as surrogate derivative."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (v,), (dv,) = primals, tangents
    return spike(v), dv * 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v))


def spiking(
    hidden: int = 128,
    adapts: bool = True,
    refractory: int = 0,
    inputs: int = 140,
    outputs: int = 20,
) -> Network:
    """Return recurrent LIF or ALIF neurons with a leaky readout, the network of the field.

    With ``refractory``, a neuron is silent for that many steps after a spike.
    """

    def threshold(h: Arrays) -> Any:
        return 0.6 + (0.2 * h["a"] if adapts else 0.0)

    def spikes(h: Arrays) -> Any:
        fired = spike(h["v"] - threshold(h))
        return jnp.where(h["r"] > 0, 0.0, fired) if refractory else fired

    def step(ops: Operations, p: Arrays, h: Arrays, x: Any) -> tuple[Arrays, Any]:
        z, new = spikes(h), {}
        drive = ops.matmul(jnp.concatenate([x, z], axis=-1), p["w"])
        new["v"] = 0.95 * h["v"] + drive - 0.6 * z
        if adapts:
            new["a"] = 0.99 * h["a"] + z
        if refractory:
            new["r"] = jnp.where(z > 0, float(refractory), jnp.maximum(h["r"] - 1, 0.0))
        new["y"] = 0.9 * h["y"] + spikes(new) @ p["out"] + p["bias"]
        return new, new["y"]

    shapes = {"w": (inputs + hidden, hidden), "out": (hidden, outputs), "bias": (outputs,)}
    names = ["v", *(["a"] if adapts else []), *(["r"] if refractory else [])]
    states = dict.fromkeys(names, (hidden,)) | {"y": (outputs,)}
    return Network(draw(shapes), states, (inputs,), step, outputs, is_spiking=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Places of the entries of a sparse matrix, in CSR order."""

    rows: Any
    columns: Any
    ends: Any
    shape: tuple[int, int]


def sparse(neurons: int = 10_000, fan_out: int = 100, outputs: int = 10) -> Network:
    """Return LIF neurons that feed ``fan_out`` others each, and an ordinary readout."""
    random = np.random.default_rng(0)
    columns = np.sort(random.integers(0, neurons, (neurons, fan_out), dtype=np.int32), axis=1)
    rows = np.repeat(np.arange(neurons, dtype=np.int32), fan_out)
    ends = np.arange(0, neurons * fan_out + 1, fan_out, dtype=np.int32)
    pattern = Pattern(rows, jnp.asarray(columns.ravel()), jnp.asarray(ends), (neurons, neurons))

    def step(ops: Operations, p: Arrays, h: Arrays, x: Any) -> tuple[Arrays, Any]:
        z = spike(h["v"] - 0.6)
        v = 0.95 * h["v"] + x + ops.sparse(z, p["w"], pattern) - 0.6 * z
        return {"v": v}, spike(v - 0.6) @ p["out"]

    def parameters() -> Arrays:
        return {
            "w": 0.02 * jax.random.normal(jax.random.key(0), (neurons * fan_out,)),
            "out": jax.random.normal(jax.random.key(2), (neurons, outputs)) / neurons**0.5,
        }

    return Network(parameters, {"v": (neurons,)}, (neurons,), step, outputs)


def convolution(size: int = 16, channels: int = 8, outputs: int = 10) -> Network:
    """Return a leaky layer of channels with recurrent 3 x 3 kernels."""

    def step(ops: Operations, p: Arrays, h: Arrays, x: Any) -> tuple[Arrays, Any]:
        drive = ops.conv(x, p["w_in"]) + ops.conv(h["h"], p["w_rec"])
        new = 0.9 * h["h"] + 0.1 * jnp.tanh(drive)
        return {"h": new}, new.mean(axis=(1, 2)) @ p["out"]

    shapes = {"w_in": (3, 3, 2, channels), "w_rec": (3, 3, channels, channels)}
    parameters = draw(shapes | {"out": (channels, outputs)})
    states = {"h": (size, size, channels)}
    return Network(parameters, states, (size, size, 2), step, outputs)

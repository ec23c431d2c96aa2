"""Modules as people build them: stacks of layers, and sparse nets of spiking neurons."""

import dataclasses
import functools
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace

INPUTS, OUTPUTS = 64, 10
SCALE = 0.02
"""Of synapses: so small that a spike which round-off moves hardly ever moves a second one."""


class Stack(brainstate.nn.Module):
    """Layers of one kind, and a readout that no ETP operation uses."""

    def __init__(self, layers: "Layers") -> None:
        super().__init__()
        brainstate.random.seed(0)
        make, hidden = getattr(braintrace.nn, layers.cell), layers.hidden
        inputs = [INPUTS, *[hidden] * (layers.layers - 1)]
        self.layers = [make(size, hidden) for size in inputs]
        self.out = brainstate.nn.Linear(hidden, OUTPUTS)

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of one kind: the name of the cell in ``braintrace.nn``, and sizes."""

    cell: str
    layers: int
    hidden: int

    def data(self, steps: int, batch: int) -> tuple[Any, Any]:
        """Return inputs and targets, time first."""
        keys = jax.random.split(jax.random.key(1))
        inputs = jax.random.normal(keys[0], (steps, batch, INPUTS))
        return inputs, jax.random.normal(keys[1], (steps, batch, OUTPUTS))

    def model(self) -> Stack:
        """Return a new module; its parameters are the same at every call."""
        return Stack(self)


class Spiking(brainstate.nn.Module):
    """Neurons that feed one another, and outputs that read their spikes."""

    def __init__(self, net: "Net", matrix: Any) -> None:
        super().__init__()
        brainstate.random.seed(0)
        self.recurrent = braintrace.nn.SparseLinear(matrix)
        self.neurons = getattr(braintrace.nn, net.neuron)(net.neurons)
        self.out = brainstate.nn.Linear(net.neurons, OUTPUTS)

    def update(self, x: Any) -> Any:
        with brainstate.environ.context(dt=1.0 * saiunit.ms):
            current = x + self.recurrent(self.neurons.get_spike())
            return self.out(self.neurons(current * saiunit.mA))


@dataclasses.dataclass(frozen=True)
class Net:
    """Neurons (``'LIF'`` or ``'ALIF'`` of ``braintrace.nn``), and how many each of them feeds."""

    neuron: str
    neurons: int
    fan_out: int

    @property
    def entries(self) -> int:
        return self.neurons * self.fan_out

    @functools.cached_property
    def synapses(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights and columns, row by row, and where rows end."""
        random = np.random.default_rng(0)
        shape = (self.neurons, self.fan_out)
        columns = np.sort(random.integers(0, self.neurons, shape, dtype=np.int32), axis=1)
        weights = SCALE * random.standard_normal(self.entries, dtype=np.float32)
        ends = np.arange(0, self.entries + 1, self.fan_out, dtype=np.int32)
        return weights, columns.ravel(), ends

    def matrix(self) -> Any:
        """Return the synapses, by source."""
        weights, columns, ends = self.synapses
        arrays = jnp.asarray(weights, float), jnp.asarray(columns), jnp.asarray(ends)
        return saiunit.sparse.CSR(arrays, shape=(self.neurons, self.neurons))

    def data(self, steps: int, batch: int) -> tuple[Any, Any]:
        """Return currents and targets, time first."""
        keys = jax.random.split(jax.random.key(1))
        currents = jax.random.uniform(keys[0], (steps, batch, self.neurons), maxval=1.5)
        return currents, jax.random.normal(keys[1], (steps, batch, OUTPUTS))

    def model(self) -> Spiking:
        """Return a new module; its parameters are the same at every call."""
        return Spiking(self, self.matrix())

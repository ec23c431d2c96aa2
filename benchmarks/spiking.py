"""Recurrent nets of spiking neurons with sparse connections, and a plain readout of the spikes."""

import dataclasses
import functools
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace

OUTPUTS = 10
SCALE = 0.02
"""Of the weights: so small that a spike which round-off moves hardly ever moves a second one."""


@dataclasses.dataclass(frozen=True)
class Connections:
    """Every neuron feeds the same number of others.

    Attributes
    ----------
    columns, weights
        Of the entries, row by row.
    neurons, fan_out
        Number of rows, and of the entries of each.
    """

    columns: np.ndarray
    weights: np.ndarray
    neurons: int
    fan_out: int


@dataclasses.dataclass(frozen=True)
class Net:
    """Which neurons, how many, and how many of them each feeds.

    Attributes
    ----------
    neuron
        Name in ``braintrace.nn``: ``'LIF'`` or ``'ALIF'``.
    neurons, fan_out
        Sizes.
    """

    neuron: str
    neurons: int
    fan_out: int

    @property
    def entries(self) -> int:
        """Number of synapses."""
        return self.neurons * self.fan_out

    @functools.cached_property
    def connections(self) -> Connections:
        """The synapses."""
        random = np.random.default_rng(0)
        shape = (self.neurons, self.fan_out)
        columns = np.sort(random.integers(0, self.neurons, shape, dtype=np.int32), axis=1)
        weights = SCALE * random.standard_normal(self.entries, dtype=np.float32)
        return Connections(columns.ravel(), weights, *shape)


def by_source(net: Net) -> Any:
    """Return the synapses as a matrix, neuron by neuron as each feeds others."""
    return saiunit.sparse.CSR(_stored(net), shape=(net.neurons, net.neurons))


def by_target(net: Net) -> Any:
    """Return a net of as many synapses that go the other way: neuron by neuron as each is fed."""
    return saiunit.sparse.CSC(_stored(net), shape=(net.neurons, net.neurons))


def _stored(net: Net) -> tuple[Any, ...]:
    made = net.connections
    ends = np.arange(0, net.entries + 1, net.fan_out, dtype=np.int32)
    return jnp.asarray(made.weights, float), jnp.asarray(made.columns), jnp.asarray(ends)


class Model(brainstate.nn.Module):
    """Neurons that feed one another, and outputs that read their spikes."""

    def __init__(self, net: Net, matrix: Any) -> None:
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
class SpikingTask:
    """A net with the sequences that it learns.

    Attributes
    ----------
    net
        The net.
    steps, batch
        Length of a sequence, and number of sequences at a time.
    """

    net: Net
    steps: int
    batch: int

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """Currents and targets, time first."""
        keys = jax.random.split(jax.random.key(1))
        shape = (self.steps, self.batch)
        return (
            jax.random.uniform(keys[0], (*shape, self.net.neurons), maxval=1.5),
            jax.random.normal(keys[1], (*shape, OUTPUTS)),
        )

    @functools.cached_property
    def learners(self) -> dict[str, Any]:
        """Learners that ways share."""
        return {}

    def model(self) -> Model:
        """Return a new model; its parameters are the same at every call."""
        return Model(self.net, by_source(self.net))

"""Recurrent nets of spiking neurons with sparse connections, and a plain readout of the spikes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace

from . import oracles, spiking_oracle

OUTPUTS = 10
SCALE = 0.02
"""Of the weights: so small that a spike which round-off moves hardly ever moves a second one."""

TOLERANCE = 1e-2
"""Largest deviation from the oracle: round-off moves single spikes."""

COMPARED = 20_000
"""How many entries are compared with the oracle, which takes every one for itself."""


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
    def connections(self) -> spiking_oracle.Connections:
        """Who feeds whom, and how strongly."""
        random = np.random.default_rng(0)
        shape = (self.neurons, self.fan_out)
        columns = np.sort(random.integers(0, self.neurons, shape, dtype=np.int32), axis=1)
        weights = SCALE * random.standard_normal(self.entries, dtype=np.float32)
        return spiking_oracle.Connections(columns.ravel(), weights, *shape)


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

    @property
    def tolerance(self) -> float:
        """Largest deviation from the oracle."""
        return TOLERANCE

    def model(self) -> Model:
        """Return a new model; its parameters are the same at every call."""
        return Model(self.net, by_source(self.net))

    @functools.cached_property
    def compared(self) -> np.ndarray:
        """The entries that are compared with the oracle, drawn at random."""
        entries = self.net.entries
        return np.random.default_rng(1).choice(entries, min(entries, COMPARED), replace=False)

    @functools.cached_property
    def _oracle(self) -> spiking_oracle.Oracle:
        readout = self.model().out.weight.value
        return spiking_oracle.Oracle(
            self.net.connections,
            has_adaptation=self.net.neuron == "ALIF",
            readout={name: np.asarray(value) for name, value in readout.items()},
            compared=self.compared,
        )

    @functools.cached_property
    def _expected(self) -> dict[bool, dict[str, Any]]:
        return {}

    def expected(self, algorithm: str, carrying: bool = False) -> Any:
        """Return the gradient of the sequence; carrying on, of the same sequence once more."""
        if carrying not in self._expected:
            xs, targets = map(np.asarray, self.data)
            repeats = 2 if carrying else 1
            self._expected[carrying] = self._oracle.gradients(xs, targets, repeats)
        return self._expected[carrying][algorithm]

    def deviation(self, algorithm: str, carrying: bool = False) -> Callable[[Any], float] | None:
        """Return what tells how far gradients are from the oracle; there is none of BPTT."""
        if algorithm == "bptt":
            return None

        def judge(found: Any) -> float:
            weights = np.asarray(found["recurrent", "weight"]["weight"])
            compared = {"recurrent": weights[self.compared], **found["out", "weight"]}
            return oracles.deviation(compared, self.expected(algorithm, carrying))

        return judge

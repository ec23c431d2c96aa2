"""Networks, learning rules and divisions whose times are computed."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace

INPUTS, OUTPUTS = 128, 10
DECAY = 0.98
"""Of ES_D_RTRL."""

FAN_IN = 100
UPDATES = (1, 100)
"""After so many steps parameters change."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of some size.

    Attributes
    ----------
    kind
        ``'leaky'``, ``'GRU'`` or ``'sparse LIF'``.
    units
        Their number.
    """

    kind: str
    units: int

    @property
    def name(self) -> str:
        """Name of the network on the page."""
        return f"{self.kind}, {self.units:,} units"

    @property
    def inputs(self) -> int:
        """Numbers that a sample has at each step."""
        return self.units if self.kind == "sparse LIF" else INPUTS

    @property
    def readout(self) -> int:
        """Bytes of its parameters that have no traces."""
        return 4 * OUTPUTS * (self.units + 1) if self.kind == "sparse LIF" else 0

    def make(self) -> brainstate.nn.Module:
        """Return the network."""
        if self.kind == "sparse LIF":
            return Sparse(self.units)
        cell = braintrace.nn.GRUCell if self.kind == "GRU" else braintrace.nn.LeakyRNN
        return cell(INPUTS, self.units)

    def small(self, units: int) -> "Network":
        """Return such a network of another size."""
        return dataclasses.replace(self, units=units)


class Sparse(brainstate.nn.Module):
    """Spiking neurons, each fed by so many others, and outputs that read their spikes."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.recurrent = braintrace.nn.SparseLinear(_connections(units))
        self.neurons = braintrace.nn.LIF(units)
        self.out = brainstate.nn.Linear(units, OUTPUTS)

    def update(self, x: Any) -> Any:
        with brainstate.environ.context(dt=1.0 * saiunit.ms):
            current = x + self.recurrent(self.neurons.get_spike())
            return self.out(self.neurons(current * saiunit.mA))


@functools.cache
def _connections(units: int) -> Any:
    """Return a matrix whose entries are in the order of the neurons that they feed."""
    fan_in = min(FAN_IN, units // 2)
    random = np.random.default_rng(0)
    sources = np.sort(random.integers(0, units, (units, fan_in), dtype=np.int32), axis=1)
    ends = np.arange(0, sources.size + 1, fan_in, dtype=np.int32)
    with jax.ensure_compile_time_eval():  # where a plan has shapes, who feeds whom is known
        stored = (jnp.zeros(sources.size), jnp.asarray(sources.ravel()), jnp.asarray(ends))
        return saiunit.sparse.CSC(stored, shape=(units, units))


@dataclasses.dataclass(frozen=True)
class Case:
    """A network that learns by a rule, on more and more devices.

    Attributes
    ----------
    network, rule
        What learns, and how.
    each
        Samples of a device, where their number grows with that of the devices (weak scaling).
    together
        Samples of all devices, where they divide a given number (strong scaling).
    by_model
        Whether a given number of samples is divided along ``model`` alone.
    """

    network: Network
    rule: str
    each: int = 16
    together: int = 1024
    by_model: bool = False

    @property
    def name(self) -> str:
        """Name of the case on the page."""
        return f"{self.network.name}, {self.rule.upper()}"


DENSE = (Network("leaky", 1024), Network("GRU", 4096), Network("leaky", 8192))
CASES = (
    *(Case(network, rule) for network in DENSE for rule in ("d_rtrl", "es_d_rtrl")),
    Case(Network("sparse LIF", 102_400), "d_rtrl", together=16, by_model=True),
)


def learner_of(network: Network, rule: str, batch: int) -> braintrace.Learner:
    """Return a learner."""
    brainstate.random.seed(0)
    x = jnp.zeros((batch, network.inputs))
    return braintrace.compile(network.make(), rule, x, batch_size=batch, **rule_options(rule))


def plan_of(
    network: Network, rule: str, batch: int, every: int, mesh: Mapping[str, int]
) -> braintrace.Plan:
    """Return what a device of a mesh does of a stream that changes parameters now and then."""
    return braintrace.plan(
        network.make,
        rule,
        jax.ShapeDtypeStruct((batch, network.inputs), jnp.float32),
        batch_size=batch,
        method="etrace_online",
        steps=every,
        every=every,
        optimizer=adam(),
        mesh=dict(mesh),
        model="model",
        **rule_options(rule),
    )


def rule_options(rule: str) -> dict[str, Any]:
    """Return the options of a rule."""
    return {"decay_or_rank": DECAY} if rule == "es_d_rtrl" else {}


def adam() -> Any:
    """Return the optimizer."""
    import optax

    return optax.adam(1e-3)

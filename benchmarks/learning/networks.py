"""Networks that learn: a cell and a readout, and both as a pure function."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from braintrace import nn

Values = Mapping[Any, Any]
"""Values of States by path."""

FASTEST, SLOWEST = 1.5, 60.0
"""Time constants of the leaky units in steps; the others lie between, even in their logarithm."""

LONG: dict[str, Any] = {"r_min": 0.9, "r_max": 0.999, "max_phase": 0.3}
"""Of the linear and the trace units: they begin with memories of ten to a thousand steps."""


def leaky(features: int, units: int) -> brainstate.nn.Module:
    """Return leaky units of many time constants."""
    alpha = 1 / jnp.geomspace(FASTEST, SLOWEST, units)
    return nn.LeakyRNN(features, units, alpha=alpha, activation="tanh")


class Alif(brainstate.nn.Module):
    """Adaptive spiking neurons that reach each other; answers are spikes."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.input = nn.Linear(features, units)
        self.recurrent = nn.Linear(units, units, b_init=None)
        self.neurons = nn.ALIF(units, tau=20.0 * u.ms, tau_a=200.0 * u.ms, beta=0.3 * u.mV)

    def update(self, x: Any) -> Any:
        with brainstate.environ.context(dt=1.0 * u.ms):
            current = self.input(x) + self.recurrent(self.neurons.get_spike())
            return self.neurons(current * u.mA)


Readout = Callable[..., brainstate.nn.Module]
"""`nn.Linear`, or `nn.FeedbackLinear`, through which errors go back by a random matrix."""


class LeakyReadout(nn.LeakyRateReadout):
    """What filters spikes, behind a linear layer, into answers."""

    def __init__(self, units: int, outputs: int, linear: Readout) -> None:
        super().__init__(units, outputs, tau=5.0 * u.ms, b_init=brainstate.nn.init.ZeroInit())
        # The weight has been drawn: it is the same for every kind of layer.
        self.W = linear(units, outputs, w_init=self.W.weight.value["weight"])

    def update(self, x: Any) -> Any:
        with brainstate.environ.context(dt=1.0 * u.ms):
            return super().update(x)


CELLS: dict[str, Callable[[int, int], brainstate.nn.Module]] = {
    "leaky": leaky,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "indrnn": nn.IndRNN,
    "lru": lambda features, units: nn.LRUCell(features, units, units // 2, **LONG),
    "rtu": functools.partial(nn.RTUCell, **LONG),
    "alif": Alif,
}


class Network(brainstate.nn.Module):
    """A cell and what reads it out."""

    def __init__(
        self, features: int, cell: str, units: int, outputs: int, readout: Readout
    ) -> None:
        super().__init__()
        self.cell = CELLS[cell](features, units)
        spikes = cell == "alif"
        self.readout = LeakyReadout(units, outputs, readout) if spikes else readout(units, outputs)

    def update(self, x: Any) -> Any:
        return self.readout(self.cell(x))


def build(task: Any, cell: str, units: int, seed: int, readout: Readout = nn.Linear) -> Network:
    """Return a network; those of one seed have the same parameters, whatever reads them out."""
    with brainstate.random.seed_context(seed):
        return Network(task.features, cell, units, task.outputs, readout)


def values_of(model: brainstate.nn.Module, kind: type) -> dict[Any, Any]:
    """Return the values of a network's States of one kind, by path."""
    return {path: state.value for path, state in model.states(kind).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Pure:
    """A network as ``(values of all States, x) -> (new hidden values, answer)``, and its start."""

    step: Callable[[Values, Any], tuple[Values, Any]]
    start: Values

    def run(self, fixed: Values, hidden: Values, inputs: Any) -> tuple[Values, Any]:
        """Return the hidden values after a sequence, and its answers."""

        def one_step(hidden: Values, x: Any) -> tuple[Values, Any]:
            return self.step({**fixed, **hidden}, x)

        return jax.lax.scan(one_step, hidden, inputs)


def pure(model: brainstate.nn.Module, batch: int, features: int) -> Pure:
    """Return a network as a pure function of batches of one size."""
    brainstate.nn.init_all_states(model, batch_size=batch)
    stateful = brainstate.transform.StatefulFunction(model.update, return_only_write=True)
    example = jnp.zeros((batch, features))
    stateful.make_jaxpr(example)
    by_id = {id(state): path for path, state in model.states().items()}
    paths = [by_id[id(state)] for state in stateful.get_states(example)]
    start = values_of(model, brainstate.HiddenState)

    def step(values: Values, x: Any) -> tuple[Values, Any]:
        new, answer = stateful.jaxpr_call([values[path] for path in paths], x)
        after = {**values, **{p: v for p, v in zip(paths, new, strict=True) if v is not None}}
        return {path: after[path] for path in start}, answer

    return Pure(step, start)

"""Stream of recurrent spiking neurons: a leaky readout relative to a plain one.

ALIF neurons learn at every step with Adam. The leaky readout has states of its own, so its weights
have traces, a third more in all. With a mask of ones, the same stream should not be faster.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import brainstate
import jax.numpy as jnp
import optax
import saiunit

import braintrace

from ..case import Case, Prepared, Subject, Target
from ..networks import Model, Network, alif, squared_error
from ..subjects import Task, compiled

PLAIN, LEAKY, MASKED = "plain readout", "leaky readout", "leaky readout, mask"
OUTPUTS = 10
TIME_STEP = 1.0 * saiunit.ms


class WithReadout(brainstate.nn.Module):
    """ALIF neurons, and a readout of their spikes."""

    def __init__(self, network: Network, readout: brainstate.nn.Module) -> None:
        super().__init__()
        self.layer, self.readout = Model(network), readout

    def update(self, x: Any) -> Any:
        return self.readout(self.layer(x))


def of_spikes(network: Network) -> Network:
    """Return a network whose output is its spikes."""
    events = network.events
    assert events is not None
    scales = {name: scale for name, scale in network.scales.items() if name != "w_out"}
    return dataclasses.replace(network, scales=scales, readout=lambda _, states: events(states))


def stream(task: Task, make: Callable[[], brainstate.nn.Module], **options: Any) -> Subject:
    """Time a stream that learns at every step, per step."""
    brainstate.random.seed(0)
    xs, targets = task.data
    with brainstate.environ.context(dt=TIME_STEP):
        learner = compiled(
            WithReadout(of_spikes(task.network), make()), "d_rtrl", xs[0], batch_size=task.batch
        )
    call = {"step_fn": lambda x, target: squared_error(learner(x), target), **options}
    call["optimizer"] = optax.adam(1e-3)

    def run() -> Any:
        with brainstate.environ.context(dt=TIME_STEP):
            return learner.etrace_online(xs, targets, **call)

    return Subject(run, work=task.steps)


def prepare(task: Task) -> Prepared:
    """Return everything that is compared."""
    units = task.network.states["V"]
    leaky = partial(braintrace.nn.LeakyRateReadout, units, OUTPUTS)
    return Prepared(
        {
            PLAIN: partial(stream, task, partial(brainstate.nn.Linear, units, OUTPUTS)),
            LEAKY: partial(stream, task, leaky),
            MASKED: partial(stream, task, leaky, mask=jnp.ones(task.steps)),
        }
    )


def case(units: int, batch: int, steps: int, quick: bool = False) -> Case:
    """Return the case of one size."""
    task = Task(alif(hidden=units), steps, batch)
    return Case(
        name=f"spiking_readout/alif,H={units},B={batch},T={steps}",
        parameters={"network": "alif", "hidden": units, "batch": batch, "steps": steps},
        build=lambda: prepare(task),
        targets=(Target(LEAKY, PLAIN, 1.5), Target(LEAKY, MASKED, 1.05)),
        quick=quick,
        full=not quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return one network that takes some milliseconds a step on a processor."""
    return [case(256, 16, 64), case(64, 4, 32, quick=True)]

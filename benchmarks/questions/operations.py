"""Gradient of a sequence: other operations.

Leaky tanh RNNs with convolutions, low-rank and sparse weights, an IndRNN (``element_wise``), an
LSTM with one matrix for its gates, and recurrent ALIF neurons with spikes. Hand-written programs
start from zeros: they are compared with the gradient without ``reset_state``.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import subjects
from ..case import Case, Prepared, Target
from ..networks import NETWORKS
from ..operations import PlainOps
from ..subjects import Task

LIMIT, OVER_HAND = 1.5, 1.15
LIVE = (0.01, 0.5)
TARGETS = (
    Target("D_RTRL, one chunk", "BPTT", LIMIT),
    Target("D_RTRL, auto", "BPTT", LIMIT),
    Target("ES_D_RTRL, auto", "BPTT", LIMIT),
    Target("D_RTRL, one chunk, without reset", "hand-written, one chunk", OVER_HAND),
    Target("D_RTRL, one chunk", "hand-written, one chunk", None),
)
OTHERS = [name for name in NETWORKS if name != "dense"]


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a task."""
    compared = {
        "BPTT": lambda: subjects.bptt(task),
        "hand-written, one chunk": lambda: subjects.hand_one_chunk(task),
        "D_RTRL, one chunk": lambda: subjects.online(task, "d_rtrl", task.steps),
        "D_RTRL, one chunk, without reset": lambda: subjects.online(
            task, "d_rtrl", task.steps, count_reset=False
        ),
        "D_RTRL, auto": lambda: subjects.online(task, "d_rtrl"),
        "ES_D_RTRL, auto": lambda: subjects.online(task, "es_d_rtrl"),
    }
    if task.network.events is None:
        return Prepared(compared)
    rate = functools.cache(functools.partial(spike_rate, task))
    return Prepared(
        compared,
        facts={"share of neurons that spike at a step": rate},
        checks={"live": lambda: (0.0 if LIVE[0] < rate() < LIVE[1] else float("inf"), 0.0)},
    )


def spike_rate(task: Task) -> float:
    """Return the share of neurons that spike, over all steps but the first quarter."""
    network = task.network
    spikes = network.events
    assert spikes is not None

    def step(states: Any, x: Any) -> Any:
        states, _ = network.step(PlainOps(), task.parameters, states, x)
        return states, jnp.mean(spikes(states))

    start = network.start(task.batch)
    rates = jax.jit(lambda xs: jax.lax.scan(step, start, xs)[1])(task.data[0])
    return float(jnp.mean(rates[task.steps // 4 :]))


def case(network: str, steps: int, batch: int, quick: bool = False, **sizes: int) -> Case:
    """Return the case of one network."""
    return Case(
        name=f"operations/{network},T={steps},B={batch}",
        parameters={"network": network, "steps": steps, "batch": batch, **sizes},
        build=lambda: prepare(Task(NETWORKS[network](**sizes), steps, batch)),
        targets=TARGETS,
        quick=quick,
    )


def cases(platform: str) -> list[Case]:
    """Return a short and a long sequence of every network."""
    return [
        case(name, steps, 32, quick=(name, steps) == ("alif", 64))
        for name in OTHERS
        for steps in (64, 512)
    ]

"""Time of the first call: tracing and compilation.

BPTT and the library compile the same network in turn, at new hidden sizes; the table has medians.
The time of ``braintrace.compile``, the analysis of one step, is separate.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import oracles
from ..case import Case, Prepared, Target
from ..networks import NETWORKS
from ..subjects import Task, agreement, learner_of, step_function

LABELS = ("BPTT", "D_RTRL, one chunk", "D_RTRL, auto", "ES_D_RTRL, auto")
COMPILE = "braintrace.compile"
LIMIT = 1.5


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of a call, and its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def first_calls(task: Task) -> dict[str, float]:
    """Return the seconds of the first calls of everything on a new size."""
    parameters, data = task.parameters, jax.block_until_ready(task.data)
    gradient = jax.jit(oracles.bptt(task.network))
    found = {"BPTT": seconds_of(lambda: gradient(parameters, *data))[0]}
    ways: dict[str, tuple[str, dict[str, int]]] = {
        "D_RTRL, one chunk": ("d_rtrl", {"chunk_size": task.steps}),
        "D_RTRL, auto": ("d_rtrl", {}),
        "ES_D_RTRL, auto": ("es_d_rtrl", {}),
    }
    for label, (algorithm, sizes) in ways.items():
        start = time.perf_counter()
        learner = learner_of(task, algorithm)
        if label == "D_RTRL, one chunk":
            found[COMPILE] = time.perf_counter() - start
        step = step_function(learner)
        call = partial(learner.etrace_grad, *data, step_fn=step, **sizes)
        found[label] = seconds_of(call)[0]
    return found


def prepare(network: str, steps: int, batch: int, hidden: int, repeats: int) -> Prepared:
    """Return the medians over some sizes."""
    make = NETWORKS[network]

    @cache
    def medians() -> dict[str, float]:
        jax.block_until_ready(jax.jit(jnp.tanh)(jnp.ones(3)))  # starts the device
        runs = [
            first_calls(Task(make(hidden=hidden + count), steps, batch))
            for count in range(repeats + 1)
        ][1:]  # the first one also fills caches that do not depend on sizes
        return {label: statistics.median(run[label] for run in runs) for label in runs[0]}

    def median(label: str) -> float:
        return medians()[label]

    return Prepared(
        facts={label: partial(median, label) for label in (*LABELS, COMPILE)},
        checks={"D_RTRL, auto": lambda: agreement(Task(make(hidden=hidden), steps, batch))},
    )


def case(
    network: str, hidden: int = 256, repeats: int = 5, steps: int = 64, batch: int = 32
) -> Case:
    """Return the case of one network."""
    return Case(
        name=f"first_call/{network},repeats={repeats}",
        parameters={
            "network": network,
            "steps": steps,
            "hidden": hidden,
            "batch": batch,
        },
        build=lambda: prepare(network, steps, batch, hidden, repeats),
        targets=(
            *(Target(label, "BPTT", LIMIT) for label in LABELS[1:]),
            Target(COMPILE, "BPTT", None),
        ),
        quick=repeats == 1,
        full=repeats > 1,
    )


def cases(platform: str) -> list[Case]:
    """Return the networks that differ most in their number of equations."""
    return [*map(case, ("dense", "lstm", "alif")), case("dense", repeats=1)]

"""Exact RTRL.

One layer of ``braintrace.nn`` with an ordinary readout and a loss at every step; 64 inputs, 10
outputs, float32. "By hand" is RTRL step by step in plain JAX, with ``jax.jacrev`` of one sample,
mapped over the batch. In "carrying on", states and traces continue from the previous sequence;
after a reset, a sequence that fits into one chunk needs no trace.
"""

from collections.abc import Callable
from functools import partial

import brainstate
import jax
import jax.numpy as jnp

from .. import stack_oracles, ways
from ..case import Case, Measurements, Prepared, Subject, Target
from ..stack import StackTask
from ..stack_oracles import Layers

CHUNKS = (8, 16, 32, 64, 128)
BY_HAND = "RTRL step by step, by hand"
FACTORS = "KF-RTRL, carrying on"
OVER_HAND = 0.5
"""A trace of states times outputs instead of states times weights, moved on at every step."""
BEST = "RTRL, carrying on / best fixed chunk"
COMPARED = (
    StackTask(Layers("LeakyRNN", 1, 64), 256, 8),
    StackTask(Layers("GRUCell", 1, 64), 256, 8),
)
REPORTED = (
    *(
        StackTask(Layers(cell, 1, hidden), 256, 8)
        for cell in ("GRUCell", "LSTMCell")
        for hidden in (16, 32, 64, 128)
        if (cell, hidden) != ("GRUCell", 64)
    ),
    *(StackTask(Layers(cell, 1, 256), 256, 1) for cell in ("GRUCell", "LSTMCell")),
)


def fixed(task: StackTask) -> dict[str, int]:
    """Return the chunk sizes that `'auto'` is compared with."""
    return {f"RTRL, chunks of {chunk}": chunk for chunk in CHUNKS if chunk < task.steps}


def best(task: StackTask, found: Measurements) -> dict[str, float]:
    """Return what `'auto'` loses against the best of the fixed sizes."""
    return {BEST: found.seconds["RTRL, carrying on"] / min(found.seconds[n] for n in fixed(task))}


def by_hand(task: StackTask) -> Subject:
    """Compile the recursion; it starts from zeros, which it does not know."""
    states = task.model().states(brainstate.ParamState)
    parameters = {path: state.value for path, state in states.items()}
    gradient = jax.jit(stack_oracles.rtrl_step_by_step(task.stack))
    mask = jnp.ones(task.steps)
    return Subject(
        lambda: gradient(parameters, *task.data, mask),
        deviation=task.deviation("rtrl"),
        tolerance=task.tolerance,
    )


def prepare(task: StackTask, compare: bool) -> Prepared:
    """Return everything that is compared on a layer."""
    compared: dict[str, Callable[[], Subject]] = {
        "BPTT": partial(ways.bptt, task),
        "RTRL, auto": partial(ways.online, task, "rtrl"),
        "RTRL, carrying on": partial(ways.carrying_on, task, "rtrl"),
    }
    if compare:
        compared[BY_HAND] = partial(by_hand, task)
        compared[FACTORS] = partial(ways.carrying_on, task, "kf_rtrl")
        for label, chunk in fixed(task).items():
            compared[label] = partial(ways.carrying_on, task, "rtrl", chunk)
    derive = partial(best, task) if compare else None
    return Prepared(compared, ways.chosen_chunks(task, "RTRL", "rtrl"), derive)


def case(task: StackTask, compare: bool = False, quick: bool = False) -> Case:
    """Return the case of one layer."""
    network = task.stack
    targets = [Target("RTRL, auto", "BPTT", None), Target("RTRL, carrying on", "BPTT", None)]
    if compare:
        targets += [
            Target("RTRL, carrying on", BY_HAND, 0.35),
            Target(FACTORS, BY_HAND, OVER_HAND),
            Target("RTRL, auto", BY_HAND, None),
            Target(BEST, None, 1.1),
            *(Target(label, BY_HAND, None) for label in fixed(task)),
        ]
    return Case(
        name=f"whole_state/{network.cell},H={network.hidden},B={task.batch},T={task.steps}",
        parameters={
            "network": network.cell,
            "hidden": network.hidden,
            "batch": task.batch,
            "steps": task.steps,
            "dtype": "float32",
        },
        build=lambda: prepare(task, compare),
        targets=tuple(targets),
        quick=quick,
    )


def cases(platform: str) -> list[Case]:
    """Return the layers that are compared with the recursion by hand, and those without it."""
    first, *more = COMPARED
    compared = [case(first, True, True), *(case(task, True) for task in more)]
    return compared + [case(task) for task in REPORTED]

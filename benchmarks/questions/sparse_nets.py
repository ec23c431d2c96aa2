"""Large sparse spiking networks.

Every neuron projects to 100 others; an ordinary readout of all spikes and a loss at every step, in
float32, per step. "forward" is the loss of the same model in a jitted ``for_loop``, without
gradients. A sequence starts with a reset; "carrying on" omits it. The temporary memory of a
sequence gradient is relative to one scalar per entry, sample and step.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from .. import subjects
from ..case import Case, Subject, Subjects, Target
from ..modules import Net
from ..subjects import Task, bytes_of_call

SMALL, LARGE = 10_000, 100_000
ROWS = (
    *(Task(Net("LIF", SMALL, 100), 64, batch) for batch in (1, 16)),
    *(Task(Net("ALIF", SMALL, 100), 64, batch) for batch in (1, 16)),
    *(Task(Net("LIF", LARGE, 100), 16, batch) for batch in (1, 16)),
    Task(Net("ALIF", LARGE, 100), 16, 1),
)
QUICK = Task(Net("LIF", 1_000, 100), 64, 1)
LARGEST_BPTT = 2**30
"""Entries, samples and steps up to which BPTT is run: it may hold a number for each."""

BYTES = "temporary bytes, carrying on / bytes of entries times steps"
TARGETS: tuple[Target, ...] = (
    Target("D_RTRL, auto", "forward", 2.0),
    Target("D_RTRL, carrying on", "forward", 3.0),
    Target("ES_D_RTRL, auto", "forward", 2.0),
    Target("ES_D_RTRL, carrying on", "forward", 3.0),
    Target(BYTES, None, 0.5),
)


def held(task: Task) -> float:
    """Return the temporary bytes of a sequence gradient over those of every entry and step."""
    found = bytes_of_call(subjects.sequence_gradient(task, task.learners["D_RTRL, carrying on"]))
    return found / (4 * task.network.entries * task.steps * task.batch)


def per_step(task: Task, make: Callable[[], Subject]) -> Subject:
    """Return a function that is timed per step."""
    return dataclasses.replace(make(), work=task.steps)


def case(task: Task) -> Case:
    net, targets = task.network, TARGETS
    compared: Subjects = {
        "forward": partial(subjects.forward, task),
        **subjects.automatic(task, "d_rtrl"),
        **subjects.automatic(task, "es_d_rtrl"),
    }
    if net.entries * task.batch * task.steps <= LARGEST_BPTT:
        compared["BPTT"] = partial(subjects.bptt, task)
        targets += (Target("BPTT", "forward", None),)
    return Case(
        f"sparse_nets/{net.neuron},N={net.neurons},B={task.batch},T={task.steps}",
        {label: partial(per_step, task, make) for label, make in compared.items()},
        targets,
        subjects.chosen_chunks(task, "d_rtrl") | {BYTES: partial(held, task)},
        quick=task == QUICK,
        task=task,
        full=task != QUICK,
    )


def cases(platform: str) -> list[Case]:
    """Return the nets of the targets, and a small one."""
    return [*map(case, ROWS), case(QUICK)]

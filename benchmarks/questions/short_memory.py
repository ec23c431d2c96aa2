"""Gradient of a sequence: rules without weight traces.

`Immediate` stores nothing between steps, OTTT a low-pass filter of every input. Both start from
fresh states, like BPTT, and each is compared with a separate oracle.
"""

from collections.abc import Callable
from functools import partial

from .. import subjects
from ..case import Case, Prepared, Target
from ..networks import Network, dense, gru
from ..subjects import Task

STEPS = 256
TARGETS = (
    Target("Immediate, auto", "BPTT", 1.0),
    Target("OTTT, auto", "BPTT", None),
    Target("D_RTRL, auto", "BPTT", None),
)


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a task."""
    return Prepared(
        {
            "BPTT": partial(subjects.bptt, task),
            "Immediate, auto": partial(subjects.online, task, "immediate"),
            "OTTT, auto": partial(subjects.online, task, "ottt"),
            "D_RTRL, auto": partial(subjects.online, task),
        }
    )


def case(make: Callable[..., Network], hidden: int, batch: int, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick, network = steps is not None, make(hidden=hidden)
    steps = steps or STEPS
    return Case(
        name=f"short_memory/{network.name},H={hidden},B={batch},T={steps}",
        parameters={
            "network": network.name,
            "hidden": hidden,
            "batch": batch,
            "steps": steps,
        },
        build=lambda: prepare(Task(network, steps, batch)),
        targets=TARGETS,
        quick=is_quick,
        full=not is_quick,
    )


def cases(platform: str) -> list[Case]:
    """Return a leaky and a gated network, one sample and many."""
    sizes = [(make, 256, batch) for make in (dense, gru) for batch in (1, 32)]
    return [*(case(*size) for size in sizes), case(gru, 256, 32, steps=32)]

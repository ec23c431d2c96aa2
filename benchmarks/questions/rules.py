"""Streaming step of other rules.

Compiled loops over many steps, each with its gradient, relative to D_RTRL, on networks with traces
of equal size. Each rule is compared with a separate oracle; UORO only in the mean over many draws.
"""

import functools
from collections.abc import Callable

from ..case import Case, Prepared, Target
from ..networks import Network, dense, gru
from ..subjects import Task
from .streaming import MANY_STEPS, STEPS, loop

D_RTRL, SNAP = "D_RTRL step, in a loop", "SnAp-1 step, in a loop"
UORO = "UORO step, in a loop"
OVER_D_RTRL = 1.1
"""The traces are as large, and one factor of each step's transition more is computed."""
RANK_ONE_OVER_D_RTRL = 2.0
"""A trace as large is read three times, for its norm, the gradient and the update, and not twice;
and the step is run forward and back once more."""


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a task."""
    rules = {D_RTRL: "d_rtrl", SNAP: "snap", UORO: "uoro"}
    return Prepared({label: functools.partial(loop, task, rule) for label, rule in rules.items()})


def case(make: Callable[..., Network], hidden: int, batch: int, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick = steps is not None
    steps = steps or (MANY_STEPS if batch == 1 else STEPS)
    network = make(hidden=hidden)
    return Case(
        name=f"rules/{network.name},H={hidden},B={batch},T={steps}",
        parameters={
            "network": network.name,
            "hidden": hidden,
            "batch": batch,
            "steps": steps,
        },
        build=lambda: prepare(Task(network, steps, batch)),
        targets=(
            Target(SNAP, D_RTRL, OVER_D_RTRL),
            Target(UORO, D_RTRL, RANK_ONE_OVER_D_RTRL),
        ),
        quick=is_quick,
        full=not is_quick,
    )


def cases(platform: str) -> list[Case]:
    """Return a leaky and a gated network, one sample and many."""
    sizes = [(make, 256, batch) for make in (dense, gru) for batch in (1, 32)]
    return [*(case(*size) for size in sizes), case(gru, 256, 32, steps=8)]

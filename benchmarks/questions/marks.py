"""Automatic and manual marks.

The same networks twice: with ETP operations, and in plain JAX with `mark='auto'`. Both are compared
with the same oracle, and their steps should compile to the same program.
"""

from collections.abc import Callable
from functools import partial

from .. import subjects
from ..case import Case, Prepared, Target
from ..networks import Network, dense, element_wise, gru
from ..subjects import Task

STEPS = 256
TARGETS = (
    Target("by the compiler", "by hand", 1.03),
    Target("by the compiler, ES_D_RTRL", "by hand, ES_D_RTRL", 1.03),
)


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a task."""
    found = {}
    for algorithm, suffix in (("d_rtrl", ""), ("es_d_rtrl", ", ES_D_RTRL")):
        online = partial(subjects.online, task, algorithm)
        found[f"by hand{suffix}"] = online
        found[f"by the compiler{suffix}"] = partial(online, mark="auto")
    return Prepared(found)


def case(make: Callable[..., Network], hidden: int, batch: int, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick, network = steps is not None, make(hidden=hidden)
    steps = steps or STEPS
    return Case(
        name=f"marks/{network.name},H={hidden},B={batch},T={steps}",
        parameters={"network": network.name, "hidden": hidden, "batch": batch, "steps": steps},
        build=lambda: prepare(Task(network, steps, batch)),
        targets=TARGETS,
        quick=is_quick,
        full=not is_quick,
    )


def cases(platform: str) -> list[Case]:
    """Return networks of products, one of them with element-wise weights."""
    sizes = [(dense, 256, 32), (gru, 256, 32), (element_wise, 256, 32)]
    return [*(case(*size) for size in sizes), case(gru, 128, 8, steps=64)]

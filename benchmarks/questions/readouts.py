"""Filters of a leaky readout.

One layer without recurrence and a leaky readout of 10 units; 64 inputs, float32. With filters, the
gradient equals backpropagation through time; without them (``readout_filters=False``), it lacks the
memory of the readout. Steps run in a compiled loop, each with its gradient. A filter adds one trace
for every weight below, to one or two (``alif``): a ratio of at most 2 means that a filter costs at
most as much as the layer's trace.
"""

from collections.abc import Callable
from functools import partial

from ..case import Case, Prepared, Subject, Target
from ..feed_forward import LAYERS, feed_forward
from ..subjects import Task, online
from .streaming import MANY_STEPS, STEPS, loop

AT_MOST = 2.0
STEP, PLAIN_STEP = "step with filters", "step without"
SEQUENCE, PLAIN_SEQUENCE = "sequence with filters", "sequence without"


def prepare(layer: str, hidden: int, batch: int, steps: int) -> Prepared:
    """Return everything that is compared on a layer."""
    exact, cut = (Task(feed_forward(layer, e, hidden=hidden), steps, batch) for e in (True, False))
    compared: dict[str, Callable[[], Subject]] = {
        STEP: partial(loop, exact),
        PLAIN_STEP: partial(loop, cut, readout_filters=False),
        SEQUENCE: partial(online, exact),
        PLAIN_SEQUENCE: partial(online, cut, readout_filters=False),
    }
    return Prepared(compared)


def case(layer: str, hidden: int, batch: int, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick = steps is not None
    steps = steps or (MANY_STEPS if batch == 1 else STEPS)
    return Case(
        name=f"readouts/{layer},H={hidden},B={batch},T={steps}",
        parameters={"network": layer, "hidden": hidden, "batch": batch, "steps": steps},
        build=lambda: prepare(layer, hidden, batch, steps),
        targets=(
            Target(STEP, PLAIN_STEP, AT_MOST),
            Target(SEQUENCE, PLAIN_SEQUENCE, AT_MOST),
        ),
        quick=is_quick,
        full=not is_quick,
    )


def cases(platform: str) -> list[Case]:
    """Return layers of one and two states, one sample and many."""
    sizes = [(layer, 256, batch) for layer in LAYERS for batch in (1, 32)]
    sizes += [(layer, 1024, 32) for layer in LAYERS]
    return [*(case(*size) for size in sizes), case("alif", 256, 32, steps=8)]

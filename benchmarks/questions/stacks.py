"""Gradient of a sequence: stacks of ``braintrace.nn`` layers.

An ordinary readout and a loss at every step; 64 inputs, 10 outputs, float32. BPTT is ``jit`` of
``grad`` of ``for_loop`` over the same model. The library runs ``reset_state`` and then
``etrace_grad``; "carrying on" omits the reset, so states and traces continue from the previous
sequence.
"""

from collections.abc import Callable, Mapping
from functools import partial

from .. import subjects
from ..case import Case, Prepared, Subject, Target
from ..modules import Layers
from ..subjects import Task

CHUNKS = (32, 64, 128, 256)
BEST = "D_RTRL, auto / best fixed chunk"
ROWS = (
    Task(Layers("GRUCell", 3, 256), 512, 32),
    Task(Layers("LSTMCell", 1, 256), 256, 32),
    Task(Layers("LeakyRNN", 4, 256), 256, 64),
    Task(Layers("IndRNN", 3, 256), 256, 32),
    Task(Layers("LRUCell", 4, 128), 256, 32),
    Task(Layers("MGUCell", 1, 128), 512, 16),
    Task(Layers("LeakyRNN", 1, 256), 128, 64),
)
QUICK = ROWS[-1]
GATED = ("GRUCell", "LSTMCell", "MGUCell")
"""Much of BPTT passes their weights backward, which D_RTRL omits."""


def title(task: Task) -> str:
    """Return the name of a row."""
    network = task.network
    cells = f"{network.layers}x{network.cell}"
    return f"{cells},H={network.hidden},B={task.batch},T={task.steps}"


def fixed(task: Task) -> dict[str, int]:
    """Return the chunk sizes that `'auto'` is compared with."""
    sizes = {f"D_RTRL, chunks of {chunk}": chunk for chunk in CHUNKS if chunk < task.steps}
    return sizes | {"D_RTRL, one chunk": task.steps}


def best(task: Task, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return what `'auto'` loses against the best of the fixed sizes."""
    return {BEST: seconds["D_RTRL, auto"] / min(seconds[name] for name in fixed(task))}


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a stack."""
    compared: dict[str, Callable[[], Subject]] = {
        "BPTT": partial(subjects.bptt, task),
        "D_RTRL, auto": partial(subjects.online, task),
        "D_RTRL, carrying on": partial(subjects.carrying_on, task),
        "ES_D_RTRL, auto": partial(subjects.online, task, "es_d_rtrl"),
        "ES_D_RTRL, carrying on": partial(subjects.carrying_on, task, "es_d_rtrl"),
    }
    for label, chunk in fixed(task).items():
        compared[label] = partial(subjects.online, task, "d_rtrl", chunk)
    return Prepared(compared, subjects.chosen_chunks(task), partial(best, task))


def case(task: Task) -> Case:
    """Return the case of one stack."""
    network = task.network
    limit = 0.7 if network.cell in GATED else 1.0
    return Case(
        name=f"stacks/{title(task)}",
        parameters={
            "network": f"{network.cell} × {network.layers}",
            "hidden": network.hidden,
            "batch": task.batch,
            "steps": task.steps,
            "dtype": "float32",
        },
        build=lambda: prepare(task),
        targets=(
            Target("D_RTRL, auto", "BPTT", limit),
            Target(BEST, None, 1.1),
            Target("D_RTRL, carrying on", "BPTT", 1.2),
            Target("ES_D_RTRL, auto", "BPTT", limit),
            Target("ES_D_RTRL, carrying on", "BPTT", 1.2),
            *(Target(label, "BPTT", None) for label in fixed(task)),
        ),
        quick=task == QUICK,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return the stacks of the targets."""
    return [case(task) for task in ROWS]

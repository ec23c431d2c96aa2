"""Gradient of a sequence: stacks of ``braintrace.nn`` layers.

An ordinary readout and a loss at every step; 64 inputs, 10 outputs, float32. BPTT is ``jit`` of
``grad`` of ``for_loop`` over the same model. The library runs ``reset_state`` and then
``etrace_grad``; "carrying on" omits the reset, so states and traces continue from the previous
sequence.
"""

from functools import partial

from .. import subjects
from ..case import Case, Subjects, Target
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


def case(task: Task) -> Case:
    network = task.network
    sizes = {f"D_RTRL, chunks of {chunk}": chunk for chunk in CHUNKS if chunk < task.steps}
    fixed: Subjects = {
        label: partial(subjects.online, task, "d_rtrl", chunk)
        for label, chunk in {**sizes, "D_RTRL, one chunk": task.steps}.items()
    }
    limit = 0.7 if network.cell in GATED else 1.0
    title = f"{network.layers}x{network.cell},H={network.hidden},B={task.batch},T={task.steps}"
    return Case(
        f"stacks/{title}",
        {
            "BPTT": partial(subjects.bptt, task),
            **subjects.automatic(task, "d_rtrl"),
            **subjects.automatic(task, "es_d_rtrl"),
            **fixed,
        },
        (
            Target("D_RTRL, auto", "BPTT", limit),
            Target(BEST, None, 1.1),
            Target("D_RTRL, carrying on", "BPTT", 1.2),
            Target("ES_D_RTRL, auto", "BPTT", limit),
            Target("ES_D_RTRL, carrying on", "BPTT", 1.2),
            *(Target(label, "BPTT", None) for label in fixed),
        ),
        subjects.chosen_chunks(task, "d_rtrl"),
        lambda medians: {BEST: medians["D_RTRL, auto"] / min(medians[name] for name in fixed)},
        quick=task == QUICK,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    return [case(task) for task in ROWS]

"""Gradient of a sequence in windows.

Truncated BPTT with a window, and rules with the same window, relative to BPTT of the whole
sequence. The rules begin with ``reset_state``. Truncated BPTT takes one gradient for each window
in a scan over the windows. 64 inputs, 10 outputs, 32 sequences, float32.
"""

from functools import partial

import jax

from .. import subjects
from ..case import Case, Subjects, Target
from ..handwritten_windows import DRIVES, of_window, split_inputs
from ..modules import Layers
from ..networks import NETWORKS
from ..subjects import Task, bytes_of_call, step_function, temporary_bytes

WINDOWS = (8, 16, 32)
LIMITS = {("dense", 16): 1.4, ("dense", 32): 1.25, ("gru", 16): 1.6, ("gru", 32): 1.4}
"""Of `D_RTRL` relative to BPTT."""
OVER_TRUNCATED = 1.15
"""Limit of `ES_D_RTRL` relative to truncated BPTT with the same window."""


def memory_over_limit(task: Task, window: int, resets: bool) -> float:
    """Return temporary bytes of `D_RTRL` over those of truncated BPTT and 1.2 times its traces.

    The traces are those of windows, which follow every state.
    """
    learner = task.learners["D_RTRL, auto"]
    call = {"step_fn": step_function(learner), "window": window}
    learner.etrace_grad(*task.data, **call)
    traces = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.algorithm.traces.value))
    learner.reset_state(task.batch)
    if not resets:
        learner.etrace_grad(*task.data, **call)
    own = temporary_bytes(learner.lower("etrace_grad", *task.data, **call))
    return own / (bytes_of_call(subjects.truncated_bptt(task, window).run) + 1.2 * traces)


def case(name: str, task: Task, windows: tuple[int, ...] = WINDOWS, quick: bool = False) -> Case:
    compared: Subjects = {"BPTT": partial(subjects.bptt, task)}
    targets, facts = [], {}
    for window in windows:
        truncated = f"truncated BPTT, {window}"
        memory = f"temporary bytes of D_RTRL, {window} / (truncated BPTT + 1.2 traces)"
        carried = f"{memory}, carrying on"
        facts[memory] = partial(memory_over_limit, task, window, resets=True)
        facts[carried] = partial(memory_over_limit, task, window, resets=False)
        compared[truncated] = partial(subjects.truncated_bptt, task, window)
        for algorithm in ("d_rtrl", "es_d_rtrl"):
            make = partial(subjects.online, task, algorithm, window=window)
            compared[f"{algorithm.upper()}, {window}"] = make
        targets += [
            Target(truncated, "BPTT", None),
            Target(f"D_RTRL, {window}", "BPTT", LIMITS.get((name, window))),
            Target(f"ES_D_RTRL, {window}", truncated, OVER_TRUNCATED),
            Target(memory, None, 1.1),
            Target(carried, None, None),
        ]
        if name in DRIVES:
            by_hand = partial(split_inputs, length=window, part=of_window)
            label = f"hand-written D_RTRL, {window}"
            rule = f"d_rtrl, windows of {window}"
            compared[label] = partial(subjects.by_hand, task, by_hand, rule)
            targets.append(Target(label, "BPTT", None))
    return Case(
        f"windows/{name},T={task.steps}",
        compared,
        tuple(targets),
        facts,
        quick=quick,
        full=not quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return one hidden state, gates, two hidden states, two layers."""
    found = []
    for steps in (64, 512):
        found += [case(name, Task(make(), steps, 32)) for name, make in NETWORKS.items()]
        found.append(case("2xLRUCell", Task(Layers("LRUCell", 2, 256), steps, 32)))
    quick = Task(NETWORKS["dense"](), 32, 32)
    return [*found, case("dense", quick, (16,), quick=True)]

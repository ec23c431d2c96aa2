"""Gradient of a sequence in windows.

Truncated BPTT with a window, and rules with the same window, relative to BPTT of the whole
sequence. The rules begin with ``reset_state``. Truncated BPTT takes one gradient for each window
in a scan over the windows. 64 inputs, 10 outputs, 32 sequences, float32.
"""

from collections.abc import Callable
from functools import partial

import jax

from .. import handwritten_windows, subjects
from ..case import Case, Prepared, Subject, Target
from ..modules import Layers
from ..networks import NETWORKS
from ..subjects import Task, wait_for_states
from .memory import bytes_of_call

WINDOWS = (8, 16, 32)
LIMITS = {("dense", 16): 1.4, ("dense", 32): 1.25, ("gru", 16): 1.6, ("gru", 32): 1.4}
"""Of `D_RTRL` relative to BPTT."""
OVER_TRUNCATED = 1.15
"""Limit of `ES_D_RTRL` relative to truncated BPTT with the same window."""
CELLS = ("dense", "gru", "lstm", "alif")


def memory_over_limit(task: Task, window: int) -> float:
    """Return temporary bytes of `D_RTRL` over those of truncated BPTT and 1.2 times its traces.

    The traces are those of windows, which follow every state.
    """
    learner = task.learners["d_rtrl"]
    gradient = subjects.sequence_gradient(task, learner, window=window)
    gradient()
    traces = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.algorithm.traces.value))
    learner.reset_state(task.batch)
    wait_for_states(learner)
    own = bytes_of_call(gradient)
    return own / (bytes_of_call(subjects.truncated_bptt(task, window).run) + 1.2 * traces)


def prepare(name: str, task: Task, windows: tuple[int, ...]) -> Prepared:
    """Return everything that is compared on a task."""
    compared: dict[str, Callable[[], Subject]] = {"BPTT": partial(subjects.bptt, task)}
    for window in windows:
        compared[f"truncated BPTT, {window}"] = partial(subjects.truncated_bptt, task, window)
        for algorithm in ("d_rtrl", "es_d_rtrl"):
            make = partial(subjects.online, task, algorithm, window=window)
            compared[f"{algorithm.upper()}, {window}"] = make
        if name in handwritten_windows.DRIVES:
            by_hand = partial(handwritten_windows.with_traces, window=window)
            make = partial(subjects.by_hand, task, by_hand, f"d_rtrl, windows of {window}")
            compared[f"hand-written D_RTRL, {window}"] = make
    facts = {memory_row(window): partial(memory_over_limit, task, window) for window in windows}
    return Prepared(compared, facts=facts)


def memory_row(window: int) -> str:
    """Return the name of the fact of a window."""
    return f"temporary bytes of D_RTRL, {window} / (truncated BPTT + 1.2 traces)"


def targets(name: str, windows: tuple[int, ...]) -> tuple[Target, ...]:
    """Return the rows of a network."""
    rows = []
    for window in windows:
        rows += [
            Target(f"truncated BPTT, {window}", "BPTT", None),
            Target(f"D_RTRL, {window}", "BPTT", LIMITS.get((name, window))),
            Target(f"ES_D_RTRL, {window}", f"truncated BPTT, {window}", OVER_TRUNCATED),
            Target(memory_row(window), None, 1.1),
        ]
        if name in handwritten_windows.DRIVES:
            rows.append(Target(f"hand-written D_RTRL, {window}", "BPTT", None))
    return tuple(rows)


def case(name: str, task: Task, windows: tuple[int, ...] = WINDOWS, quick: bool = False) -> Case:
    """Return the case of one network."""
    return Case(
        name=f"windows/{name},T={task.steps}",
        parameters={"network": name, "steps": task.steps, "batch": task.batch, "dtype": "float32"},
        build=lambda: prepare(name, task, windows),
        targets=targets(name, windows),
        quick=quick,
        full=not quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return one hidden state, gates, two hidden states, two layers."""
    found = []
    for steps in (64, 512):
        found += [case(name, Task(NETWORKS[name](), steps, 32)) for name in CELLS]
        found.append(case("2xLRUCell", Task(Layers("LRUCell", 2, 256), steps, 32)))
    quick = Task(NETWORKS["dense"](), 32, 32)
    return [*found, case("dense", quick, (16,), quick=True)]

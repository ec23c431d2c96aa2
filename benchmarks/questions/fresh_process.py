"""First gradient in a fresh process.

The time covers states, ``braintrace.compile``, tracing, compilation and the call, for the stacks of
``stacks``, without a compilation cache. Each number is a median over fresh processes, of both sides
in turn. "and once more" adds a second call, which continues from the traces of the first.
"""

import dataclasses
import statistics
from functools import cache, partial

from .. import fresh, processes, ways
from ..case import Case, Prepared, Target
from ..stack import StackTask
from .stacks import ROWS, title


def in_new_process(task: StackTask, way: str) -> fresh.Seconds:
    """Return the seconds of the first calls in a new process."""
    sizes = map(str, (*dataclasses.astuple(task.stack), task.steps, task.batch))
    found = processes.run_module(processes.OWN, "fresh", way, *sizes)
    return {label: float(seconds) for label, seconds in found.items()}


def prepare(task: StackTask, repeats: int) -> Prepared:
    """Return the medians over some processes."""

    @cache
    def medians() -> fresh.Seconds:
        rounds = [{way: in_new_process(task, way) for way in fresh.WAYS} for _ in range(repeats)]
        return {
            label: statistics.median(found[way][label] for found in rounds)
            for way, labels in rounds[0].items()
            for label in labels
        }

    def median(label: str) -> float:
        return medians()[label]

    short = dataclasses.replace(task, steps=min(task.steps, 32))
    return Prepared(
        facts={label: partial(median, label) for label in fresh.LABELS},
        checks={"D_RTRL, auto": lambda: ways.agreement(short)},
    )


def case(task: StackTask, repeats: int = 3) -> Case:
    """Return the case of one stack."""
    return Case(
        name=f"fresh_process/{title(task)}",
        parameters={"steps": task.steps, "batch": task.batch, "hidden": task.stack.hidden},
        build=lambda: prepare(task, repeats),
        targets=(
            Target("D_RTRL, auto", "BPTT", 1.6),
            Target("D_RTRL, auto, and once more", "BPTT, and once more", None),
        ),
    )


def cases(platform: str) -> list[Case]:
    """Return the stacks of the targets."""
    return list(map(case, ROWS))

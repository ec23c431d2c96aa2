"""Temporary memory of a sequence gradient.

The size of the temporary buffers in ``compiled.memory_analysis()``, without arguments and results,
over length, units and batch. The programs are compiled, not run.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from .. import handwritten_windows
from ..case import Case, Target
from ..networks import Network, dense
from ..subjects import Task, learner_of, plain_bptt, step_function, without_states

CHUNK = 16
AXES = {
    "T": (64, 256, 1024, 4096, 16384, 65536),
    "H": (64, 128, 256, 512, 1024),
    "B": (1, 8, 32, 128),
}
USUAL = {"T": 256, "H": 256, "B": 32}


def bytes_of_call(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the temporary bytes of a call that reads and writes States."""
    pure, states = without_states(call, *arguments)
    return _bytes(pure, [state.value for state in states], *arguments)


def _bytes(function: Callable[..., Any], *arguments: Any) -> float:
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return float(analysis.temp_size_in_bytes)


def plain_bytes(task: Task, make: Callable[[Network], Any]) -> float:
    """Return the temporary bytes of a function of parameters, inputs and targets."""
    return _bytes(make(task.network), task.network.parameters(), *_shapes(task))


def online_bytes(task: Task, algorithm: str) -> float:
    """Return the temporary bytes of ``etrace_grad``, which reads and writes States."""
    learner = learner_of(dataclasses.replace(task, steps=1), algorithm)
    step = step_function(learner)

    def gradient(xs: Any, targets: Any) -> Any:
        return learner.etrace_grad(xs, targets, step_fn=step, chunk_size=CHUNK)

    return bytes_of_call(gradient, *_shapes(task))


def _shapes(task: Task) -> tuple[Any, ...]:
    return tuple(jax.eval_shape(lambda: task.network.data(task.steps, task.batch)))


BY_HAND = partial(handwritten_windows.chunked, chunk=CHUNK)
WAYS: dict[str, Callable[[Task], float]] = {
    "BPTT": partial(plain_bytes, make=plain_bptt),
    "D_RTRL, chunks of 16": partial(online_bytes, algorithm="d_rtrl"),
    "ES_D_RTRL, chunks of 16": partial(online_bytes, algorithm="es_d_rtrl"),
    "hand-written, chunks of 16": partial(plain_bytes, make=BY_HAND),
}


def case(axis: str, values: Sequence[int], **others: int) -> Case:
    """Return the case of one axis; memory should not grow with the length."""
    first, last = f"{axis}={values[0]}", f"{axis}={values[-1]}"
    facts: dict[str, Callable[[], float]] = {}
    for value in values:
        sizes = {**USUAL, **others, axis: value}
        task = Task(dense(hidden=sizes["H"]), sizes["T"], sizes["B"])
        facts |= {f"{label}, {axis}={value}": partial(way, task) for label, way in WAYS.items()}
    return Case(
        f"memory/{axis} to {values[-1]}",
        facts=facts,
        targets=tuple(
            Target(f"{label}, {last}", f"{label}, {first}", 1.1 if "D_RTRL" in label else None)
            for label in ("D_RTRL, chunks of 16", "ES_D_RTRL, chunks of 16", "BPTT")
            if axis == "T"
        ),
    )


def cases(platform: str) -> list[Case]:
    """Return one case for each axis."""
    return [case(axis, values) for axis, values in AXES.items()]

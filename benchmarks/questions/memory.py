"""Temporary memory of a sequence gradient.

The size of the temporary buffers in ``compiled.memory_analysis()``, without arguments and results,
over length, units and batch. The programs are compiled, not run.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .. import handwritten_windows
from ..case import Case, NotOffered, Prepared, Target
from ..networks import Network, dense
from ..subjects import Task, learner_of, plain_bptt, step_function, without_states

CHUNK = 16
LENGTHS = (64, 256, 1024, 4096, 16384, 65536)


def temporary_bytes(compiled: Any) -> float:
    """Return the bytes of the temporary buffers of a compiled program."""
    analysis = compiled.memory_analysis()
    size = getattr(analysis, "temp_size_in_bytes", None)
    if size is None:
        raise NotOffered("this device has no memory analysis")
    return float(size)


def bytes_of_call(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the temporary bytes of a call that reads and writes States."""
    pure, states = without_states(call, *arguments)
    lowered = jax.jit(pure).lower([state.value for state in states], *arguments)
    return temporary_bytes(lowered.compile())


def plain_bytes(task: Task, make: Callable[[Network], Any]) -> float:
    """Return the temporary bytes of a function of parameters, inputs and targets."""
    lowered = jax.jit(make(task.network)).lower(task.network.parameters(), *_shapes(task))
    return temporary_bytes(lowered.compile())


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


def prepare(tasks: dict[str, Task]) -> Prepared:
    """Return the temporary bytes of all ways at all sizes."""
    facts = {
        f"{label}, {size}": partial(way, task)
        for size, task in tasks.items()
        for label, way in WAYS.items()
    }
    return Prepared(facts=facts)


def against_length(lengths: tuple[int, ...], hidden: int, batch: int) -> Case:
    """Return the case of a growing length."""
    last, first = f"T={lengths[-1]}", f"T={lengths[0]}"
    labels = [label for label in WAYS if "D_RTRL" in label]
    return Case(
        name=f"memory/T to {lengths[-1]}",
        parameters={"hidden": hidden, "batch": batch, "axis": "T", "values": list(lengths)},
        build=lambda: prepare({f"T={t}": Task(dense(hidden=hidden), t, batch) for t in lengths}),
        targets=(
            *(Target(f"{label}, {last}", f"{label}, {first}", 1.1) for label in labels),
            Target(f"BPTT, {last}", f"BPTT, {first}", None),
        ),
    )


def cases(platform: str) -> list[Case]:
    """Return one case for each axis."""
    hidden, batches = (64, 128, 256, 512, 1024), (1, 8, 32, 128)
    return [
        against_length(LENGTHS, 256, 32),
        Case(
            name="memory/H to 1024",
            parameters={"steps": 256, "batch": 32, "axis": "H", "values": list(hidden)},
            build=lambda: prepare({f"H={h}": Task(dense(hidden=h), 256, 32) for h in hidden}),
        ),
        Case(
            name="memory/B to 128",
            parameters={"steps": 256, "hidden": 256, "axis": "B", "values": list(batches)},
            build=lambda: prepare({f"B={b}": Task(dense(), 256, b) for b in batches}),
        ),
    ]

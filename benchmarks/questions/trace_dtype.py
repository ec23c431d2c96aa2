"""Traces in bfloat16.

The deviation from float32 traces is reported without a limit, next to the saved memory. A gradient
that is unrelated to the oracle fails.
"""

import functools
from typing import Any

import jax.numpy as jnp

from .. import subjects
from ..case import Case, NotOffered, Prepared, Subject, Target
from ..networks import dense
from ..subjects import Task, learner_of
from .trace_bytes import stored_bytes

SHORT, FULL = "traces in bfloat16", "traces in float32"
BYTES = ", bytes"
DEVIATION = "relative deviation of the gradient"
UNRELATED = 0.5


def with_dtype(make: Any) -> Any:
    """Call a function with the option.

    Raises
    ------
    NotOffered
        If the library does not accept it.
    """
    try:
        return make(trace_dtype=jnp.bfloat16)
    except (TypeError, ValueError) as error:
        if "trace_dtype" in str(error):
            raise NotOffered("the library has no `trace_dtype`") from error
        raise


def half(task: Task, chunk: int) -> Subject:
    """Return a sequence gradient with traces in bfloat16."""
    subject: Subject = with_dtype(functools.partial(subjects.online, task, "d_rtrl", chunk))
    return Subject(subject.run, deviation=subject.deviation, tolerance=UNRELATED)


def prepare(task: Task, chunk: int) -> Prepared:
    """Return times, bytes and the deviation."""

    def deviation() -> float:
        subject = half(task, chunk)
        assert subject.deviation is not None
        return subject.deviation(subject.run())

    make = functools.partial(learner_of, task)
    return Prepared(
        subjects={
            FULL: lambda: subjects.online(task, "d_rtrl", chunk),
            SHORT: lambda: half(task, chunk),
        },
        facts={
            FULL + BYTES: lambda: stored_bytes(make()),
            SHORT + BYTES: lambda: stored_bytes(with_dtype(make)),
            DEVIATION: deviation,
        },
    )


def case(steps: int, chunk: int, hidden: int = 256, batch: int = 32) -> Case:
    """Return the case of one chunk size."""
    return Case(
        name=f"trace_dtype/T={steps},chunk={chunk}",
        parameters={"steps": steps, "chunk": chunk, "hidden": hidden, "batch": batch},
        build=lambda: prepare(Task(dense(hidden=hidden), steps, batch), chunk),
        targets=(
            Target(SHORT + BYTES, FULL + BYTES, 0.5, equal=True),
            Target(SHORT, FULL, None),
            Target(DEVIATION, None, None),
        ),
        quick=(steps, chunk) == (64, 16),
    )


def cases(platform: str) -> list[Case]:
    """Return sequences that round their traces rarely and often."""
    return [case(64, 16), case(512, 16), case(512, 1)]

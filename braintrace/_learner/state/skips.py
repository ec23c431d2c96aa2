"""Warnings about skipped updates."""

from __future__ import annotations

import time
import warnings

import jax
import numpy as np

from ..._brainstate import is_watched, peek
from ..._checks import level_of_user
from ..._errors import NonFiniteWarning
from ..._jax import is_tracer
from ...sharding import on_host
from .optimizer import LearnerOptimizer, Noticed, Running

MORE = 10
"""Factor of the number of skipped updates from one warning to the next."""

MOST_RUNNING, LONGEST = 8, 0.1
"""Maximum number of unchecked calls of one step, and maximum seconds until a check."""


def notice_counted(held: LearnerOptimizer) -> None:
    """Warn, before a call, of updates that earlier calls or a transformation have skipped."""
    noticed, value = held.noticed, peek(held.skipped)
    if noticed.running and time.monotonic() - noticed.time > LONGEST:
        notice_all(held)
    if not (value is noticed.value or is_tracer(value) or is_watched()):
        notice_all(held)
        if new := _new_skips(noticed, value):
            _warn(
                f"Updates that were skipped inside a transformation, or before the learner's state "
                f"was restored: {new}. A loss or gradient was NaN or infinite."
            )


def notice_of_call(
    held: LearnerOptimizer, is_bad: jax.Array, samples: jax.Array, start: int = 0
) -> None:
    """Warn of the updates that a call has skipped; after a single step, when it is computed.

    Parameters
    ----------
    held
        The optimizer, which has the number of skipped updates.
    is_bad
        ``(T,)``: whether the update of each step, or of its block, was skipped.
    samples
        ``(T,)`` or ``(T, batch)``: the samples that were reset after it.
    start
        Index of the first step in the user's call.
    """
    noticed, value = held.noticed, peek(held.skipped)
    if not (is_tracer(value) or is_watched()):
        noticed.value = value
        noticed.running.append(Running(value, is_bad, samples, start))
        # Several processes gather `samples`, at the same call.
        is_single = is_bad.shape == (1,) and value.is_fully_addressable
        if not is_single or len(noticed.running) > MOST_RUNNING:
            notice_all(held)


def notice_all(held: LearnerOptimizer) -> None:
    """Wait for all calls, and warn of the updates that they have skipped."""
    noticed = held.noticed
    calls, noticed.running, noticed.time = noticed.running, [], time.monotonic()
    if calls and int(on_host(calls[-1].count)) != noticed.count:
        for call in calls:
            if new := _new_skips(noticed, call.count):
                steps = on_host(call.is_bad)
                first = int(np.argmax(steps))
                _warn(
                    "A loss or gradient is NaN or infinite, first at step "
                    f"{call.start + first} of {'this' if len(steps) > 1 else 'a'} call. Updates "
                    f"skipped: {new}. {_reset(on_host(call.samples)[first])}"
                )


def _reset(samples: np.ndarray) -> str:
    """Describe the samples that were reset after one step."""
    if not samples.any():
        return "The states and traces of all samples are finite, and continue."
    if samples.all():
        return "All samples were reset: their states or traces were not finite."
    (bad,) = np.nonzero(samples)
    names = ", ".join(map(str, bad[:MORE])) + (", …" if len(bad) > MORE else "")
    return (
        f"Samples that were reset, with non-finite states or traces: {names}. If an input has gaps "
        "that are NaN, fill them (`jnp.nan_to_num`): each of them resets its sample."
    )


def _new_skips(noticed: Noticed, value: jax.Array) -> int:
    """Return the number of new skipped updates, if they are worth a warning."""
    before, noticed.value, noticed.count = noticed.count, value, int(on_host(value))
    new = noticed.count - before
    is_due = new > 0 and noticed.count >= MORE * min(noticed.warned, before)
    noticed.warned = noticed.count if is_due else min(noticed.warned, noticed.count)
    return new if is_due else 0


def _warn(text: str) -> None:
    warnings.warn(
        f"{text} A skipped update changes neither parameters nor optimizer, and "
        f"`learner.skipped_updates` counts it; the next warning follows at {MORE} times as many. "
        "`nonfinite='raise'` stops at the first, and `nonfinite='ignore'` updates nevertheless.",
        NonFiniteWarning,
        stacklevel=level_of_user(),
    )

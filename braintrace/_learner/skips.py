"""Warnings about skipped updates."""

from __future__ import annotations

import warnings

import jax
import numpy as np

from .._arguments import level_of_user
from .._brainstate import is_watched, peek
from .._errors import NonFiniteWarning
from .._jax import is_tracer
from .._sharding import on_host
from .optimizer import HeldOptimizer, Noticed

MORE = 10
"""Factor of the number of skipped updates from one warning to the next."""


def notice_counted(held: HeldOptimizer) -> None:
    """Warn, before a call, of updates that were skipped inside a transformation."""
    new = _new_skips(held)
    if new:
        _warn(
            f"Updates that were skipped inside a transformation, or before the learner's state was "
            f"restored: {new}. A loss or gradient was NaN or infinite."
        )


def notice_of_call(
    held: HeldOptimizer, is_bad: jax.Array, samples: jax.Array, start: int = 0
) -> None:
    """Warn of the updates that a call has skipped.

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
    new = _new_skips(held)
    if not new:
        return
    steps = on_host(is_bad)
    first = int(np.argmax(steps))
    _warn(
        f"A loss or gradient is NaN or infinite, first at step {start + first} of this call. "
        f"Updates skipped: {new}. {_reset(on_host(samples)[first])}"
    )


def _reset(samples: np.ndarray) -> str:
    """Describe the samples that were reset after one step."""
    if not samples.any():
        return "The states and traces of all samples are finite, and continue."
    if samples.all():
        return "All samples were reset: their states or traces were not finite."
    (bad,) = np.nonzero(samples)
    names = ", ".join(map(str, bad[:MORE])) + (", …" if len(bad) > MORE else "")
    return f"Samples that were reset, with non-finite states or traces: {names}."


def _new_skips(held: HeldOptimizer) -> int:
    """Return the number of new skipped updates, if they are worth a warning."""
    value, before = peek(held.skipped), held.noticed
    if value is before.value or is_tracer(value) or is_watched():
        return 0
    count = int(on_host(value))
    new = count - before.count
    is_due = new > 0 and count >= MORE * min(before.warned, before.count)
    warned = count if is_due else min(before.warned, count)
    held.noticed = Noticed(value, count, warned)
    return new if is_due else 0


def _warn(text: str) -> None:
    warnings.warn(
        f"{text} A skipped update changes neither parameters nor optimizer, and "
        f"`learner.skipped_updates` counts it; the next warning follows at {MORE} times as many. "
        "`nonfinite='raise'` stops at the first, and `nonfinite='ignore'` updates nevertheless.",
        NonFiniteWarning,
        stacklevel=level_of_user(),
    )

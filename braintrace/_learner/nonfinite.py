"""Non-finite losses, gradients and States: tests, warnings about skipped updates, and resets."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import is_watched, peek
from .._checks import level_of_user
from .._core.traces import reset_traces, unpack
from .._core.traces import samples_with as samples_of_traces_with
from .._errors import NonFiniteError, NonFiniteWarning, OptionError
from .._graph import Batch, Traces
from .._jax import is_tracer
from .._model import values_by_path
from .._typing import Path, PyTree
from ..sharding import on_host
from .base import BaseLearner
from .optimizer import LearnerOptimizer, Noticed, Running
from .pure_step import run_if
from .resets import reset_states


def first_not_finite(losses: jax.Array, gradients: PyTree) -> jax.Array:
    """Return the index of the first non-finite leaf, the number of leaves for a loss, -1 for none.

    Parameters
    ----------
    losses
        One loss, or several.
    gradients
        A pytree; its leaves are counted.
    """
    leaves = [*jax.tree.leaves(gradients), losses]
    result = jnp.stack([~jnp.isfinite(_zero(leaf)) for leaf in leaves])
    return jnp.where(jnp.any(result), jnp.argmax(result), -1).astype(jnp.int32)


def any_not_finite(losses: jax.Array, gradients: PyTree) -> jax.Array:
    """Test losses and gradients together for non-finite numbers."""
    leaves = jax.tree.leaves((losses, gradients))
    return ~jnp.all(jnp.stack([jnp.isfinite(_zero(leaf)) for leaf in leaves]))


def _zero(leaf: jax.Array) -> jax.Array:
    """Return 0, or NaN for a leaf with non-finite numbers: times zero, all other numbers are zero.

    A product with a vector of zeros takes a CPU a third of the time of a sum.
    """
    if leaf.ndim > 1:
        leaf = jnp.tensordot(jnp.zeros(leaf.shape[:-1], leaf.dtype), leaf, leaf.ndim - 1)
    return jnp.sum(leaf * jnp.zeros((), leaf.dtype))


def is_any_nan(leaves: list[jax.Array]) -> jax.Array:
    """Test arrays for NaN."""
    return jnp.any(jnp.stack([jnp.zeros((), bool), *(jnp.any(jnp.isnan(x)) for x in leaves)]))


def inexact(tree: PyTree) -> list[jax.Array]:
    """Return the leaves that can be non-finite."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def check_finite(losses: jax.Array, verdicts: jax.Array, names: list[str], every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    losses
        Losses of every step.
    verdicts
        Result of `first_not_finite` for every step, or for its block.
    names
        Names of the leaves of the gradients.
    every
        Length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    OptionError
        Inside a transformation, where the numbers are unknown.
    """
    if is_tracer(verdicts):
        raise OptionError(
            "`nonfinite='raise'` cannot check values inside a transformation. Use 'skip' there, "
            "or call `etrace_online` outside."
        )
    by_step = on_host(verdicts)
    (bad,) = np.nonzero(by_step >= 0)
    if not bad.size:
        return
    start = int(bad[0])
    values = on_host(losses)
    block = values[start : start + every]
    (of_block,) = np.nonzero(~np.isfinite(block))
    step = start + int(of_block[0]) if of_block.size else start
    index = int(by_step[start])
    raise NonFiniteError(
        step, float(values[step]), names[index] if index < len(names) else None, len(block)
    )


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


# --- resets of the samples that are not finite


class Skip(NamedTuple):
    """Decision about an update.

    Attributes
    ----------
    is_bad
        Whether a loss or gradient is not finite, so that the update is skipped.
    is_masked
        Whether the step, or a step of the block, is masked; ``None``: there is no mask.
    """

    is_bad: jax.Array
    is_masked: jax.Array | None


Reset: TypeAlias = tuple[jax.Array, Traces]
"""The samples that were reset, and the traces."""


def reset_nonfinite(learner: BaseLearner, skip: Skip, traces: Traces) -> Reset:
    """Reset the samples that are not finite after a skipped update, or NaN in a masked step.

    Traces are read only if an update is skipped, or a state is NaN in a masked step. Initial values
    are computed only then, since they may draw random numbers.

    Parameters
    ----------
    learner
        The learner.
    skip
        The decision about the update.
    traces
        Traces after the step.

    Returns
    -------
    samples
        One flag for each sample, or one for all if these cannot be reset separately.
    traces
        The new traces.
    """
    states = values_by_path(learner.short_term_states)
    is_suspect = skip.is_bad
    if skip.is_masked is not None:
        is_suspect = is_suspect | (skip.is_masked & is_any_nan(inexact(states)))

    def is_nonfinite(leaf: jax.Array) -> jax.Array:
        return jnp.isnan(leaf) | (skip.is_bad & ~jnp.isfinite(leaf))

    def samples_in(traces: Traces, initial: list[PyTree]) -> jax.Array:
        states = values_by_path(learner.short_term_states)
        now = jax.tree.map(_grown, states, dict(zip(states, initial, strict=True)))
        return samples_with(learner, is_nonfinite, now, traces)

    def reset(now: Reset) -> Reset:
        initial = list(learner.initial_values(learner.states_of_model).values())
        samples = samples_in(now[1], initial)
        reset_states(learner, initial, samples)
        return samples, reset_traces(learner.compiled.trace_specs, now[1], samples)

    none = jnp.zeros(jax.eval_shape(samples_in, traces, list(states.values())).shape, bool)
    result: Reset = run_if(is_suspect, learner.module, reset, (none, traces))
    return result


def _grown(now: jax.Array, initial: jax.Array) -> jax.Array:
    """Return a state without the infinities that it starts with, as a running maximum does."""
    if not jnp.issubdtype(now.dtype, jnp.inexact):
        return now
    return jnp.where(jnp.isinf(now) & jnp.isinf(initial), 0, now)


def samples_with(
    learner: BaseLearner,
    is_bad: Callable[[jax.Array], jax.Array],
    values: dict[Path, PyTree],
    carried: Traces,
) -> jax.Array:
    """Return the samples that have a state or a trace with a bad number.

    The result is one flag for all samples if these cannot be reset separately.

    Parameters
    ----------
    learner
        The learner.
    is_bad
        Elementwise predicate of bad numbers.
    values
        Values of its short-term States.
    carried
        Its traces, in carried form.
    """
    traces, specs = unpack(carried), learner.compiled.trace_specs
    batch, samples = learner.graph.batch, learner.graph.batch.samples
    is_apart = learner.graph.flat_state is None or learner.graph.flat_state.samples == samples
    if samples is not None and is_apart and not batch.unclear:
        with contextlib.suppress(OptionError):  # they share a trace
            of_traces = samples_of_traces_with(is_bad, specs, traces, samples)
            of_states = _samples_of_states(batch, is_bad, values)
            return functools.reduce(jnp.logical_or, of_states, of_traces)
    leaves = inexact((values, traces))
    return jnp.any(jnp.stack([jnp.any(is_bad(leaf)) for leaf in leaves]))


def _samples_of_states(
    batch: Batch, is_bad: Callable[[jax.Array], jax.Array], values: dict[Path, PyTree]
) -> Iterator[jax.Array]:
    """Yield the samples with a bad number in each leaf; a shared leaf counts for all samples."""
    for path, value in values.items():
        for index, leaf in enumerate(jax.tree.leaves(value)):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                axis = batch.axis_at(path, index)
                others = tuple(a for a in range(leaf.ndim) if a != axis)
                yield jnp.any(is_bad(leaf), axis=others)

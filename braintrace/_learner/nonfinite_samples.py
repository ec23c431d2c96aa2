"""Samples of a stream with non-finite states or traces, and their reset."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .._core.traces import reset_traces, unpack
from .._core.traces import samples_with as samples_of_traces_with
from .._errors import OptionError
from .._graph import Batch, Traces
from .._runtime.model_states import values_by_path
from .._typing import Path, PyTree
from .base import BaseLearner
from .nonfinite import inexact, is_any_nan
from .pure_step import run_if
from .resets import initial_values, reset_states
from .updates import Skip

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
        initial = initial_values(learner, learner.states_of_model)
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

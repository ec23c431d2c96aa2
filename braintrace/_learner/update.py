"""After a gradient: the update, whether it runs, and the restart of spoiled samples.

An update is a gradient transformation of optax (a pair of pure functions with a pytree as its
state), or the user's ``update_fn``, which writes parameters and States of its own.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import values_of
from .._core.traces import reset_traces, samples_with, unpack
from .._errors import NonFiniteError, OptionError, in_words
from .._from_function import gradients_by_path
from .._graph.method import Traces
from .._model import write_by_path
from .._typing import PyTree, path_name
from ..sharding import on_host
from .arguments import Options
from .base import BaseLearner
from .user_step import call_user, first_written, run_if, traced_states


class StepResult(NamedTuple):
    """Result of a step, or of a block of steps.

    Attributes
    ----------
    gradients
        In the structure for the user.
    losses, aux
        Loss of the step, or of every step of the block, and auxiliary results.
    weights
        Weight of the step, or of every step of the block, in the mask; ``None``: there is none.
    """

    gradients: PyTree
    losses: jax.Array
    aux: PyTree
    weights: jax.Array | None


def _update(learner: BaseLearner, options: Options, found: StepResult) -> None:
    """Run the update of a call, which writes States."""
    if options.optimizer is None:
        results = (found.gradients, found.aux) if options.has_aux else (found.gradients,)
        call_user("update_fn", options.update_fn, *results)
        return
    now, state = learner.parameters_for_optimizer(), learner.held_optimizer.transformed
    # JAX's derivative by a complex number is the conjugate of the direction of ascent.
    ascent = list(map(jnp.conj, jax.tree.leaves(found.gradients)))
    with in_words(lambda: "`optimizer.update` fails for the gradients"):
        gradients = jax.tree.unflatten(jax.tree.structure(now), ascent)
        changes, state.value = options.optimizer.update(gradients, state.value, now)
    new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), now, changes)
    write_by_path(learner.param_states, gradients_by_path(learner.module, new))


# --- whether it runs


def run_update(
    learner: BaseLearner, options: Options, found: StepResult, traces: Traces
) -> tuple[jax.Array, Traces]:
    """Run an update, unless a mask or a non-finite number forbids it.

    Parameters
    ----------
    learner, options
        The learner, and the options of the call.
    found, traces
        Result of the step, and the traces after it.

    Returns
    -------
    is_bad
        Whether the loss or a gradient is not finite, and not ignored.
    traces
        The traces, in which samples may be reset.
    """
    runs: Any = found.weights is None or jnp.any(found.weights != 0)
    is_bad = jnp.zeros((), bool)
    if options.nonfinite != "ignore":  # before `update_fn` writes to the dict
        leaves = jax.tree.leaves((found.gradients, found.losses))
        is_bad = jnp.any(jnp.stack([~jnp.isfinite(_zero(leaf)) for leaf in leaves])) & runs
    if options.nonfinite == "skip":
        runs = ~is_bad & runs
    written = first_written(traced_states(learner))
    if runs is True:
        _update(learner, options, found)
    else:
        run_if(runs, lambda _, found: _update(learner, options, found), None, found)
    path = written()
    if path is not None:
        raise OptionError(
            f"`update_fn` writes the hidden State '{path_name(path)}', and traces do not follow "
            "this write. Change it in `update` of the model; to start a new sequence, use `reset`."
        )
    if options.nonfinite == "skip":
        learner.held_optimizer.skipped.value += is_bad
        is_masked = None if found.weights is None else jnp.any(found.weights == 0)
        traces = _reset_spoiled(learner, is_bad, is_masked, traces)
    return is_bad, traces


# --- non-finite numbers


def _zero(leaf: jax.Array) -> jax.Array:
    """Return 0, or NaN for a leaf with non-finite numbers: times zero, all other numbers are zero.

    A product with a vector of zeros takes a CPU a third of the time of a sum.
    """
    if leaf.ndim > 1:
        leaf = jnp.tensordot(jnp.zeros(leaf.shape[:-1], leaf.dtype), leaf, leaf.ndim - 1)
    return jnp.sum(leaf * jnp.zeros((), leaf.dtype))


def check_finite(found: tuple[jax.Array, jax.Array], first: int, every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    found
        Losses of every step, and whether a block that starts there has one that is not finite.
    first, every
        Index of the first step in the user's call, and length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    """
    losses, is_bad = map(on_host, found)
    if is_bad.any():
        start = int(np.argmax(is_bad))
        block = losses[start : start + every]
        step = start + int(np.argmax(~np.isfinite(block)))  # the first one if all losses are finite
        raise NonFiniteError(first + step, float(losses[step]), len(block), first)


def _reset_spoiled(
    learner: BaseLearner, is_bad: jax.Array, is_masked: jax.Array | None, traces: Traces
) -> Traces:
    """Reset the samples that are not finite after a skipped update, or NaN in a masked step.

    Traces are read only if an update is skipped, or a state is NaN in a masked step. Initial values
    are computed only then, since they may draw random numbers.
    """

    def reset(traces: Traces) -> Traces:
        initial = list(learner.initial_values().values())
        samples = _spoiled_samples(learner, is_bad, initial, traces)
        learner.reset_samples(initial, samples)
        return reset_traces(learner.compiled.trace_specs, traces, samples)

    is_suspect = is_bad
    if is_masked is not None:
        states = values_of(learner.short_term_states.values())
        has_nan = [jnp.any(x != x) for x in jax.tree.leaves(states)]  # also for random keys
        is_suspect = is_bad | (is_masked & functools.reduce(jnp.logical_or, has_nan))
    return run_if(is_suspect, reset, traces)


def _spoiled_samples(
    learner: BaseLearner, is_bad: jax.Array, initial: list[PyTree], traces: Traces
) -> jax.Array:
    """Return the samples that have a state or a trace with a bad number; see `_reset_spoiled`.

    It is one flag for each, or one for all if samples cannot be reset separately.
    """

    def test(leaf: jax.Array, start: Any = 0.0) -> jax.Array:
        # An infinity where the state starts at one is a running maximum.
        return jnp.isnan(leaf) | (is_bad & jnp.isinf(leaf) & ~jnp.isinf(start))

    flat, batch, traces = learner.graph.flat_state, learner.graph.batch, unpack(traces)
    samples, of_states = batch.samples, []
    is_apart = (flat is None or flat.samples == samples) and not batch.unclear
    for (path, state), start in zip(learner.short_term_states.items(), initial, strict=True):
        pairs = zip(jax.tree.leaves(state.value), jax.tree.leaves(start), strict=True)
        for index, (leaf, first) in enumerate(pairs):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                axis = batch.axis_at(path, index) if is_apart else None
                others = tuple(a for a in range(leaf.ndim) if a != axis)
                of_states.append(jnp.any(test(leaf, first), others))
    if samples is not None and is_apart:
        with contextlib.suppress(OptionError):  # they share a trace
            of_traces = samples_with(test, learner.compiled.trace_specs, traces, samples)
            return functools.reduce(jnp.logical_or, of_states, of_traces)
    numbers = [x for x in jax.tree.leaves(traces) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.any(jnp.stack([jnp.any(x) for x in (*of_states, *map(test, numbers))]))

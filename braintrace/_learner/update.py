"""What follows a gradient: the update, whether it runs, and the restart of spoiled samples.

An update is a function of a `StepResult` that writes parameters and other States: the user's
``update_fn``, a gradient transformation, or an object with its own States.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import held, hold, values_of
from .._core.traces import reset_traces, samples_with, unpack
from .._errors import NonFiniteError, OptionError, in_words
from .._from_function import gradients_by_path
from .._graph.method import Traces
from .._model import write_by_path
from .._typing import PyTree, path_name
from ..sharding import on_host
from .arguments import Options
from .base import BaseLearner
from .optimizer import is_transformation
from .resets import reset_states
from .traces import CarriedTraces
from .user_step import call_user, first_written, intercepting, run_if, traced_values


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


Update: TypeAlias = Callable[[StepResult], None]


def update_of(learner: BaseLearner, options: Options) -> Update:
    """Return the update of a call."""
    optimizer = options.optimizer
    if optimizer is not None:
        update = _apply_transformation if is_transformation(optimizer) else _call_optimizer
        return functools.partial(update, learner, optimizer)
    update_fn: Any = options.update_fn
    if options.has_aux:
        return lambda found: call_user("update_fn", update_fn, found.gradients, found.aux)
    return lambda found: call_user("update_fn", update_fn, found.gradients)


def _call_optimizer(learner: BaseLearner, optimizer: Any, found: StepResult) -> None:
    gradients = _downhill(found.gradients, learner.parameters_for_optimizer())
    with in_words(lambda: FAILS):
        optimizer.update(gradients_by_path(learner.module, gradients))


def _apply_transformation(learner: BaseLearner, optimizer: Any, found: StepResult) -> None:
    now, state = learner.parameters_for_optimizer(), learner.held_optimizer.transformed
    gradients, more = _downhill(found.gradients, now), {}
    if any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(optimizer.update).parameters.values()
    ):
        loss = jnp.average(found.losses, weights=found.weights)
        more["value"] = loss.astype(found.losses.dtype)
    with in_words(lambda: FAILS):
        changes, state.value = optimizer.update(gradients, state.value, now, **more)
    new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), now, changes)
    write_by_path(learner.param_states, gradients_by_path(learner.module, new))


FAILS = "`optimizer.update` fails for the gradients"


def _downhill(gradients: PyTree, parameters: PyTree) -> PyTree:
    """Return gradients in the containers of their parameters, which optimizers subtract.

    JAX's derivative with respect to a complex number is the conjugate of the direction of ascent.
    """
    leaves = [x.conj() if jnp.iscomplexobj(x) else x for x in jax.tree.leaves(gradients)]
    return jax.tree.unflatten(jax.tree.structure(parameters), leaves)


# --- whether it runs


def run_update(
    learner: BaseLearner, update: Update, nonfinite: str, found: StepResult, traces: Traces
) -> tuple[Any, Traces]:
    """Run an update, unless a mask or a non-finite number forbids it.

    Parameters
    ----------
    learner, update
        The learner, and the update.
    nonfinite
        See `etrace_online`.
    found, traces
        Result of the step, and the traces after it, which the update can read.

    Returns
    -------
    verdict
        ``'raise'``: index of the first leaf of the gradients that is not finite (after them the
        loss), or -1; ``'skip'``: whether the update was skipped, and the samples that were reset.
    traces
        The traces, in which samples may be reset.
    """
    runs = None if found.weights is None else jnp.any(found.weights != 0)
    verdict = is_bad = None
    if nonfinite != "ignore":  # before `update_fn` writes to the dict
        leaves = jax.tree.leaves(gradients_by_path(learner.module, found.gradients))
        is_finite = jnp.stack([jnp.isfinite(_zero(leaf)) for leaf in (*leaves, found.losses)])
        is_bad = ~jnp.all(is_finite) & (True if runs is None else runs)
        if nonfinite == "raise":
            verdict = jnp.where(is_bad, jnp.argmin(is_finite), -1)
        else:
            runs = ~is_bad & (True if runs is None else runs)
    left = traced_values(learner)
    with intercepting(learner, _refuse_step), _showing(learner, traces):
        if runs is None:
            update(found)
        else:

            def run(_: None, values: tuple[PyTree, jax.Array, PyTree]) -> None:
                update(StepResult(*values, weights=found.weights))

            run_if(runs, run, None, (found.gradients, found.losses, found.aux))
    path = first_written(left, traced_values(learner))
    if path is not None:
        raise _refusal(f"writes the hidden State '{path_name(path)}'")
    if nonfinite == "skip":
        assert is_bad is not None
        skipped = learner.held_optimizer.skipped
        skipped.value = skipped.value + is_bad
        is_masked = None if found.weights is None else jnp.any(found.weights == 0)
        samples, traces = _reset_spoiled(learner, is_bad, is_masked, traces)
        verdict = is_bad, samples
    return verdict, traces


@contextlib.contextmanager
def _showing(learner: BaseLearner, traces: Traces) -> Iterator[None]:
    """Replace the learner's traces by the traces after the step, read-only."""
    own = learner.carried
    learner.carried = shown = CarriedTraces(own.zeros, tuple)
    hold(shown, traces)
    try:
        yield
    finally:
        learner.carried = own
    leaves, now = (list(map(id, jax.tree.leaves(tree))) for tree in (traces, held(shown)))
    if leaves != now:
        raise _refusal("writes the traces")


def _refuse_step(*arguments: PyTree) -> NoReturn:
    raise _refusal("calls the learner, which runs a step")


def _refusal(what: str) -> OptionError:
    return OptionError(
        f"`update_fn` {what}. It may change parameters and its own States; hidden states and "
        "traces keep their values from after the step. Change hidden states in `update` of the "
        "model; to start a new sequence, use `reset`."
    )


# --- non-finite numbers


def _zero(leaf: jax.Array) -> jax.Array:
    """Return 0, or NaN for a leaf with non-finite numbers: times zero, all other numbers are zero.

    A product with a vector of zeros takes a CPU a third of the time of a sum.
    """
    if leaf.ndim > 1:
        leaf = jnp.tensordot(jnp.zeros(leaf.shape[:-1], leaf.dtype), leaf, leaf.ndim - 1)
    return jnp.sum(leaf * jnp.zeros((), leaf.dtype))


def check_finite(losses: jax.Array, verdicts: jax.Array, names: Sequence[str], every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    losses, verdicts
        Losses of every step, and its verdict or that of its block.
    names
        Names of the leaves of the gradients.
    every
        Length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    """
    by_step, values = on_host(verdicts), on_host(losses)
    (bad,) = np.nonzero(by_step >= 0)
    if bad.size:
        start = int(bad[0])
        block = values[start : start + every]
        (of_block,) = np.nonzero(~np.isfinite(block))
        step, index = start + int(of_block[0] if of_block.size else 0), int(by_step[start])
        name = names[index] if index < len(names) else None
        raise NonFiniteError(step, float(values[step]), name, len(block))


def _reset_spoiled(
    learner: BaseLearner, is_bad: jax.Array, is_masked: jax.Array | None, traces: Traces
) -> tuple[jax.Array, Traces]:
    """Reset the samples that are not finite after a skipped update, or NaN in a masked step.

    Traces are read only if an update is skipped, or a state is NaN in a masked step. Initial values
    are computed only then, since they may draw random numbers. Return one flag for each sample, or
    one for all if these cannot be reset separately, and the new traces.
    """
    specs = learner.compiled.trace_specs

    def spoiled(traces: Traces, initial: list[PyTree]) -> jax.Array:
        return _spoiled_samples(learner, is_bad, initial, unpack(traces))

    def reset(now: tuple[jax.Array, Traces]) -> tuple[jax.Array, Traces]:
        initial = list(learner.initial_values().values())
        samples = spoiled(now[1], initial)
        reset_states(learner, initial, samples)
        return samples, reset_traces(specs, now[1], samples)

    states, is_suspect = values_of(learner.short_term_states.values()), is_bad
    if is_masked is not None:
        is_nan = [jnp.any(x != x) for x in jax.tree.leaves(states)]  # also for random keys
        is_suspect = is_bad | (is_masked & jnp.any(jnp.stack([jnp.zeros((), bool), *is_nan])))
    none = jnp.zeros(jax.eval_shape(spoiled, traces, states).shape, bool)
    result: tuple[jax.Array, Traces] = run_if(is_suspect, reset, (none, traces))
    return result


def _spoiled_samples(
    learner: BaseLearner, is_bad: jax.Array, initial: list[PyTree], traces: Traces
) -> jax.Array:
    """Return the samples that have a state or a trace with a bad number; see `_reset_spoiled`."""

    def test(leaf: jax.Array, start: Any = 0.0) -> jax.Array:
        # An infinity where the state starts at one is a running maximum.
        return jnp.isnan(leaf) | (is_bad & jnp.isinf(leaf) & ~jnp.isinf(start))

    graph, batch, samples = learner.graph, learner.graph.batch, learner.graph.batch.samples
    is_apart = graph.flat_state is None or graph.flat_state.samples == samples
    is_apart = is_apart and samples is not None and not batch.unclear
    of_states = []
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

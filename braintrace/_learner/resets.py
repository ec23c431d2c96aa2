"""Resets: ``where(flag, initial, now)`` for States, and for the samples of a learner."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import is_lost, is_watched
from .._checks import flags_of
from .._core.sites import flags_along
from .._core.traces import outliving, pack
from .._errors import LostTracesError, OptionError, in_words
from .._graph import FILTERS, Batch, ETraceGraph
from .._model import States, short_term, values_by_path
from .._typing import Path, path_name
from .base import BaseLearner
from .body import Initial
from .traces import start_of_filter
from .user_step import PureStep


def reset_values(
    batch: Batch, now: Mapping[Path, Any], initial: Mapping[Path, Any], flags: jax.Array
) -> dict[Path, Any]:
    """Return values of States in which some samples, or all, are at the start of a sequence."""

    def of_state(path: Path) -> Any:
        old, tree = jax.tree.flatten(now[path])
        pairs = zip(old, jax.tree.leaves(initial[path]), strict=True)
        return jax.tree.unflatten(tree, [of_leaf(path, i, *pair) for i, pair in enumerate(pairs)])

    def of_leaf(path: Path, index: int, old: jax.Array, new: jax.Array) -> jax.Array:
        axis = batch.axis_at(path, index)
        mixed = jnp.where(flags_along(axis, flags, old.ndim), new, old)
        # Random keys have no `astype`.
        return mixed if mixed.dtype == old.dtype else mixed.astype(old.dtype)

    return {path: of_state(path) for path in now}


def reset_states(learner: BaseLearner, initial: Initial, flags: jax.Array) -> None:
    """Reset some samples of the model's States, or all."""
    states = learner.short_term_states
    now = {path: state.value for path, state in states.items()}
    after = reset_values(learner.graph.batch, now, dict(zip(states, initial, strict=True)), flags)
    for path, state in states.items():
        state.value = after[path]


# --- flags


def check_flags(
    name: str, value: Any, graph: ETraceGraph, states: States, steps: int | None = None
) -> jax.Array:
    """Return reset flags, one for all samples or one for each, possibly of several steps.

    Parameters
    ----------
    name, value
        The argument of the user.
    graph, states
        The compiled model, and its States.
    steps
        Length of the sequence; ``None``: there is no time axis.

    Raises
    ------
    ShapeError
        If the flags are not boolean, or have another shape.
    """
    time = () if steps is None else (steps,)
    shapes = f"{time}, or {(*time, 'batch')} to reset samples one by one".replace("'", "")
    flags = flags_of(
        name, value, shapes, lambda f: f.shape[: len(time)] == time and f.ndim <= len(time) + 1
    )
    if flags.ndim == len(time):
        return flags
    given = f"`{name}` has shape {flags.shape}, with one flag per sample"
    values = values_by_path(short_term(states)).items()
    own = {path: list(map(jnp.shape, jax.tree.leaves(value))) for path, value in values}
    graph.batch.check(given, flags.shape[-1], own)
    return flags[..., 0] if graph.batch.samples == 1 else flags


def check_fixed_weights(learner: BaseLearner, step: PureStep, resets: bool) -> None:
    """Refuse a sequence in which the weight of an ETP operation changes.

    Raises
    ------
    OptionError
        If a weight is computed from a State that the step writes, or that ``resets`` initialise.
    """
    paths = {id(state): path for path, state in learner.states_of_step.items()}
    written = {paths.get(id(state)) for state in step.written_of(step.states)}
    for key, own in learner.graph.held_paths.items():
        for path in written.intersection(own):
            assert path is not None
            is_fresh = resets and path in learner.short_term_states
            raise OptionError(
                f"The weight of '{key}' is computed from State '{path_name(path)}', which "
                f"{'`reset` initialises' if is_fresh else '`step_fn` writes'}. Weights are fixed "
                "within a sequence: change it between the calls or in the `update_fn` of "
                "`etrace_online`, or make it a `brainstate.LongTermState`, which a reset keeps."
            )


# --- the learner's own states


def reset_state(
    learner: BaseLearner, batch_size: int | None = None, *, where: Any = None, **kwargs: Any
) -> None:
    """Start a new sequence: reset states to their initial values, and traces to zero.

    You can call it in your own loop (also inside ``brainstate.transform.jit``, ``for_loop`` and
    ``cond``), and between calls of a learner.

    Parameters
    ----------
    batch_size
        Argument of the model's ``init_state``; ``None``: the current size of the states. A new
        size compiles the model again.
    where
        Booleans ``(batch,)``: the samples that are reset. Other samples continue. States
        without a batch axis continue unless all flags are set. ``None``: all samples.
    **kwargs
        Other arguments of ``init_state``, which brainstate passes to every module.

    Raises
    ------
    ShapeError
        If ``batch_size`` is ``None`` and ``init_state`` returns other shapes than the states
        have, or if the shape of ``where`` does not fit them.
    OptionError
        If samples that share an input are reset separately (`ES_D_RTRL`).
    """
    if not is_watched():
        learner.carried.finish()
    if where is not None or is_watched():  # traces of other keys cannot be made inside
        learner.current_states()
    if where is not None:
        _reset_samples(learner, where, kwargs)
        return
    if any(map(is_lost, learner.states_of_model.values())):
        # A transformation of the user has created them, so they cannot be written any more.
        mapped, batch = learner.graph.traced.batch_size, learner.graph.batch
        batch_size = batch_size or mapped or batch.samples
        given = {} if mapped or batch_size is None else {"batch_size": batch_size}
        brainstate.nn.init_all_states(learner.module, **given, **kwargs)
    if learner.samples_of_model is not None and batch_size is not None:
        learner.samples_of_model = batch_size
    with in_words(lambda: f"`reset_state` runs `init_state` of `{type(learner.module).__name__}`"):
        states, before = learner.states_of_model, learner.compiled
        states = {path: state for path, state in states.items() if path[0] != FILTERS}
        values = learner.initial_values(states, batch_size, **kwargs)
    learner.move_to(values, batch_size)
    now, filters = learner.compiled, learner.compiled.graph.traced.filters
    is_alike = jax.tree.structure(now.trace_specs) == jax.tree.structure(before.trace_specs)
    is_alike = is_alike and {leaf.name for leaf in filters} == learner.filters.keys()
    if is_alike and now.pairs == before.pairs:
        _reset_traces(learner)
    else:
        learner.begin_traces()
    learner.place()


def _reset_samples(learner: BaseLearner, where: Any, options: dict[str, Any]) -> None:
    states = learner.states_of_model
    now = values_by_path(short_term(states))
    flags = check_flags("where", where, learner.graph, states)
    fresh = learner.initial_values(states, **options)
    values = reset_values(learner.graph.batch, now, fresh, flags)
    carried, is_outside = learner.carried, not is_watched()
    after = None if carried.is_zero else learner.compiled.reset(carried.arrays(), flags)
    changes = [states[path] for path in values], list(values.values()), after

    def finish() -> None:
        carried.advance(learner.followed, *changes, is_outside=is_outside)

    carried.complete(finish, is_outside)
    learner.place()


def _reset_traces(learner: BaseLearner) -> None:
    for leaf in learner.compiled.graph.traced.filters:
        learner.filters[leaf.name].value = start_of_filter(leaf)
    if outliving(learner.compiled.trace_specs):
        with contextlib.suppress(LostTracesError):  # a lost random stream is reset
            fresh = learner.traces_after_reset(learner.traces.value)
            learner.carried.store(pack(fresh, learner.carried.pairs), not is_watched())
            return
    learner.leave_starting_traces()

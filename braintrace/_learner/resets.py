"""Resets: ``where(flag, initial, now)`` for States, and for the samples of a learner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import initialise, is_lost, is_watched
from .._checks import flags_of
from .._core.sites import flags_along
from .._errors import OptionError, in_words
from .._graph.traced_model import Batch
from .._model import values_by_path, write_by_path
from .._typing import Path, path_name

if TYPE_CHECKING:
    from .base import BaseLearner


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


def reset_states(learner: BaseLearner, initial: list[Any], flags: jax.Array) -> None:
    """Reset some samples of the model's States, or all."""
    states = learner.short_term_states
    now = {path: state.value for path, state in states.items()}
    after = reset_values(learner.graph.batch, now, dict(zip(states, initial, strict=True)), flags)
    for path, state in states.items():
        state.value = after[path]


# --- flags


def check_flags(name: str, value: Any, learner: BaseLearner, steps: int | None = None) -> jax.Array:
    """Return reset flags, one for all samples or one for each, possibly of several steps.

    Parameters
    ----------
    name, value
        The argument of the user.
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
    learner.graph.batch.check(given, flags.shape[-1])
    return flags[..., 0] if learner.graph.batch.samples == 1 else flags


def check_fixed_weights(
    learner: BaseLearner, written: Iterable[brainstate.State], resets: bool
) -> None:
    """Refuse a sequence in which the weight of an ETP operation changes.

    Raises
    ------
    OptionError
        If a weight is computed from a State that the step writes, or that ``resets`` initialise.
    """
    ids = set(map(id, written))
    paths = {path for path, state in learner.states_of_step.items() if id(state) in ids}
    for key, own in learner.graph.held_paths.items():
        for path in paths.intersection(own):
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
        initialise(learner.module, **given, **kwargs)
    if learner.samples_of_model is not None and batch_size is not None:
        learner.samples_of_model = batch_size
    with in_words(lambda: f"`reset_state` runs `init_state` of `{type(learner.module).__name__}`"):
        values, before = learner.initial_of_model(batch_size, kwargs), learner.compiled
    step, carried = learner.step_at(values, batch_size), learner.carried
    trees = [jax.tree.structure(each.trace_specs) for each in (before, step)]
    is_alike = trees[0] == trees[1] and before.pairs == step.pairs

    def write() -> None:
        write_by_path(learner.states_of_model, values)
        learner.use(step)
        learner.begin_sequence(carried.arrays if is_alike else None)

    carried.complete(write, not is_watched())
    learner.place()


def _reset_samples(learner: BaseLearner, where: Any, options: dict[str, Any]) -> None:
    states = learner.short_term_states
    flags = check_flags("where", where, learner)
    fresh = learner.initial_values(**options)
    values = reset_values(learner.graph.batch, values_by_path(states), fresh, flags)
    carried, is_outside = learner.carried, not is_watched()
    after = None if carried.is_zero else learner.compiled.reset(carried.arrays(), flags)
    changes = states.values(), [values[path] for path in states], after, is_outside
    carried.complete(lambda: carried.advance(learner.followed.values(), *changes), is_outside)
    learner.place()

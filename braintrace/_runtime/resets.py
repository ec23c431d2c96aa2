"""Resets of single samples between two steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import flags_of
from .._core.sites import flags_along
from .._errors import OptionError
from .._graph import Batch, ETraceGraph
from .._typing import Path
from .compiled_step import CompiledStep
from .model_states import States
from .program import LearnerStore


def reset_array(old: jax.Array, new: jax.Array, axis: int | None, flags: jax.Array) -> jax.Array:
    """Return an array in which some samples, or all, are reset to the start of a sequence.

    Parameters
    ----------
    old, new
        The current array, and the array at the start of a sequence.
    axis
        The batch axis; ``None``: the array is shared by all samples.
    flags
        One flag for all samples, or one for each.
    """
    mixed = jnp.where(flags_along(axis, flags, old.ndim), new, old)
    # Random keys have no `astype`.
    return mixed if mixed.dtype == old.dtype else mixed.astype(old.dtype)


def reset_values(
    batch: Batch, now: Mapping[Path, Any], initial: Mapping[Path, Any], flags: jax.Array
) -> dict[Path, Any]:
    """Return values of States in which some samples, or all, are reset."""

    def of_state(path: Path) -> Any:
        old, tree = jax.tree.flatten(now[path])
        pairs = zip(old, jax.tree.leaves(initial[path]), strict=True)
        axes = (batch.axis_at(path, index) for index in range(len(old)))
        leaves = [reset_array(*pair, axis, flags) for pair, axis in zip(pairs, axes, strict=True)]
        return jax.tree.unflatten(tree, leaves)

    return {path: of_state(path) for path in now}


def reset_samples(
    step: CompiledStep,
    of_model: States,
    store: LearnerStore,
    fresh: Mapping[Path, Any],
    flags: jax.Array,
) -> None:
    """Reset samples: write initial values to States, and zeros to the traces."""
    states = [of_model[path] for path in fresh]
    now = dict(zip(fresh, store.values(states), strict=True))
    values = reset_values(step.graph.batch, now, fresh, flags)
    after = None if store.is_zero else step.reset(store.traces.arrays(), flags)
    store.write(states, values.values(), after)


def check_where(
    where: Any, graph: ETraceGraph, values: Mapping[Path, Any], batch_size: int | None = None
) -> jax.Array:
    """Return the samples to reset: one flag for all of them, or one per sample.

    Raises
    ------
    ShapeError
        If the flags are not boolean, or not one for each sample of the model.
    OptionError
        If a batch size is also given, or the learning rule follows all samples as one.
    """
    if batch_size is not None:
        raise OptionError(
            f"`reset_state` got both `where` and `batch_size={batch_size}`. `where` resets "
            "samples of the current batch: leave out one of the two."
        )
    shapes = "(batch,), one per sample, or a single one"
    flags = flags_of("where", where, shapes, lambda flags: flags.ndim <= 1)
    if flags.ndim == 1:
        given = f"`where` has shape {flags.shape}, one flag per sample"
        return flags_of_samples(given, flags, graph, values)
    return flags


def flags_of_samples(
    given: str, flags: jax.Array, graph: ETraceGraph, values: Mapping[Path, Any]
) -> jax.Array:
    """Return flags whose last axis is the batch; a batch of one needs a flag for all samples.

    Parameters
    ----------
    given
        Description of the flags, for messages.
    flags
        Booleans; the last axis is the batch.
    graph, values
        The compiled model, and values of its short-term States by path.

    Raises
    ------
    ShapeError
        If the model has no batch axis, an unknown one, or another number of samples.
    OptionError
        If the learning rule follows all samples as one.
    """
    leaves = {path: jax.tree.leaves(value) for path, value in values.items()}
    shapes = {path: list(map(jnp.shape, own)) for path, own in leaves.items()}
    graph.batch.check(given, flags.shape[-1], shapes)
    if graph.batch.samples == 1:
        return flags[..., 0]
    if graph.flat_state is not None and graph.flat_state.samples == 1:
        shared = next(leaf for leaf in graph.flat_state.leaves if graph.batch.axis(leaf) is None)
        raise OptionError(
            f"{given}, but all samples share hidden state '{shared.name}' of shape "
            f"{shared.shape}, and the learning rule follows them together. Give one flag for all "
            "samples, or use `D_RTRL`."
        )
    return flags

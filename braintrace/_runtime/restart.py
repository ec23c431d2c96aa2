"""Samples that start anew between two steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import flags_of
from .._errors import ShapeError
from .._executor import over_first_axis
from .._typing import Path, path_name


def start_anew(now: Any, initial: Any, flags: jax.Array) -> Any:
    """Return values in which some samples, or all, are as at the start of a sequence."""

    def chosen(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(over_first_axis(flags, old.ndim), new, old).astype(old.dtype)

    return jax.tree.map(chosen, now, initial)


def check_where(where: Any, values: Mapping[Path, Any]) -> jax.Array:
    """Return which samples are to start anew: one flag for all of them, or one per sample.

    Raises
    ------
    ShapeError
        If these are no booleans, or not one per entry of the first axis of every value.
    """
    shapes = "(batch,), one per sample, or a single one"
    flags = flags_of("where", where, shapes, lambda flags: flags.ndim <= 1)
    if flags.ndim == 1:
        check_first_axes(f"`where` has shape {flags.shape}, one flag per sample", flags, values)
    return flags


def check_first_axes(given: str, flags: Any, values: Mapping[Path, Any]) -> None:
    """Refuse flags of single samples where they are not the first axis of every State.

    Parameters
    ----------
    given
        What has been given, for the message.
    flags
        Booleans whose last axis is the batch.
    values
        Values of the short-term States by path.

    Raises
    ------
    ShapeError
        Naming the first State that they do not fit.
    """
    (size,) = flags.shape[-1:]
    for path, value in values.items():
        for shape in map(jnp.shape, jax.tree.leaves(value)):
            if shape[:1] != (size,):
                raise ShapeError(
                    f"{given}, but State '{path_name(path)}' has shape {shape}: its first axis is "
                    f"not the batch of {size}. Give one flag for all samples."
                )

"""Samples that start anew between two steps: which, and when they are asked for in advance."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._arguments import array_of
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
    flags = array_of("where", where)
    if flags.dtype != bool or flags.ndim > 1:
        raise ShapeError(
            f"`where` has shape {flags.shape} and dtype {flags.dtype}; expected booleans of shape "
            "(batch,), one per sample, or a single one."
        )
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


def number_of_samples(values: Mapping[Path, Any]) -> int | None:
    """Return the size of the first axis that all values of States have, or ``None``."""
    shapes = {jnp.shape(leaf)[:1] for value in values.values() for leaf in jax.tree.leaves(value)}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else None


class RequestedRestarts:
    """Restarts that are asked for while a driver runs the user's code, for it to carry out.

    A request is a State, so that it passes through ``cond`` and ``for_loop``. The States live as
    long as the algorithm: what the user has compiled himself writes to those that it was traced
    with. brainstate does not look into this object.

    Attributes
    ----------
    is_collecting
        Whether `reset_state` is to ask for a restart instead of carrying it out.
    """

    def __init__(self) -> None:
        self.is_collecting = False
        self._flags: dict[tuple[int, ...], brainstate.State] = {}

    def prepare(self, samples: int | None) -> None:
        """Make the States, outside of what is traced with them."""
        for shape in [(), *([] if samples is None else [(samples,)])]:
            if shape not in self._flags:
                with jax.ensure_compile_time_eval():
                    self._flags[shape] = brainstate.State(jnp.zeros(shape, bool))

    def ask(self, flags: jax.Array) -> None:
        """Ask for a restart of all samples, or of some."""
        state = self._flags[flags.shape]
        state.value = state.value | flags

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[jax.Array]]:
        """Collect what is asked for inside, as flags that are there when it has ended."""
        # `value` would record that the State is read: a step without requests has none of them.
        before = {shape: state._value for shape, state in self._flags.items()}
        asked: list[jax.Array] = []
        self.is_collecting = True
        try:
            yield asked
        finally:
            self.is_collecting = False
        for shape, state in self._flags.items():
            if state._value is not before[shape]:
                asked.append(state.value)
                state.value = jnp.zeros(shape, bool)

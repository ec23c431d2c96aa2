"""Wrappers that mark an input as one time step or as a sequence."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .._checks import common_length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SingleStepData:
    """One time step of one input.

    Parameters
    ----------
    data
        A pytree of arrays as ``update`` takes them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> SingleStepData(jnp.zeros((2, 3))).data.shape
    (2, 3)
    """

    data: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiStepData:
    """A sequence of time steps of one input, time first.

    Parameters
    ----------
    data
        A pytree of arrays with a leading time axis.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> MultiStepData(jnp.zeros((7, 2, 3))).data.shape
    (7, 2, 3)
    """

    data: Any


def is_sequence(arguments: tuple[Any, ...]) -> bool:
    """Test whether any argument is a `MultiStepData`."""
    return any(isinstance(argument, MultiStepData) for argument in arguments)


def unwrap(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the data of the wrappers."""
    return tuple(
        argument.data if isinstance(argument, (SingleStepData, MultiStepData)) else argument
        for argument in arguments
    )


def check_steps(arguments: tuple[Any, ...]) -> None:
    """Refuse sequences without steps, or of different lengths.

    Raises
    ------
    ShapeError
        If there are any.
    """
    sequences = [argument.data for argument in arguments if isinstance(argument, MultiStepData)]
    if shapes := [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(sequences)]:
        common_length(shapes, "`MultiStepData`")


def first_step(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one step: wrappers removed, sequences cut to their first step."""
    check_steps(arguments)
    return tuple(
        jax.tree.map(lambda leaf: leaf[0], argument.data)
        if isinstance(argument, MultiStepData)
        else argument.data
        if isinstance(argument, SingleStepData)
        else argument
        for argument in arguments
    )

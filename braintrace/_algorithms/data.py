"""How a caller says whether an input is one time step or a sequence of them."""

import dataclasses
from typing import Any

import jax


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
    """Tell whether any argument is a `MultiStepData`."""
    return any(isinstance(argument, MultiStepData) for argument in arguments)


def unwrap(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the wrappers hold."""
    return tuple(
        argument.data if isinstance(argument, (SingleStepData, MultiStepData)) else argument
        for argument in arguments
    )


def first_step(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one step: wrappers removed, sequences cut to their first step."""
    return tuple(
        jax.tree.map(lambda leaf: leaf[0], argument.data)
        if isinstance(argument, MultiStepData)
        else argument.data
        if isinstance(argument, SingleStepData)
        else argument
        for argument in arguments
    )

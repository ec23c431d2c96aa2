"""Arguments of the learner's methods besides options: weights, sequences, a mask."""

import itertools
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.typing import ArrayLike

from ..._checks import common_length, shown
from ..._errors import OptionError, ShapeError
from ..._jax import own_copy
from ..._typing import Path, PyTree

ARRAYS = (jax.Array, np.ndarray, np.generic, saiunit.Quantity, brainstate.State)

Gradients: TypeAlias = PyTree
"""A dict by the paths of parameters, or by the keys of ``weights``; for a `from_function` model a
pytree like its ``params``. The type of a learner does not determine which one."""


Chosen: TypeAlias = tuple[tuple[Hashable, Path], ...]
"""The parameters whose gradients are requested: pairs of the user's key and the path."""


def chosen_among(parameters: Mapping[Path, brainstate.State], weights: PyTree) -> Chosen:
    """Return the parameters in a user's dict of States.

    Raises
    ------
    OptionError
        If it contains other values.
    """
    paths = {id(state): path for path, state in parameters.items()}
    for key, state in weights.items():
        if id(state) not in paths:
            raise OptionError(
                f"`weights[{shown(key)}]` is {shown(state)}; expected a parameter of the model, "
                "one of `model.states(ParamState)`."
            )
    return tuple((key, paths[id(state)]) for key, state in weights.items())


def flattened(sequences: PyTree) -> tuple[list[Any], PyTree]:
    """Return arrays, or their types, and the structure of sequences."""
    leaves, tree = jax.tree.flatten(sequences)
    return [leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf) for leaf in leaves], tree


def of_numbers(sequences: PyTree) -> PyTree:
    """Return sequences of arrays; tables and NumPy arrays are copied, see `own_copy`."""
    if all(map(isinstance, jax.tree.leaves(sequences), itertools.repeat(jax.Array))):
        return sequences
    return jax.tree.map(lambda x: np.array(x) if _is_table(x) else own_copy(x), sequences)


def _is_table(leaf: Any) -> bool:
    """Test whether a leaf is not an array, but defines its conversion to one of numbers."""
    if isinstance(leaf, ARRAYS) or not hasattr(type(leaf), "__array__"):
        return False
    return np.asarray(leaf).dtype.kind in "biufc"


def length_of(sequences: PyTree) -> int:
    """Return the number of steps of a user's sequences.

    Raises
    ------
    ShapeError
        If they have no steps, or differ in length.
    """
    return common_length([aval.shape for aval in flattened(sequences)[0]], "sequence")


def weights_of(mask: ArrayLike, steps: int) -> jax.Array:
    """Return a mask as weights of the steps' losses.

    Raises
    ------
    ShapeError
        If it does not have one weight per step.
    """
    weights = jnp.asarray(mask, float)
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},). For a "
            "weight of each sample, pass the weights as another sequence, and multiply the losses "
            "of the samples in `step_fn`."
        )
    return weights

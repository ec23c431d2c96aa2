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

from ..._algorithms import ETraceAlgorithm
from ..._arguments import Kind, array_of, check_arrays, common_length, shown, type_of
from ..._errors import DtypeError, OptionError, ShapeError
from ..._jax import is_there, is_tracer, own_copy
from ..._sharding import on_host
from ..._typing import Path, PyTree

ARRAYS = (jax.Array, np.ndarray, np.generic, saiunit.Quantity, brainstate.State)

ALGORITHM = Kind(
    "an algorithm such as `braintrace.D_RTRL(model)`",
    lambda value: isinstance(value, ETraceAlgorithm),
)

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
        If it is not a dict, or contains other values.
    """
    hint = "expected a dict of parameters of the model, some of `model.states(ParamState)`"
    if not isinstance(weights, Mapping):
        raise OptionError(f"`weights` is {shown(weights)}; {hint}.")
    paths = {id(state): path for path, state in parameters.items()}
    for key, state in weights.items():
        if id(state) not in paths:
            raise OptionError(f"`weights[{shown(key)}]` is {shown(state)}; {hint}.")
    return tuple((key, paths[id(state)]) for key, state in weights.items())


def flattened(sequences: PyTree) -> tuple[list[Any], PyTree]:
    """Return the types of all arrays of sequences, or arrays of these types, and their structure.

    Raises
    ------
    DtypeError, OptionError
        If they contain other values.
    """
    leaves, tree = jax.tree.flatten(sequences)
    try:
        return [
            leaf if isinstance(leaf, jax.Array) and is_there(leaf) else type_of(leaf)
            for leaf in leaves
        ], tree
    except (TypeError, ValueError, OverflowError):
        for index, sequence in enumerate(sequences):
            check_arrays(f"sequence {index}", sequence)
        raise


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
    DtypeError, OptionError, ShapeError
        If they are not sequences, or differ in length.
    """
    return common_length([aval.shape for aval in flattened(sequences)[0]], "sequence")


def weights_of(mask: ArrayLike, steps: int, reduction: str) -> jax.Array:
    """Return a mask as real weights of the steps' losses.

    Raises
    ------
    DtypeError
        If it is not real.
    ShapeError
        If it does not have one weight per step.
    OptionError
        If a weight is not finite, or the sum of weights is too large as the divisor of a mean.
    """
    given = array_of("mask", mask)
    is_real = any(jnp.issubdtype(given.dtype, kind) for kind in (bool, jnp.integer, jnp.floating))
    if not is_real:
        raise DtypeError(f"`mask` has dtype {given.dtype}; expected real weights.")
    weights = given.astype(jnp.result_type(float))
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},)."
        )
    if is_tracer(weights):
        return weights
    values = on_host(weights)
    if not np.all(np.isfinite(values)):
        raise OptionError("`mask` has weights that are not finite (NaN or infinity).")
    with np.errstate(over="ignore"):
        total = np.sum(values)
    # XLA multiplies by the reciprocal, and flushes subnormal numbers to zero.
    largest = 1 / np.finfo(values.dtype).tiny
    if reduction == "mean" and not abs(total) < largest:
        raise OptionError(
            f"`mask` has weights with the sum {total}, which is too large for a mean in "
            f"{values.dtype}: expected less than {largest:.1e}. Scale them down."
        )
    return weights

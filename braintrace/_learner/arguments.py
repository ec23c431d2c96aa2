"""What the methods of a learner take: options, sequences, a mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm
from .._arguments import (
    BOOLEAN,
    POSITIVE,
    Kind,
    array_of,
    check_arrays,
    check_option,
    one_of,
)
from .._errors import DtypeError, OptionError, ShapeError
from .._jax import is_tracer
from .._typing import PyTree

ALGORITHM = Kind(
    "an algorithm such as `braintrace.D_RTRL(model)`",
    lambda value: isinstance(value, ETraceAlgorithm),
)


REDUCTION = one_of("mean", "sum")
CHUNK_SIZE = POSITIVE.or_else("auto")
MEMORY_BUDGET = POSITIVE.or_else(None)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a sequence is run, and what is returned of it; see `Learner.etrace_grad`.

    Raises
    ------
    OptionError
        For a value that is not accepted, or a budget where it would decide nothing.
    """

    reduction: str = "mean"
    chunk_size: int | str = "auto"
    memory_budget: int | None = None
    has_aux: bool = False
    unit_aware: bool = False
    return_value: bool = dataclasses.field(default=False, compare=False)  # the same is compiled

    def __post_init__(self) -> None:
        check_option("reduction", self.reduction, REDUCTION)
        check_option("chunk_size", self.chunk_size, CHUNK_SIZE)
        check_option("memory_budget", self.memory_budget, MEMORY_BUDGET)
        if self.memory_budget is not None and self.chunk_size != "auto":
            raise OptionError(
                f"`memory_budget` is {self.memory_budget} and `chunk_size` is {self.chunk_size}. A "
                "budget is for `chunk_size='auto'`, which it limits: leave out one of the two."
            )
        check_option("has_aux", self.has_aux, BOOLEAN)
        check_option("unit_aware", self.unit_aware, BOOLEAN)
        check_option("return_value", self.return_value, BOOLEAN)


PLAIN = Options()


def shapes_of(sequences: PyTree) -> list[PyTree]:
    """Return the types of all arrays of sequences.

    Raises
    ------
    DtypeError, OptionError
        If there is something else among them.
    """
    try:
        return [jax.typeof(leaf) for leaf in jax.tree.leaves(sequences)]
    except TypeError:
        for index, sequence in enumerate(sequences):
            check_arrays(f"sequence {index}", sequence)
        raise


def weights_of(mask: ArrayLike, steps: int, reduction: str) -> jax.Array:
    """Return a mask as real weights of the steps' losses.

    Raises
    ------
    DtypeError
        If it is not real.
    ShapeError
        If there is not one weight per step.
    OptionError
        If a weight is not finite, or the sum that a mean is divided by is too large.
    """
    given = array_of("mask", mask)
    if jnp.issubdtype(given.dtype, jnp.complexfloating):
        raise DtypeError(f"`mask` has dtype {given.dtype}; expected real weights.")
    weights = given.astype(jnp.result_type(float))
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},)."
        )
    if is_tracer(weights):
        return weights
    values = np.asarray(weights)
    if not np.all(np.isfinite(values)):
        raise OptionError("`mask` has weights that are not finite (NaN or infinity).")
    with np.errstate(over="ignore"):
        total = np.sum(values)
    # XLA multiplies by the reciprocal, and takes one below the smallest normal number as zero.
    largest = 1 / np.finfo(values.dtype).tiny
    if reduction == "mean" and not abs(total) < largest:
        raise OptionError(
            f"`mask` has weights of sum {total}, by which a mean in {values.dtype} cannot be "
            f"divided: expected less than {largest:.1e}. Scale them down; only ratios matter."
        )
    return weights

"""What the drivers take besides sequences and functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._algorithms import ETraceAlgorithm
from .._arguments import Kind, array_of
from .._errors import DtypeError, OptionError, ShapeError
from .._jax import is_tracer

ALGORITHM = Kind(
    "an algorithm such as `braintrace.D_RTRL(model)`",
    lambda value: isinstance(value, ETraceAlgorithm),
)


def weights_of(mask: Any, steps: int, reduction: str) -> jax.Array:
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

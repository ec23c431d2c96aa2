"""What the user functions share: taking quantities apart, checking operands, folding axes."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import saiunit

from .._errors import ShapeError, UnitError


def split(value: Any) -> tuple[Any, Any]:
    """Return the array and the unit of a quantity (or of a plain array)."""
    mantissa, unit = saiunit.split_mantissa_unit(value)
    return jnp.asarray(mantissa), unit


def attach(mantissa: Any, unit: Any) -> Any:
    """Put a unit back; a dimensionless result is a plain array."""
    if unit == saiunit.UNITLESS:
        return mantissa
    return saiunit.maybe_decimal(saiunit.Quantity(mantissa, unit=unit))


def bias_operands(operation: str, bias: Any, unit: Any, out_features: int) -> tuple[Any, ...]:
    """Return the bias, rescaled into the product's unit, as zero or one operands."""
    if bias is None:
        return ()
    bias_unit = saiunit.get_unit(bias)
    if not bias_unit.has_same_dim(unit):
        raise UnitError(
            f"`{operation}`: the bias has unit `{bias_unit}`, but `x` times the weight has unit "
            f"`{unit}`. Give the bias a unit of the same dimension."
        )
    mantissa = bias.to_decimal(unit) if isinstance(bias, saiunit.Quantity) else bias
    if bias_unit == saiunit.UNITLESS and unit != saiunit.UNITLESS:
        mantissa = saiunit.Quantity(bias).to_decimal(unit)
    mantissa = jnp.asarray(mantissa)
    if mantissa.shape != (out_features,):
        raise ShapeError(
            f"`{operation}`: expected a bias of shape {(out_features,)}, got {mantissa.shape}."
        )
    return (mantissa,)


def check_features(operation: str, x: Any, in_features: int, weight: str) -> None:
    """Raise unless the last axis of ``x`` fits the weight."""
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ShapeError(
            f"`{operation}`: the last axis of `x` must have size {in_features} to fit {weight}; "
            f"`x` has shape {x.shape}."
        )


def bind_folded(bind_vector: Callable, bind_batch: Callable, x: Any, *operands: Any) -> Any:
    """Bind the vector form for 1-D ``x``, else the batched form with all axes but one folded."""
    if x.ndim == 1:
        return bind_vector(x, *operands)
    if x.ndim == 2:
        return bind_batch(x, *operands)
    leading = x.shape[:-1]
    y = bind_batch(x.reshape(math.prod(leading), x.shape[-1]), *operands)
    return y.reshape(*leading, y.shape[-1])

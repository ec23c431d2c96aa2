"""What the user functions share: taking quantities apart, checking operands, folding axes."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import saiunit

from .._arguments import array_of, is_quantity
from .._errors import ShapeError, UnitError


def split(operation: str, name: str, value: Any) -> tuple[Any, Any]:
    """Return the array and the unit of an operand: a quantity, or a plain array.

    Raises
    ------
    DtypeError
        If it is nothing that JAX computes with.
    """
    if not is_quantity(value):
        return array_of(name, value, f"`{operation}`: "), saiunit.UNITLESS
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
    array, bias_unit = split(operation, "bias", bias)
    if not bias_unit.has_same_dim(unit):
        raise UnitError(
            f"`{operation}`: `bias` has unit `{bias_unit}`, but `x` times the weight has unit "
            f"`{unit}`. Give the bias a unit of the same dimension."
        )
    is_plain = bias_unit == saiunit.UNITLESS and unit == saiunit.UNITLESS
    quantity = saiunit.Quantity(array, unit=bias_unit)
    mantissa = array if is_plain else jnp.asarray(quantity.to_decimal(unit))
    if mantissa.shape != (out_features,):
        raise ShapeError(
            f"`{operation}`: expected `bias` of shape {(out_features,)}, got {mantissa.shape}."
        )
    return (mantissa,)


def check_features(operation: str, x: Any, in_features: int, weight: str) -> None:
    """Raise unless the last axis of ``x`` fits the weight."""
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ShapeError(
            f"`{operation}`: the last axis of `x` must have size {in_features} to fit {weight}; "
            f"`x` has shape {x.shape}."
        )


def bind_folded(
    bind_vector: Callable[..., Any], bind_batch: Callable[..., Any], x: Any, *operands: Any
) -> Any:
    """Bind the vector form for 1-D ``x``, else the batched form with all axes but one folded."""
    if x.ndim == 1:
        return bind_vector(x, *operands)
    if x.ndim == 2:
        return bind_batch(x, *operands)
    leading = x.shape[:-1]
    y = bind_batch(x.reshape(math.prod(leading), x.shape[-1]), *operands)
    return y.reshape(*leading, y.shape[-1])

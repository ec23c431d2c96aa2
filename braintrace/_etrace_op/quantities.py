"""Helpers of the user functions: units, biases, folding of axes."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import saiunit

from .._errors import ShapeError
from .._jax import to_array
from .primitive import ETPPrimitive


def split(value: Any, function: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
    """Return the array and the unit of an operand, after the user's function if given."""
    value = value if function is None else function(value)
    if isinstance(value, saiunit.Quantity):
        mantissa, unit = saiunit.split_mantissa_unit(value)
        return to_array(mantissa), unit
    return to_array(value), saiunit.UNITLESS


def attach(mantissa: Any, unit: Any) -> Any:
    """Attach a unit to an array; a dimensionless result is a plain array."""
    return saiunit.maybe_decimal(saiunit.Quantity(mantissa, unit=unit))


def in_unit(array: Any, unit: Any, wanted: Any) -> Any:
    """Return an array's numbers in another unit of the same dimension."""
    if unit == wanted:
        return array
    return jnp.asarray(saiunit.Quantity(array, unit=unit).to_decimal(wanted))


def bias_operands(
    operation: str,
    bias: Any,
    unit: Any,
    shape: tuple[int, ...],
    function: Callable[[Any], Any] | None = None,
    full_shape: tuple[int, ...] | None = None,
) -> tuple[Any, ...]:
    """Return the bias, rescaled into the product's unit, as zero or one operands.

    The user's ``function`` of the bias is applied first. The bias may have ``full_shape``, if
    given, with the other axes of the result.

    Raises
    ------
    ShapeError
        If the bias has another shape; broadcast, its trace would be wrong.
    """
    if bias is None:
        return ()
    array, bias_unit = split(bias, function)
    array = in_unit(array, bias_unit, unit)
    if array.shape not in (shape, full_shape):
        raise ShapeError(f"`{operation}`: expected `bias` of shape {shape}, got {array.shape}.")
    return (array.reshape(shape),)


def add_bias(y: Any, bias: tuple[Any, ...]) -> Any:
    """Add zero or one biases to the result of an operation, along its last axes."""
    return y + jnp.broadcast_to(bias[0], y.shape) if bias else y


def check_axes(operation: str, weight: Any, axes: str) -> None:
    """Refuse a weight with other axes, which JAX would broadcast."""
    if weight.ndim != axes.count(",") + 1:
        raise ShapeError(
            f"`{operation}`: expected `weight` of shape {axes}, got shape {weight.shape}."
        )


def bind_folded(
    primitives: tuple[ETPPrimitive, ETPPrimitive],
    x: Any,
    *operands: Any,
    axes_of_sample: int = 1,
    **params: Any,
) -> Any:
    """Bind the form for one sample, else the form for a batch with folded axes.

    ``primitives`` are the two forms, in this order.
    """
    leads, (vector, batch) = x.ndim - axes_of_sample, primitives
    if leads <= 1:
        return (batch if leads else vector).bind(x, *operands, **params)
    leading = x.shape[:leads]
    y = batch.bind(x.reshape(math.prod(leading), *x.shape[leads:]), *operands, **params)
    return y.reshape(*leading, *y.shape[1:])

"""Helpers of the user functions: units, checks of operands, folding of axes."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import saiunit

from ..._arguments import (
    FUNCTION,
    check_arrays,
    check_option,
    is_quantity,
    numbers_of,
    shown,
)
from ..._errors import OptionError, ShapeError, UnitError
from ..._foreign import in_words
from ..primitive import ETPPrimitive

FUNCTION_OR_NONE = FUNCTION.or_else(None)


def split(operation: str, name: str, value: Any) -> tuple[Any, Any]:
    """Return the array and the unit of an operand: a quantity, or a plain array.

    Raises
    ------
    DtypeError
        If it is not a numeric array or quantity.
    """
    mantissa, unit = value, saiunit.UNITLESS
    if is_quantity(value):
        mantissa, unit = saiunit.split_mantissa_unit(value)
    return numbers_of(name, mantissa, f"`{operation}`: "), unit


def attach(mantissa: Any, unit: Any) -> Any:
    """Attach a unit to an array; a dimensionless result is a plain array."""
    if unit == saiunit.UNITLESS:
        return mantissa
    return saiunit.maybe_decimal(saiunit.Quantity(mantissa, unit=unit))


def split_result(
    operation: str, name: str, value: Any, option: str, function: Callable[[Any], Any] | None
) -> tuple[Any, Any]:
    """Return the array and unit of an operand, after the user's function if given.

    Raises
    ------
    DtypeError, OptionError
        If the operand or the result is not a numeric array or quantity, or ``function`` is not
        callable.
    """
    check_option(option, function, FUNCTION_OR_NONE, f"`{operation}`: ")
    if function is None:
        return split(operation, name, value)
    check_arrays(name, value, f"`{operation}`: ")
    with in_words(OptionError, lambda: f"`{operation}`: `{option}` fails for {shown(value)}"):
        result = function(value)
    return split(operation, f"{option}({name})", result)


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
    OptionError
        If there is a function without a bias.
    UnitError, ShapeError
        If the bias does not fit the product.
    """
    if bias is None:
        check_option("bias_fn", function, FUNCTION_OR_NONE, f"`{operation}`: ")
        if function is not None:
            raise OptionError(
                f"`{operation}` got `bias_fn` without a `bias`: give both or neither."
            )
        return ()
    array, bias_unit = split_result(operation, "bias", bias, "bias_fn", function)
    if not bias_unit.has_same_dim(unit):
        raise UnitError(
            f"`{operation}`: `bias` has unit `{bias_unit}`, but `x` times the weight has unit "
            f"`{unit}`. Give the bias a unit of the same dimension."
        )
    is_plain = bias_unit == saiunit.UNITLESS and unit == saiunit.UNITLESS
    quantity = saiunit.Quantity(array, unit=bias_unit)
    mantissa = array if is_plain else jnp.asarray(quantity.to_decimal(unit))
    shapes = [shape] if full_shape is None else [shape, full_shape]
    if mantissa.shape not in shapes:
        raise ShapeError(
            f"`{operation}`: expected `bias` of shape {' or '.join(map(str, shapes))}, got "
            f"{mantissa.shape}."
        )
    return (mantissa.reshape(shape),)


def check_features(operation: str, x: Any, in_features: int, weight: str) -> None:
    """Raise unless the last axis of ``x`` fits the weight."""
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise _unfitting(operation, x, f"last axis of `x` must have size {in_features}", weight)


def check_matrix(operation: str, x: Any, weight: Any) -> None:
    """Raise unless a weight ``(in, out)`` fits the last axis of ``x``."""
    _check_axes(operation, weight, "(in, out)")
    check_features(operation, x, weight.shape[0], f"a weight of shape {weight.shape}")


def check_matrices(operation: str, x: Any, weight: Any) -> None:
    """Raise unless a weight ``(groups, in, out)`` fits the last two axes of ``x``."""
    _check_axes(operation, weight, "(groups, in, out)")
    sizes = weight.shape[:2]
    if x.shape[-2:] != sizes:
        axes = f"last two axes of `x` must have sizes {sizes}"
        raise _unfitting(operation, x, axes, f"a weight of shape {weight.shape}")


def _check_axes(operation: str, weight: Any, axes: str) -> None:
    if weight.ndim != axes.count(",") + 1:
        raise ShapeError(
            f"`{operation}`: expected `weight` of shape {axes}, got shape {weight.shape}."
        )


def _unfitting(operation: str, x: Any, axes: str, weight: str) -> ShapeError:
    return ShapeError(f"`{operation}`: the {axes} to fit {weight}; `x` has shape {x.shape}.")


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

"""Canonical layout of convolutions: batch, space, features."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._arguments import POSITIVE, Kind, check_option, is_integer, shown
from ..._errors import OptionError, ShapeError


@dataclass(frozen=True)
class CanonicalConv:
    """Operands and parameters of a convolution in canonical layout.

    Attributes
    ----------
    x
        ``(batch, *space, features)``.
    kernel
        ``(*space, features of a group, outputs)``.
    params
        Hashable static parameters.
    restore
        Transposes the result ``(batch, *places, outputs)`` to the requested layout.
    bias_shape
        Shape of a bias with all axes of the result, in the requested layout.
    """

    x: Any
    kernel: Any
    params: dict[str, Any]
    restore: Callable[[Any], Any]
    bias_shape: tuple[int, ...]


@functools.cache
def canonical_dimension_numbers(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """Return the dimension numbers of the canonical layout."""
    space = tuple(range(1, ndim - 1))
    features_last = (0, ndim - 1, *space)
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return jax.lax.ConvDimensionNumbers(features_last, kernel, features_last)


MOST = 2**31
"""Limit of strides, dilations and padding: XLA ends the process if a size overflows."""
PADDING = Kind("an integer", lambda v: is_integer(v) and -MOST < v < MOST)
STEP = Kind("a positive integer", lambda v: POSITIVE.accepts(v) and v < MOST)


def to_canonical_call(
    x: Any,
    kernel: Any,
    *,
    strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    feature_group_count: int,
    batch_group_count: int,
    dimension_numbers: Any,
) -> CanonicalConv:
    """Transpose operands, make padding explicit, turn batch groups into features.

    Raises
    ------
    ShapeError, OptionError
        If shapes or options do not fit together.
    """
    numbers = _dimension_numbers(x, kernel, dimension_numbers)
    x = _transpose(x, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    out_feature, in_feature, *space_axes = numbers.rhs_spec
    kernel = _transpose(kernel, (*space_axes, in_feature, out_feature))
    space = x.ndim - 2
    params: dict[str, Any] = {
        "strides": _per_axis("strides", strides, space),
        "lhs_dilation": _per_axis("lhs_dilation", lhs_dilation, space),
        "rhs_dilation": _per_axis("rhs_dilation", rhs_dilation, space),
    }
    params["padding"] = _explicit_padding(padding, x, kernel, params)
    _check_groups(x, kernel, feature_group_count, batch_group_count)
    if batch_group_count != 1:
        x = _batch_groups_as_features(x, batch_group_count)
    params["feature_group_count"] = int(feature_group_count) * int(batch_group_count)
    params["batch_group_count"] = 1
    params["dimension_numbers"] = canonical_dimension_numbers(x.ndim)
    features = numbers.out_spec[1]
    bias_shape = tuple(kernel.shape[-1] if axis == features else 1 for axis in range(x.ndim))
    restore = functools.partial(_restore, numbers.out_spec)
    return CanonicalConv(x, kernel, params, restore, bias_shape)


def _dimension_numbers(x: Any, kernel: Any, dimension_numbers: Any) -> Any:
    if x.ndim != kernel.ndim or x.ndim < 3:
        raise ShapeError(
            f"`conv`: `x` {x.shape} and kernel {kernel.shape} must have the same number of axes, "
            "at least 3 (batch, features and space). For one sample without a batch axis, give "
            "`x[None]`."
        )
    try:
        return jax.lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
    except Exception as error:  # JAX has no message for some errors, such as unknown letters
        raise OptionError(
            f"`conv`: dimension_numbers={shown(dimension_numbers)} do not fit `x` {x.shape} and "
            f"kernel {kernel.shape}: {error}"
        ) from error


def _transpose(array: Any, axes: tuple[int, ...]) -> Any:
    return array if axes == tuple(range(array.ndim)) else jnp.transpose(array, axes)


def _restore(out_spec: tuple[int, ...], y: Any) -> Any:
    batch, features, *space = out_spec
    axes = {batch: 0, features: y.ndim - 1, **{axis: 1 + i for i, axis in enumerate(space)}}
    return _transpose(y, tuple(axes[i] for i in range(y.ndim)))


def _per_axis(name: str, value: Any, space: int) -> tuple[int, ...]:
    if value is None:
        value = 1
    values = tuple(value) if isinstance(value, (tuple, list, np.ndarray)) else (value,) * space
    if len(values) != space or not all(map(STEP.accepts, values)):
        raise OptionError(
            f"`conv`: {name}={shown(value)} must be one positive integer below 2**31, or one for "
            f"each of the {space} space axes."
        )
    return tuple(map(int, values))


def _explicit_padding(
    padding: Any, x: Any, kernel: Any, params: dict[str, Any]
) -> tuple[tuple[int, int], ...]:
    space = x.ndim - 2
    if not isinstance(padding, str):
        try:
            pairs = tuple((low, high) for low, high in padding)
        except (TypeError, ValueError, RuntimeError):  # a deleted array raises a RuntimeError
            pairs = ()
        if len(pairs) != space or not all(map(PADDING.accepts, sum(pairs, ()))):
            raise OptionError(
                f"`conv`: padding={shown(padding)} must be a string or one (low, high) pair for "
                f"each of the {space} space axes."
            )
        return tuple((int(low), int(high)) for low, high in pairs)
    if any(dilation != 1 for dilation in params["lhs_dilation"]):
        raise OptionError(
            f"`conv`: padding={shown(padding)} cannot be combined with "
            f"lhs_dilation={params['lhs_dilation']}; use explicit (low, high) pairs."
        )
    window = dilated(kernel.shape[:-2], params["rhs_dilation"])
    try:
        pads = jax.lax.padtype_to_pads(x.shape[1:-1], window, params["strides"], padding)
    except (RuntimeError, ValueError, TypeError) as error:
        raise OptionError(f"`conv`: padding={shown(padding)} is unknown: {error}") from error
    return tuple((int(low), int(high)) for low, high in pads)


def dilated(sizes: tuple[int, ...], dilations: tuple[int, ...]) -> list[int]:
    """Return the sizes of axes with ``dilation - 1`` holes between elements."""
    return [(n - 1) * d + 1 if n else 0 for n, d in zip(sizes, dilations, strict=True)]


def _check_groups(x: Any, kernel: Any, feature_groups: int, batch_groups: int) -> None:
    check_option("feature_group_count", feature_groups, POSITIVE, "`conv`: ")
    check_option("batch_group_count", batch_groups, POSITIVE, "`conv`: ")
    if feature_groups > 1 and batch_groups > 1:
        raise OptionError(
            f"`conv`: only one of feature_group_count={feature_groups} and "
            f"batch_group_count={batch_groups} may be above 1."
        )
    if x.shape[-1] != kernel.shape[-2] * feature_groups:
        raise ShapeError(
            f"`conv`: `x` has {x.shape[-1]} features; a kernel with {kernel.shape[-2]} input "
            f"features and feature_group_count={feature_groups} needs "
            f"{kernel.shape[-2] * feature_groups}."
        )
    if kernel.shape[-1] % (feature_groups * batch_groups) or x.shape[0] % batch_groups:
        raise ShapeError(
            f"`conv`: the {kernel.shape[-1]} outputs and the batch of {x.shape[0]} must divide "
            f"into {feature_groups * batch_groups} groups and {batch_groups} batch groups."
        )


def _batch_groups_as_features(x: Any, count: int) -> Any:
    """Turn each batch group into a feature group of a smaller batch.

    Output group ``g`` reads only batch group ``g``, so this is the same convolution, and its batch
    axis is the batch axis of the output.
    """
    batch = x.shape[0] // count
    x = jnp.moveaxis(x.reshape(count, batch, *x.shape[1:]), 0, -2)
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))

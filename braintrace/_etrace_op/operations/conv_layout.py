"""Canonical layout of convolutions: batch, space, features."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import OptionError


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


def to_canonical_call(
    x: Any,
    kernel: Any,
    *,
    strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    feature_group_count: int,
    dimension_numbers: Any,
) -> CanonicalConv:
    """Transpose operands, and make padding explicit."""
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
    x = _transpose(x, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    out_feature, in_feature, *space_axes = numbers.rhs_spec
    kernel = _transpose(kernel, (*space_axes, in_feature, out_feature))
    space = x.ndim - 2
    params: dict[str, Any] = {
        "strides": _per_axis(strides, space),
        "lhs_dilation": _per_axis(lhs_dilation, space),
        "rhs_dilation": _per_axis(rhs_dilation, space),
    }
    params["padding"] = _explicit_padding(padding, x, kernel, params)
    params["feature_group_count"] = int(feature_group_count)
    params["dimension_numbers"] = canonical_dimension_numbers(x.ndim)
    features = numbers.out_spec[1]
    bias_shape = tuple(kernel.shape[-1] if axis == features else 1 for axis in range(x.ndim))
    restore = functools.partial(_restore, numbers.out_spec)
    return CanonicalConv(x, kernel, params, restore, bias_shape)


def _transpose(array: Any, axes: tuple[int, ...]) -> Any:
    return array if axes == tuple(range(array.ndim)) else jnp.transpose(array, axes)


def _restore(out_spec: tuple[int, ...], y: Any) -> Any:
    batch, features, *space = out_spec
    axes = {batch: 0, features: y.ndim - 1, **{axis: 1 + i for i, axis in enumerate(space)}}
    return _transpose(y, tuple(axes[i] for i in range(y.ndim)))


def _per_axis(value: Any, space: int) -> tuple[int, ...]:
    values = value if isinstance(value, (tuple, list, np.ndarray)) else (value or 1,) * space
    return tuple(map(int, values))


def _explicit_padding(
    padding: Any, x: Any, kernel: Any, params: dict[str, Any]
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        if any(dilation != 1 for dilation in params["lhs_dilation"]):
            raise OptionError(  # JAX pads as if there were no dilation
                f"`conv`: padding={padding!r} cannot be combined with `lhs_dilation`; use explicit "
                "(low, high) pairs."
            )
        window = dilated(kernel.shape[:-2], params["rhs_dilation"])
        padding = jax.lax.padtype_to_pads(x.shape[1:-1], window, params["strides"], padding)
    return tuple((int(low), int(high)) for low, high in padding)


def dilated(sizes: tuple[int, ...], dilations: tuple[int, ...]) -> list[int]:
    """Return the sizes of axes with ``dilation - 1`` holes between elements."""
    return [(n - 1) * d + 1 if n else 0 for n, d in zip(sizes, dilations, strict=True)]

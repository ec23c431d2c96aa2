r"""Convolution: ``etp_conv``.

.. math:: y_{bpgo} = \sum_q patch(x)_{bpgq} k_{gqo} + c_{go}

The indices are: ``b`` sample, ``p`` output place, ``g`` feature group, ``q`` element of the patch
that the kernel covers (kernel place and input feature of the group), ``o`` output feature of the
group. All places share the kernel, so the exact trace cannot have the kernel's shape: each place
has its own hidden state, hence its own factor. The trace is :math:`\epsilon_{bpgqo}`, and
:math:`\epsilon_{bpgo}` for the bias. Sums over ``p`` come last, with the learning signal.

``xy_to_dw`` is written by hand: in a loop on a CPU, the VJP takes 18 times as long (16 x 16 pixels,
8 to 16 features). ``accumulate`` and ``select_outputs`` cannot be derived, because no trace is
shaped like the kernel.

The user function transposes every layout to batch, space, features (``NHWC``, ``HWIO``, ``NHWC`` in
two dimensions) around the primitive. XLA's CPU backend is fast in every case only with this layout.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import OptionError
from . import quantities
from .derive import like_operand
from .primitive import register_primitive_spec
from .registry import Arrays, Pick
from .spec import ETPPrimitiveSpec


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


def _impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False, **convolution: Any) -> Any:
    dtype = jnp.result_type(x, weight)
    strides = convolution.pop("strides")
    numbers = convolution["dimension_numbers"]
    y = jax.lax.conv_general_dilated(x.astype(dtype), weight.astype(dtype), strides, **convolution)
    if not has_bias:
        return y
    features = jax.lax.conv_dimension_numbers(x.shape, weight.shape, numbers).out_spec[1]
    return y + jax.lax.broadcast_in_dim(bias[0], y.shape, (features,))


def _groups(hidden_dim: Any, count: int) -> Any:
    return hidden_dim.reshape(*hidden_dim.shape[:-1], count, hidden_dim.shape[-1] // count)


def _xy_to_dw(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    has_bias: bool = False,
    **convolution: Any,
) -> Arrays:
    kernel = weights["weight"]
    result = {"weight": like_operand(_kernel_gradient(x, hidden_dim, kernel, convolution), kernel)}
    if has_bias:
        bias = hidden_dim.sum(tuple(range(hidden_dim.ndim - 1)))
        result["bias"] = like_operand(bias, weights["bias"])
    return result


def _kernel_gradient(x: Any, hidden_dim: Any, kernel: Any, convolution: dict[str, Any]) -> Any:
    """Return the sum over samples and places of patch times cotangent.

    It is the convolution of ``x`` by ``hidden_dim`` with samples used as features, and with stride
    and dilation of the kernel exchanged. JAX's own transpose keeps the arrays and renames their
    axes. XLA on a CPU reorders these axes only outside of loops, and is 30 times slower inside.
    """
    dtype = jnp.result_type(x, kernel, hidden_dim)
    if hidden_dim.size == 0:  # XLA has no convolution by an empty window
        return jnp.zeros(kernel.shape, dtype)
    spread = dilated(x.shape[1:-1], convolution["lhs_dilation"])
    factor = dilated(hidden_dim.shape[1:-1], convolution["strides"])
    window = dilated(kernel.shape[:-2], convolution["rhs_dilation"])
    lows = [low for low, _ in convolution["padding"]]
    product = jax.lax.conv_general_dilated(
        jnp.swapaxes(x, 0, -1).astype(dtype),
        jnp.moveaxis(hidden_dim, 0, -2).astype(dtype),
        window_strides=convolution["rhs_dilation"],
        padding=[
            (low, f + w - 1 - low - s)
            for low, f, w, s in zip(lows, factor, window, spread, strict=True)
        ],
        lhs_dilation=convolution["lhs_dilation"],
        rhs_dilation=convolution["strides"],
        dimension_numbers=convolution["dimension_numbers"],
        batch_group_count=convolution["feature_group_count"],
    )
    return jnp.moveaxis(product, 0, -2)


def _patches(x: Any, y_shape: tuple[int, ...], kernel: Any, convolution: dict[str, Any]) -> Any:
    """Return the patches ``(batch, *places, groups, patch, steps)`` of several steps.

    They are gathered by their indices: exact on every device, and several times faster on a CPU
    than a convolution with an identity.
    """
    x = jnp.moveaxis(x, 0, -1)
    edges = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            convolution["padding"], convolution["lhs_dilation"], strict=True
        )
    ]
    whole = (0, 0, 0)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), (whole, *edges, whole, whole))
    space = kernel.ndim - 2
    positions = np.indices(y_shape[-1 - space : -1], sparse=True)
    offsets = np.indices(kernel.shape[:-2], sparse=True)
    picked = [
        stride * np.expand_dims(position, tuple(range(-space, 0))) + dilation * offset
        for position, offset, stride, dilation in zip(
            positions, offsets, convolution["strides"], convolution["rhs_dilation"], strict=True
        )
    ]
    patches = x[(slice(None), *picked)]
    # (batch, *positions, *offsets, features, steps)
    leading, steps = patches.shape[: 1 + space], x.shape[-1]
    groups, window = convolution["feature_group_count"], math.prod(kernel.shape[:-2])
    patches = patches.reshape(*leading, window, groups, kernel.shape[-2], steps)
    patches = jnp.moveaxis(patches, -3, -4)
    return patches.reshape(*leading, groups, math.prod(kernel.shape[:-1]), steps)


def _accumulate(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    has_bias: bool = False,
    **convolution: Any,
) -> Arrays:
    patches = _patches(x.astype(hidden_dim.dtype), hidden_dim.shape, weights["weight"], convolution)
    factor = _groups(hidden_dim, convolution["feature_group_count"])
    if hidden_dim.shape[0] == 1:
        result = {"weight": patches * factor[0][..., None, :]}
    else:
        result = {"weight": patches @ jnp.moveaxis(factor, 0, -2)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


def _effective_weights(weights: Arrays, *, has_bias: bool = False, **convolution: Any) -> Arrays:
    """Return the kernel as ``(groups, patch, outputs of a group)``."""
    kernel = weights["weight"]
    by_group = kernel.reshape(math.prod(kernel.shape[:-1]), convolution["feature_group_count"], -1)
    result = {"weight": jnp.swapaxes(by_group, 0, 1)}
    return {**result, "bias": weights["bias"]} if has_bias else result


def _select_outputs(
    weights: Arrays, pick: Pick, *, has_bias: bool = False, **convolution: Any
) -> Arrays | None:
    if convolution["feature_group_count"] != 1:  # a group computes adjacent outputs
        return None
    return {name: pick(operand) for name, operand in weights.items()}


etp_conv_p = register_primitive_spec(
    ETPPrimitiveSpec(
        name="etp_conv",
        impl=_impl,
        trace_axes={"weight": ("group", "input", "output"), "bias": ("output",)},
        effective_weights=_effective_weights,
        batched=True,
        linear_in_input=True,
        xy_to_dw=_xy_to_dw,
        accumulate=_accumulate,
        select_outputs=_select_outputs,
    )
)


def conv(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    strides: Any = 1,
    padding: Any = "SAME",
    lhs_dilation: Any = 1,
    rhs_dilation: Any = 1,
    feature_group_count: int = 1,
    dimension_numbers: Any = None,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Convolve with a kernel that learns online, as ``jax.lax.conv_general_dilated``.

    Parameters
    ----------
    x : array or Quantity
        Batch of inputs with 1, 2 or 3 space axes; the batch axis is required.
    kernel : array or Quantity
        Trainable.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x`` times ``kernel``. It may also have all axes of
        the result, each of size 1 except the features: ``(1, 1, 1, out)``.
    strides, lhs_dilation, rhs_dilation : int or sequence of int
        One number for all space axes, or one each.
    padding : str or sequence of pairs
        ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'`` or one ``(low, high)`` per space axis.
    feature_group_count : int
        Number of groups; equal to the input features is a depthwise
        convolution.
    dimension_numbers : tuple of str, ConvDimensionNumbers or None
        Layouts of ``x``, ``kernel`` and result; None is ``('NCHW', 'OIHW', 'NCHW')``, and the same
        order in other dimensions.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of kernel and bias, applied first; see `matmul`.

    Returns
    -------
    array or Quantity
        Its unit is the product of the units of ``x`` and ``kernel``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> y = braintrace.conv(jnp.ones((2, 16, 3)), jnp.ones((4, 3, 8)),
    ...                     dimension_numbers=('NWC', 'WIO', 'NWC'))
    >>> y.shape
    (2, 16, 8)
    """
    x, x_unit = quantities.split(x)
    kernel, kernel_unit = quantities.split(kernel, weight_fn)
    call = to_canonical_call(
        x,
        kernel,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=feature_group_count,
        dimension_numbers=dimension_numbers,
    )
    unit = x_unit * kernel_unit
    outputs = call.kernel.shape[-1:]
    biases = quantities.bias_operands("conv", bias, unit, outputs, bias_fn, call.bias_shape)
    bind = functools.partial(etp_conv_p.bind, call.x, call.kernel, *biases)
    y = bind(has_bias=bool(biases), **call.params)
    return quantities.attach(call.restore(y), unit)

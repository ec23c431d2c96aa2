r"""Convolution: ``etp_conv``.

.. math:: y_{bpgo} = \sum_q patch(x)_{bpgq} k_{gqo} + c_{go}

The indices are: ``b`` sample, ``p`` output place, ``g`` feature group, ``q`` element of the patch
that the kernel covers (kernel place and input feature of the group), ``o`` output feature of the
group. All places share the kernel, so the exact trace cannot have the kernel's shape: each place
has its own hidden state, hence its own factor. The trace is :math:`\epsilon_{bpgqo}`, and
:math:`\epsilon_{bpgo}` for the bias. Sums over ``p`` come last, with the learning signal.

``xy_to_dw`` is written by hand: in a loop on a CPU, the VJP takes 18 times as long (16 x 16 pixels,
8 to 16 features). ``accumulate`` cannot be derived, because no trace is shaped like the kernel.

The user function transposes every layout to batch, space, features (``NHWC``, ``HWIO``, ``NHWC`` in
two dimensions) around the primitive. XLA's CPU backend is fast in every case only with this layout.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import quantities
from .primitive import register_primitive_spec
from .registry import Arrays, ETPPrimitiveSpec
from .rules import like_operand


def _layout(ndim: int) -> jax.lax.ConvDimensionNumbers:
    space = tuple(range(1, ndim - 1))
    features_last = (0, ndim - 1, *space)
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return jax.lax.ConvDimensionNumbers(features_last, kernel, features_last)


def _impl(
    x: Any, weight: Any, *bias: Any, strides: Any, has_bias: bool = False, **params: Any
) -> Any:
    dtype = jnp.result_type(x, weight)
    y = jax.lax.conv_general_dilated(x.astype(dtype), weight.astype(dtype), strides, **params)
    return quantities.add_bias(y, bias)


def _xy_to_dw(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False, **params: Any
) -> Arrays:
    result = {"weight": _kernel_gradient(x, hidden_dim, weights["weight"], **params)}
    if has_bias:
        result["bias"] = hidden_dim.sum(tuple(range(hidden_dim.ndim - 1)))
    return {name: like_operand(gradient, weights[name]) for name, gradient in result.items()}


def _kernel_gradient(
    x: Any,
    hidden_dim: Any,
    kernel: Any,
    *,
    strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    feature_group_count: int,
    dimension_numbers: Any,
) -> jax.Array:
    """Return the sum over samples and places of patch times cotangent.

    It is the convolution of ``x`` by ``hidden_dim`` with samples used as features, and with stride
    and dilation of the kernel exchanged. JAX's own transpose keeps the arrays and renames their
    axes. XLA on a CPU reorders these axes only outside of loops, and is 30 times slower inside.
    """
    dtype = jnp.result_type(x, kernel, hidden_dim)
    if hidden_dim.size == 0:  # XLA has no convolution by an empty window
        return jnp.zeros(kernel.shape, dtype)

    def dilated(sizes: Any, dilations: Any) -> Any:
        return np.maximum(0, (np.array(sizes) - 1) * dilations + 1)

    spread = dilated(x.shape[1:-1], lhs_dilation)
    factor = dilated(hidden_dim.shape[1:-1], strides)
    window = dilated(kernel.shape[:-2], rhs_dilation)
    lows = np.array([low for low, _ in padding])
    product = jax.lax.conv_general_dilated(
        jnp.swapaxes(x, 0, -1).astype(dtype),
        jnp.moveaxis(hidden_dim, 0, -2).astype(dtype),
        window_strides=rhs_dilation,
        padding=[*zip(lows.tolist(), (factor + window - 1 - lows - spread).tolist(), strict=True)],
        lhs_dilation=lhs_dilation,
        rhs_dilation=strides,
        dimension_numbers=dimension_numbers,
        batch_group_count=feature_group_count,
    )
    return jnp.moveaxis(product, 0, -2)


@functools.lru_cache(maxsize=256)
def _pixels(space: tuple[int, ...], window: tuple[int, ...], strides: Any, params: Any) -> Any:
    """Return the pixel at each place of each patch; the number of pixels stands for padding."""
    options, count = dict(params), len(space)
    padding, spreads, gaps = (options[k] for k in ("padding", "lhs_dilation", "rhs_dilation"))
    pixels, is_padding = np.zeros((1,) * 2 * count, int), np.zeros((1,) * 2 * count, bool)
    for axis, (size, width, stride) in enumerate(zip(space, window, strides, strict=True)):
        (low, high), spread, gap = padding[axis], spreads[axis], gaps[axis]
        length = max(0, (size - 1) * spread + 1)
        places = max(0, (low + length + high - (width - 1) * gap - 1) // stride + 1)
        at = np.arange(places)[:, None] * stride + np.arange(width) * gap - low
        at = np.expand_dims(at, [a for a in range(2 * count) if a not in (axis, count + axis)])
        is_padding = is_padding | (at < 0) | (at >= length) | (at % spread != 0)
        pixels = pixels * size + at // spread
    pixels = np.where(is_padding, math.prod(space), pixels).astype(np.int32)
    return pixels.reshape(*pixels.shape[:count], -1)


def _patches(
    x: jax.Array, kernel: Any, *, strides: Any, feature_group_count: int, **params: Any
) -> jax.Array:
    """Return the patches ``(batch, *places, groups, patch, steps)`` of several steps.

    Gathering is exact on every device, and several times faster on a CPU than a convolution with an
    identity.
    """
    steps, batch, *space, features = x.shape
    *window, group_features, _ = kernel.shape
    pixels = _pixels(tuple(space), tuple(window), strides, tuple(params.items()))
    x = jnp.moveaxis(x, 0, -1).reshape(batch, math.prod(space), features, steps)
    patches = x.at[:, pixels].get(mode="fill", fill_value=0)
    places, groups = pixels.shape[:-1], feature_group_count
    patches = patches.reshape(batch, *places, math.prod(window), groups, group_features, steps)
    patches = jnp.moveaxis(patches, -3, -4)
    return patches.reshape(batch, *places, groups, math.prod(window) * group_features, steps)


def _accumulate(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False, **params: Any
) -> Arrays:
    patches = _patches(x.astype(hidden_dim.dtype), weights["weight"], **params)
    groups, outputs = params["feature_group_count"], hidden_dim.shape[-1]
    factor = hidden_dim.reshape(*hidden_dim.shape[:-1], groups, outputs // groups)
    if hidden_dim.shape[0] == 1:
        terms = patches * factor[0][..., None, :]
    else:
        terms = patches @ jnp.moveaxis(factor, 0, -2)
    return {"weight": terms, "bias": hidden_dim.sum(0)} if has_bias else {"weight": terms}


def _effective_weights(weights: Arrays, *, has_bias: bool = False, **params: Any) -> Arrays:
    """Return the kernel as ``(groups, patch, outputs of a group)``."""
    kernel = weights["weight"]
    by_group = kernel.reshape(math.prod(kernel.shape[:-1]), params["feature_group_count"], -1)
    others = {"bias": weights["bias"]} if has_bias else {}
    return {"weight": jnp.swapaxes(by_group, 0, 1), **others}


etp_conv_p = register_primitive_spec(
    ETPPrimitiveSpec(
        name="etp_conv",
        impl=_impl,
        xy_to_dw=_xy_to_dw,
        batched=True,
        trace_axes={"weight": ("group", "input", "output"), "bias": ("output",)},
        effective_weights=_effective_weights,
        accumulate=_accumulate,
        linear_in_input=True,
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

    def per_axis(value: Any) -> tuple[int, ...]:
        return tuple(map(int, np.broadcast_to(1 if value is None else value, x.ndim - 2)))

    plain = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=per_axis(strides),
        padding=padding,
        lhs_dilation=per_axis(lhs_dilation),
        rhs_dilation=per_axis(rhs_dilation),
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
    )
    shapes = (jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (x, kernel))
    (equation,) = jax.make_jaxpr(plain)(*shapes).eqns  # explicit options, and JAX's own errors
    same = "padding", "lhs_dilation", "rhs_dilation", "feature_group_count"
    params = {name: equation.params[name] for name in same}
    numbers, layout = equation.params["dimension_numbers"], _layout(x.ndim)
    params |= {"strides": equation.params["window_strides"], "dimension_numbers": layout}
    unit, outputs = x_unit * kernel_unit, kernel.shape[numbers.rhs_spec[0]]
    full_shape = tuple(outputs if axis == numbers.out_spec[1] else 1 for axis in range(x.ndim))
    biases = quantities.bias_operands("conv", bias, unit, (outputs,), bias_fn, full_shape)
    x = _moved(x, numbers.lhs_spec, layout.lhs_spec)
    kernel = _moved(kernel, numbers.rhs_spec, layout.rhs_spec)
    y = etp_conv_p.bind(x, kernel, *biases, has_bias=bool(biases), **params)
    return quantities.attach(_moved(y, layout.out_spec, numbers.out_spec), unit)


def _moved(array: jax.Array, spec: Any, wanted: Any) -> jax.Array:
    """Transpose an array from one layout to another."""
    return jnp.transpose(array, [spec[wanted.index(axis)] for axis in range(array.ndim)])

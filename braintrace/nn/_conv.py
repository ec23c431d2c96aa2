"""Convolution layers, plain and with standardised kernels.

The kernel is ``(*space, in / groups, out)`` in every layout of the input. With ``channel_first`` an
input is ``(batch, in, *space)``, else ``(batch, *space, in)``; the batch axis may be missing.
"""

from typing import Any

import brainstate
import saiunit

from .._etrace_op.conv import conv
from ._linear import row, standardized


class _Conv:
    """The output of a convolution, with the kernel of the layer."""

    def _kernel(self: Any) -> Any:
        return self.weight.value["weight"]

    def update(self: Any, x: Any) -> Any:
        """Return the output for one input or a batch of inputs."""
        kernel, bias = self._kernel(), self.weight.value.get("bias")
        if bias is not None:
            bias = row(saiunit.math.reshape(bias, (-1,)), self.out_channels)
        one_sample = x.ndim == len(self.in_size)
        y = conv(
            x[None] if one_sample else x,
            kernel if self.w_mask is None else kernel * self.w_mask,
            bias,
            strides=self.stride,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.groups,
            dimension_numbers=self.dimension_numbers,
        )
        return y[0] if one_sample else y

    def _conv_op(self: Any, x: Any, params: dict[str, Any]) -> Any:
        """Return the output without its unit, for constructors of brainstate's layers."""
        return saiunit.get_mantissa(self.update(x))


class _Standardized(_Conv):
    def _kernel(self: Any) -> Any:
        return standardized(self.weight.value, self.eps)


class Conv1d(_Conv, brainstate.nn.Conv1d):
    """Convolution over one space axis whose kernel and bias learn online.

    Parameters
    ----------
    in_size : tuple of int
        Shape of one input, ``(length, in)``, or ``(in, length)`` with ``channel_first``.
    out_channels : int
        Number of output features.
    kernel_size : int or tuple of int
        Size of the kernel along the space axes.
    stride, lhs_dilation, rhs_dilation : int or tuple of int, optional
        Default 1.
    padding : str, int or sequence, optional
        ``'SAME'`` (default), ``'VALID'``, or numbers of zeros as in `brainstate.nn.Conv1d`.
    groups : int, optional
        Number of feature groups. Default 1.
    w_init : callable or array, optional
        Kernel ``(*kernel_size, in / groups, out)``. Default ``XavierNormal()``. May carry a unit.
    b_init : callable, array or None, optional
        Bias, one number for each output feature, in the unit of input times kernel. Default None.
    w_mask : array, callable or None, optional
        Factor of the kernel.
    channel_first : bool, optional
        Layout of input and output. Default False.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.Conv1d((8, 3), 4, kernel_size=3, stride=2)(jnp.ones((5, 8, 3))).shape
    (5, 4, 4)
    """


class Conv2d(_Conv, brainstate.nn.Conv2d):
    """Convolution over two space axes; see `Conv1d` for the parameters.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.Conv2d((8, 8, 3), 4, kernel_size=3)(jnp.ones((8, 8, 3))).shape
    (8, 8, 4)
    """


class Conv3d(_Conv, brainstate.nn.Conv3d):
    """Convolution over three space axes; see `Conv1d` for the parameters.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.Conv3d((4, 4, 4, 1), 2, kernel_size=2, padding='VALID')
    >>> layer(jnp.ones((4, 4, 4, 1))).shape
    (3, 3, 3, 2)
    """


class ScaledWSConv1d(_Standardized, brainstate.nn.ScaledWSConv1d):
    """Convolution over one space axis with a standardised kernel.

    The kernel of each output feature has zero mean and the norm of its gain, as in
    `ScaledWSLinear`. All parameters of `Conv1d`, and:

    Parameters
    ----------
    ws_gain : bool, optional
        Whether the gain ``(1, ..., 1, out)`` is a parameter (initially one). Default True.
    eps : float, optional
        Lower bound of the kernel's squared norm. Default ``1e-4``.

    References
    ----------
    .. [1] S. Qiao et al., "Micro-batch training with batch-channel normalization and weight
       standardization", arXiv:1903.10520, 2019.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.ScaledWSConv1d((8, 3), 4, kernel_size=3)(jnp.ones((8, 3))).shape
    (8, 4)
    """


class ScaledWSConv2d(_Standardized, brainstate.nn.ScaledWSConv2d):
    """Convolution over two space axes, standardised kernel; see `ScaledWSConv1d`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.ScaledWSConv2d((8, 8, 3), 4, kernel_size=3)(jnp.ones((8, 8, 3))).shape
    (8, 8, 4)
    """


class ScaledWSConv3d(_Standardized, brainstate.nn.ScaledWSConv3d):
    """Convolution over three space axes, standardised kernel; see `ScaledWSConv1d`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.ScaledWSConv3d((4, 4, 4, 1), 2, kernel_size=2)(jnp.ones((4, 4, 4, 1))).shape
    (4, 4, 4, 2)
    """

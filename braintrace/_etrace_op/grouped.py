r"""Grouped matrix products: ``etp_gmm`` (a batch) and ``etp_gmv`` (one sample).

.. math:: y_{bgo} = \sum_i x_{bgi} w_{gio} + c_{go}

Shapes: x ``(batch, groups, in)`` or ``(groups, in)``, weight ``(groups, in, out)``, bias
``(groups, out)``, y ``(batch, groups, out)`` or ``(groups, out)``. Every group has a separate
matrix: :math:`\partial y_{bgo} / \partial w_{gio} = x_{bgi}` for the same ``g`` and ``o`` only. The
exact trace therefore has the weight's shape, one per sample. The operation is declared like one
matrix product (see `dense`), with ``g`` as an additional shared axis.

``xy_to_dw`` is written by hand: the VJP returns each matrix transposed, and takes 2.5 times as long
on a CPU (64 steps, 32 samples, 8 groups of 64 x 64).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import quantities
from .dense import etp_mm_p, etp_mv_p
from .derive import like_operand
from .primitive import get_primitive_spec, on_demand
from .registry import Arrays

_DENSE, _DENSE_VECTOR = map(get_primitive_spec, (etp_mm_p, etp_mv_p))


def _impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False) -> Any:
    y = jnp.einsum("...gi,gio->...go", x, weight)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _xy_to_dw(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    product = jnp.einsum("...gi,...go->gio", x.astype(hidden_dim.dtype), hidden_dim)
    result = {"weight": like_operand(product, weights["weight"])}
    if has_bias:
        bias = hidden_dim.sum(tuple(range(hidden_dim.ndim - 2)))
        result["bias"] = like_operand(bias, weights["bias"])
    return result


_spec = functools.partial(
    dataclasses.replace,
    impl=_impl,
    xy_to_dw=_xy_to_dw,
    trace_axes={"weight": ("group", "input", "output"), "bias": ("group", "output")},
)
grouped_primitives = on_demand(
    vector=_spec(_DENSE_VECTOR, name="etp_gmv"), batch=_spec(_DENSE, name="etp_gmm")
)
"""Return the primitives, for one sample and for a batch."""


def bind_grouped(x: Any, weight: Any, *bias: Any) -> Any:
    """Bind the form for ``x`` with any number of axes before groups and inputs."""
    forms, has_bias = grouped_primitives(), bool(bias)
    return quantities.bind_folded(forms, x, weight, *bias, axes_of_sample=2, has_bias=has_bias)


def grouped_matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply every group of features by a separate matrix that learns online.

    The value is ``jnp.einsum('...gi,gio->...go', x, weight) (+ bias)``. Uses are attention heads,
    ensembles, and block-diagonal matrices.

    Parameters
    ----------
    x : array or Quantity ``(..., groups, in)``
        One sample (2-D), a batch (3-D), or more leading axes.
    weight : array or Quantity ``(groups, in, out)``
        Trainable.
    bias : array or Quantity ``(groups, out)``, optional
        Trainable; rescaled into the unit of ``x`` times ``weight``.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of weight and bias, applied first.

    Returns
    -------
    array or Quantity ``(..., groups, out)``
        Its unit is the product of the units of ``x`` and ``weight``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> y = braintrace.grouped_matmul(jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4)))
    >>> y.shape
    (5, 2, 4)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight, weight_fn)
    quantities.check_axes("grouped_matmul", weight, "(groups, in, out)")
    unit = x_unit * weight_unit
    shape = weight.shape[0], weight.shape[2]
    biases = quantities.bias_operands("grouped_matmul", bias, unit, shape, bias_fn)
    return quantities.attach(bind_grouped(x, weight, *biases), unit)

r"""Dense matrix product: ``etp_mm`` (a batch) and ``etp_mv`` (one sample).

.. math:: y_{bo} = \sum_i x_{bi} w_{io} + c_o

Shapes: x ``(batch, in)`` or ``(in,)``, weight ``(in, out)``, bias ``(out,)``, y
``(batch, out)`` or ``(out,)``. Since :math:`\partial y_{bo} / \partial w_{io} = x_{bi}` for
the same ``o`` only, the exact trace has the weight's shape, one per sample:
:math:`\epsilon_{bio}` and, for the bias, :math:`\epsilon_{bo}`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import quantities
from .primitive import register_primitive_spec
from .registry import Arrays, Pick, Shapes
from .rules import like_operand
from .spec import ETPPrimitiveSpec, conventional_trainable_invars


def _impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False) -> Any:
    y = jnp.matmul(x, weight)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _yw_to_w(hidden_dim: jax.Array, trace: Arrays, *, has_bias: bool = False) -> Arrays:
    result = {"weight": trace["weight"] * hidden_dim[..., None, :]}
    if has_bias:
        result["bias"] = trace["bias"] * hidden_dim
    return result


def _xy_to_dw(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    x = x.astype(hidden_dim.dtype)
    # dw_io = sum_b x_bi f_bo, without the sum for one sample
    product = x.T @ hidden_dim if x.ndim == 2 else x[:, None] * hidden_dim[None, :]
    result = {"weight": like_operand(product, weights["weight"])}
    if has_bias:
        bias = hidden_dim.sum(0) if x.ndim == 2 else hidden_dim
        result["bias"] = like_operand(bias, weights["bias"])
    return result


def _accumulate(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    x = x.astype(hidden_dim.dtype)
    if x.shape[0] == 1:
        # A product that XLA fuses into the update of the trace, where a dot of inner
        # size one would be written out first.
        result = {"weight": x[0][..., :, None] * hidden_dim[0][..., None, :]}
    else:
        result = {"weight": jnp.einsum("k...i,k...o->...io", x, hidden_dim)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


def squared_norms_of_rows(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    """Return the sums of squares of the outer products of one step, of every row of inputs."""
    # sum_io |x_i f_o|^2 = |x|^2 |f|^2
    of_input, of_output = (jnp.sum((a * a.conj()).real, axis=-1) for a in (x[0], hidden_dim[0]))
    result = {"weight": of_input.astype(of_output.dtype) * of_output}
    if has_bias:
        result["bias"] = of_output
    return result


def _select_outputs(weights: Arrays, pick: Pick, *, has_bias: bool = False) -> Arrays:
    return {name: pick(operand) for name, operand in weights.items()}


def _input_derivative(
    weights: Arrays,
    shapes: Shapes,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    has_bias: bool = False,
) -> jax.Array:
    return weights["weight"][inputs, outputs]


def init_trace_of_entries(
    x_var: Any,
    y_var: Any,
    weight_vars: Mapping[str, Any],
    num_hidden_state: int,
    *,
    axes_of_sample: int = 1,
) -> Arrays:
    """Return zeros shaped like the operands, for every sample, with a state axis last."""
    y = y_var.aval
    batch = y.shape[: y.ndim - axes_of_sample]
    weight = (*batch, *weight_vars["weight"].aval.shape, num_hidden_state)
    result = {"weight": jnp.zeros(weight, y.dtype)}
    if "bias" in weight_vars:
        result["bias"] = jnp.zeros((*y.shape, num_hidden_state), y.dtype)
    return result


def init_output_trace(
    x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_hidden_state: int
) -> Any:
    """Return zeros shaped like the output, with a state axis last."""
    return jnp.zeros((*y_var.aval.shape, num_hidden_state), y_var.aval.dtype)


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    yw_to_w=_yw_to_w,
    xy_to_dw=_xy_to_dw,
    init_drtrl=init_trace_of_entries,
    init_pp=init_output_trace,
    trainable_invars_fn=conventional_trainable_invars,
    x_invar_index=0,
    linear_in_input=True,
    accumulate=_accumulate,
    squared_norms=squared_norms_of_rows,
    select_outputs=_select_outputs,
    trace_axes={"weight": ("input", "output"), "bias": ("output",)},
    input_derivative=_input_derivative,
)
etp_mm_p = register_primitive_spec(_spec(name="etp_mm", batched=True))
etp_mv_p = register_primitive_spec(_spec(name="etp_mv", batched_form=etp_mm_p))


def bind_dense(x: Any, weight: Any, *bias: Any) -> Any:
    """Bind the form for ``x`` with any number of axes before that of inputs."""
    vector, batch = (
        functools.partial(primitive.bind, has_bias=bool(bias)) for primitive in (etp_mv_p, etp_mm_p)
    )
    return quantities.bind_folded(vector, batch, x, weight, *bias)


def matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a weight matrix that learns online: ``x @ weight (+ bias)``.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    weight : array or Quantity ``(in, out)``
        Trainable.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x @ weight``.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of weight and bias, applied first: a mask, a sign, a square.
        ``weight`` may then be whatever pytree ``weight_fn`` makes a matrix of.

    Returns
    -------
    array or Quantity ``(..., out)``
        With the unit of ``x`` times that of ``weight``.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    DtypeError
        If an operand is nothing that JAX computes with.
    OptionError
        If ``weight_fn`` or ``bias_fn`` is no function, or ``bias_fn`` has no bias.
    UnitError
        If the unit of the bias has another dimension than the product.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.matmul(jnp.ones(3), jnp.ones((3, 2)), jnp.zeros(2))
    Array([3., 3.], dtype=float32)
    >>> braintrace.matmul(jnp.ones(3), -jnp.ones((3, 2)), weight_fn=jnp.abs)
    Array([3., 3.], dtype=float32)
    """
    x, x_unit = quantities.split("matmul", "x", x)
    weight, weight_unit = quantities.split_result(
        "matmul", "weight", weight, "weight_fn", weight_fn
    )
    quantities.check_matrix("matmul", x, weight)
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("matmul", bias, unit, weight.shape[1:], bias_fn)
    return quantities.attach(bind_dense(x, weight, *biases), unit)

r"""Low-rank matrix product: ``etp_lora_mm`` (a batch) and ``etp_lora_mv`` (one sample).

.. math:: y_{bo} = \alpha \sum_{ir} x_{bi} B_{ir} A_{ro} + c_o

Shapes: x ``(batch, in)`` or ``(in,)``, B ``(in, rank)``, A ``(rank, out)``, bias ``(out,)``.
With ``M = B A`` the operation is :math:`\alpha x M`, and the trace that D_RTRL propagates
exactly is that of ``M``: :math:`\epsilon_{bio}`, of instantaneous term :math:`x_{bi} f_{bo}`.
It is pulled back at the end: :math:`\partial B = \alpha\, \partial M A^T`,
:math:`\partial A = \alpha\, B^T \partial M`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import shown
from .._errors import OptionError, ShapeError
from . import quantities
from .dense import init_output_trace
from .primitive import register_primitive_spec
from .registry import Arrays, Pick, Shapes
from .rules import like_operand
from .spec import ETPPrimitiveSpec
from .sums import sum_over_samples


def _impl(
    x: Any, lora_b: Any, lora_a: Any, *bias: Any, alpha: float = 1.0, has_bias: bool = False
) -> Any:
    y = jnp.matmul(jnp.matmul(x, lora_b), lora_a)
    y = alpha * y
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _yw_to_w(
    hidden_dim: jax.Array, trace: Arrays, *, alpha: float = 1.0, has_bias: bool = False
) -> Arrays:
    result = {"effective": trace["effective"] * hidden_dim[..., None, :]}
    if has_bias:
        result["bias"] = trace["bias"] * hidden_dim
    return result


def _xy_to_dw(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    alpha: float = 1.0,
    has_bias: bool = False,
) -> Arrays:
    lora_b, lora_a = weights["lora_b"], weights["lora_a"]
    dtype = hidden_dim.dtype
    inputs = jnp.atleast_2d(x).astype(dtype)
    outputs = alpha * jnp.atleast_2d(hidden_dim)
    # dB = x^T (alpha f A^T), dA = (x B)^T alpha f: nothing of size in x out
    result = {
        "lora_b": like_operand(inputs.T @ (outputs @ lora_a.astype(dtype).T), lora_b),
        "lora_a": like_operand((inputs @ lora_b.astype(dtype)).T @ outputs, lora_a),
    }
    if has_bias:
        result["bias"] = like_operand(jnp.atleast_2d(hidden_dim).sum(0), weights["bias"])
    return result


def _accumulate(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    alpha: float = 1.0,
    has_bias: bool = False,
) -> Arrays:
    x = x.astype(hidden_dim.dtype)
    if x.shape[0] == 1:
        result = {"effective": x[0][..., :, None] * hidden_dim[0][..., None, :]}
    else:
        result = {"effective": jnp.einsum("k...i,k...o->...io", x, hidden_dim)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


def _contract(
    signal: jax.Array, trace: Arrays, weights: Arrays, *, alpha: float = 1.0, has_bias: bool = False
) -> Arrays:
    lora_b, lora_a = weights["lora_b"], weights["lora_a"]
    products = functools.partial(_product, has_bias=has_bias)
    summed = sum_over_samples(products, (signal, trace), axes=signal.ndim - 1)
    effective = alpha * summed["effective"]
    # Real operands need the real part alone, and products of complex matrices cost more.
    if not (jnp.iscomplexobj(lora_b) or jnp.iscomplexobj(lora_a)):
        effective = effective.real
    result = {
        "lora_b": effective @ lora_a.astype(effective.dtype).T,
        "lora_a": lora_b.astype(effective.dtype).T @ effective,
    }
    if has_bias:
        result["bias"] = summed["bias"]
    return result


def _product(operands: Any, has_bias: bool) -> Arrays:
    signal, trace = operands
    return _yw_to_w(signal, trace, has_bias=has_bias)


def _select_outputs(
    weights: Arrays, pick: Pick, *, alpha: float = 1.0, has_bias: bool = False
) -> Arrays:
    return {name: w if name == "lora_b" else pick(w) for name, w in weights.items()}


def _input_derivative(
    weights: Arrays,
    shapes: Shapes,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    alpha: float = 1.0,
    has_bias: bool = False,
) -> jax.Array:
    rows, columns = weights["lora_b"][inputs], weights["lora_a"].T[outputs]
    return alpha * jnp.sum(rows * columns, axis=-1)


def _init_drtrl(
    x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_hidden_state: int
) -> Arrays:
    y = y_var.aval
    effective = (*y.shape[:-1], x_var.aval.shape[-1], y.shape[-1], num_hidden_state)
    result = {"effective": jnp.zeros(effective, y.dtype)}
    if "bias" in weight_vars:
        result["bias"] = jnp.zeros((*y.shape, num_hidden_state), y.dtype)
    return result


def _trainable_invars(params: Mapping[str, Any]) -> dict[str, int]:
    layout = {"lora_b": 1, "lora_a": 2}
    return {**layout, "bias": 3} if params.get("has_bias", False) else layout


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    yw_to_w=_yw_to_w,
    xy_to_dw=_xy_to_dw,
    init_drtrl=_init_drtrl,
    init_pp=init_output_trace,
    trainable_invars_fn=_trainable_invars,
    x_invar_index=0,
    linear_in_input=True,
    accumulate=_accumulate,
    contract=_contract,
    select_outputs=_select_outputs,
    trace_axes={"effective": ("input", "output"), "bias": ("output",)},
    input_derivative=_input_derivative,
)
etp_lora_mm_p = register_primitive_spec(_spec(name="etp_lora_mm", batched=True))
etp_lora_mv_p = register_primitive_spec(_spec(name="etp_lora_mv", batched_form=etp_lora_mm_p))


def lora_matmul(
    x: Any,
    B: Any,
    A: Any,
    *,
    alpha: Any = 1.0,
    bias: Any = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a low-rank matrix that learns online: ``alpha * x @ B @ A (+ bias)``.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    B : array or Quantity ``(in, rank)``
        Trainable.
    A : array or Quantity ``(rank, out)``
        Trainable.
    alpha : float
        The whole scale of the product: 1 by default, and nothing is divided by the rank. For the
        ``alpha / rank`` of the paper, give that. A Python number, not a traced array.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x @ B @ A``.
    bias_fn : callable, optional
        Differentiable function of the bias, applied first. One of a factor is applied to it where
        it is given: ``lora_matmul(x, f(B), A)``.

    Returns
    -------
    array or Quantity ``(..., out)``
        With the product of the units of ``x``, ``B`` and ``A``. A frozen base weight is a
        plain operation beside it: ``x @ W + lora_matmul(x, B, A)``.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    DtypeError
        If an operand is nothing that JAX computes with.
    OptionError
        If ``alpha`` is not a finite number that is known when the model is traced, or ``bias_fn``
        no function or without a bias.
    UnitError
        If the unit of the bias has another dimension than the product.

    References
    ----------
    .. [1] E. J. Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> y = braintrace.lora_matmul(jnp.ones(3), jnp.ones((3, 2)), jnp.ones((2, 4)), alpha=0.5)
    >>> y
    Array([3., 3., 3., 3.], dtype=float32)
    """
    x, x_unit = quantities.split("lora_matmul", "x", x)
    B, b_unit = quantities.split("lora_matmul", "B", B)
    A, a_unit = quantities.split("lora_matmul", "A", A)
    if B.ndim != 2 or A.ndim != 2 or B.shape[1] != A.shape[0]:
        raise ShapeError(
            "`lora_matmul`: expected `B` of shape (in, rank) and `A` of shape (rank, out), got "
            f"{B.shape} and {A.shape}."
        )
    quantities.check_features("lora_matmul", x, B.shape[0], f"B of shape {B.shape}")
    unit = x_unit * b_unit * a_unit
    biases = quantities.bias_operands("lora_matmul", bias, unit, A.shape[1:], bias_fn)
    params = {"alpha": _constant(alpha), "has_bias": bool(biases)}
    y = quantities.bind_folded(
        functools.partial(etp_lora_mv_p.bind, **params),
        functools.partial(etp_lora_mm_p.bind, **params),
        x,
        B,
        A,
        *biases,
    )
    return quantities.attach(y, unit)


def _constant(alpha: Any) -> float:
    try:
        value = float(alpha)
    except Exception as error:
        raise OptionError(
            f"`lora_matmul`: `alpha` must be a number that is known when the model is traced, got "
            f"{shown(alpha)}. Multiply `x` by a scale that is traced or has a unit."
        ) from error
    if not math.isfinite(value):
        raise OptionError(f"`lora_matmul`: `alpha` must be finite, got {value}.")
    return value

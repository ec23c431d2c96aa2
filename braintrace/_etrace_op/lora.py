r"""Low-rank product: ``etp_lora_mm`` (a batch) and ``etp_lora_mv`` (one sample).

.. math:: y_{bo} = \alpha \sum_{ir} x_{bi} B_{ir} A_{ro} + c_o

Shapes: x ``(batch, in)`` or ``(in,)``, B ``(in, rank)``, A ``(rank, out)``, bias ``(out,)``. With
:math:`M = \alpha B A` the operation is the matrix product :math:`x M`, and has the trace of ``M``
(see `dense`): :math:`\epsilon_{bio}`, with the instantaneous term :math:`x_{bi} f_{bo}`. At the end
the trace is pulled back to the factors: :math:`\partial B = \alpha\, \partial M A^T`,
:math:`\partial A = \alpha\, B^T \partial M`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from . import quantities
from .dense import outer_terms
from .primitive import register_forms
from .registry import Arrays


def _impl(
    x: Any, lora_b: Any, lora_a: Any, *bias: Any, alpha: float = 1.0, has_bias: bool = False
) -> Any:
    return quantities.add_bias(alpha * jnp.matmul(jnp.matmul(x, lora_b), lora_a), bias)


def _effective_weights(weights: Arrays, *, alpha: float = 1.0, has_bias: bool = False) -> Arrays:
    others = {"bias": weights["bias"]} if has_bias else {}
    return {"effective": alpha * (weights["lora_b"] @ weights["lora_a"]), **others}


def _accumulate(x: Any, hidden_dim: Any, weights: Arrays, **params: Any) -> Arrays:
    terms = outer_terms(x, hidden_dim, weights, **params)
    return {"effective": terms.pop("weight"), **terms}


etp_lora_mv_p, etp_lora_mm_p = register_forms(
    "etp_lora_mv",
    "etp_lora_mm",
    impl=_impl,
    trace_axes={"effective": ("input", "output"), "bias": ("output",)},
    effective_weights=_effective_weights,
    linear_in_input=True,
    accumulate=_accumulate,
)


def lora_matmul(
    x: Any,
    B: Any,
    A: Any,
    *,
    alpha: Any = 1.0,
    bias: Any = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a low-rank matrix that learns online: ``alpha * x @ B @ A``.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    B : array or Quantity ``(in, rank)``
        Trainable.
    A : array or Quantity ``(rank, out)``
        Trainable.
    alpha : float
        The scale of the product, 1 by default. It is not divided by the rank: for the
        ``alpha / rank`` of the paper [1]_, pass that value. A Python number, not a traced array.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x @ B @ A``.
    bias_fn : callable, optional
        Differentiable function of the bias, applied first. Apply a function of a factor in the
        call: ``lora_matmul(x, f(B), A)``.

    Returns
    -------
    array or Quantity ``(..., out)``
        Its unit is the product of the units of ``x``, ``B`` and ``A``. A frozen base weight is an
        ordinary operation: ``x @ W + lora_matmul(x, B, A)``.

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
    x, x_unit = quantities.split(x)
    B, b_unit = quantities.split(B)
    A, a_unit = quantities.split(A)
    unit = x_unit * b_unit * a_unit
    biases = quantities.bias_operands("lora_matmul", bias, unit, A.shape[1:], bias_fn)
    params: dict[str, Any] = {"alpha": float(alpha), "has_bias": bool(biases)}
    y = quantities.bind_folded((etp_lora_mv_p, etp_lora_mm_p), x, B, A, *biases, **params)
    return quantities.attach(y, unit)

r"""Product with a feedback matrix: ``etp_fb_mm`` (batch), ``etp_fb_mv`` (sample).

.. math:: y_{bo} = \sum_i x_{bi} w_{io} + c_o, \qquad
          \bar x_{bi} = \sum_o \bar y_{bo} B_{io}, \qquad
          \bar w_{io} = \bar B_{io} = \sum_b x_{bi} \bar y_{bo}

It declares the product of `dense` with a weight :math:`w` that includes the tangent of ``B``
(``effective_weights``), and therefore has the trace rules of `matmul`. Cotangents of ``y`` pass
back to ``x`` by another matrix ``B`` of the weight's shape. Tangents of ``x`` pass forward by the
same matrix, so that both modes of differentiation agree. If ``B`` is a parameter, it learns by the
gradient of ``w``: with the same decay, the two matrices converge to each other from any start.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import quantities
from .dense import etp_mm_p, etp_mv_p, terms_of_product
from .primitive import ETPPrimitive, get_primitive_spec, on_demand
from .registry import Arrays, Pick
from .spec import ETPPrimitiveSpec


def _forward(x: Any, weight: Any, feedback: Any) -> Any:
    return jnp.matmul(x, weight)


_product = jax.custom_jvp(_forward)


def _product_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (x, weight, feedback), (dx, *of_matrices) = primals, tangents
    y = _product(x, weight, feedback)
    parts = [] if isinstance(dx, SymbolicZero) else [jnp.matmul(dx, feedback)]
    moving = [matrix for matrix in of_matrices if not isinstance(matrix, SymbolicZero)]
    if moving:
        parts.append(jnp.matmul(x, sum(moving[1:], moving[0])))
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


_product.defjvp(_product_jvp, symbolic_zeros=True)


def _impl(x: Any, weight: Any, feedback: Any, *bias: Any, has_bias: bool = False) -> Any:
    y = _product(x, weight, feedback)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _effective_weights(weights: Arrays, *, has_bias: bool = False) -> Arrays:
    """Return operands of `matmul`; the feedback has the gradient of the weight."""
    feedback = weights["feedback"]
    result = {"weight": weights["weight"] + (feedback - jax.lax.stop_gradient(feedback))}
    return {**result, "bias": weights["bias"]} if has_bias else result


def _select_outputs(weights: Arrays, pick: Pick, *, has_bias: bool = False) -> Arrays:
    return {name: pick(operand) for name, operand in weights.items()}


def _spec(name: str, product: ETPPrimitive) -> ETPPrimitiveSpec:
    return dataclasses.replace(
        get_primitive_spec(product),
        name=name,
        impl=_impl,
        effective_weights=_effective_weights,
        accumulate=terms_of_product(product, _effective_weights),
        select_outputs=_select_outputs,
    )


feedback_primitives = on_demand(
    vector=_spec("etp_fb_mv", etp_mv_p), batch=_spec("etp_fb_mm", etp_mm_p)
)
"""Return the primitives, for one sample and for a batch."""


def feedback_matmul(x: Any, weight: Any, feedback: Any, bias: Any = None) -> Any:
    """Multiply by a matrix that learns online, with another matrix for feedback.

    The value is ``x @ weight (+ bias)``. Gradients pass from the result back to ``x`` by
    ``feedback`` instead of ``weight``, under every learning rule and in backpropagation through
    time. This is random feedback, also called feedback alignment [1]_. A trainable feedback matrix
    learns as in [2]_.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    weight : array or Quantity ``(in, out)``
        Trainable.
    feedback : array or Quantity ``(in, out)``
        The feedback matrix, in a unit with the dimension of the weight's unit. In a State other
        than a ``ParamState`` it stays constant. In a ``ParamState`` it has the gradient of
        ``weight``; if the optimizer decays both, they converge to each other.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x @ weight``.

    Returns
    -------
    array or Quantity ``(..., out)``
        Its unit is the product of the units of ``x`` and ``weight``.

    References
    ----------
    .. [1] T. P. Lillicrap et al., "Random synaptic feedback weights support error
       backpropagation for deep learning", Nature Communications 7, 2016.
    .. [2] J. F. Kolen, J. B. Pollack, "Backpropagation without weight transport", IEEE
       International Conference on Neural Networks, 1994.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> x, weight, feedback = jnp.ones(2), jnp.ones((2, 3)), 5 * jnp.ones((2, 3))
    >>> braintrace.feedback_matmul(x, weight, feedback)
    Array([2., 2., 2.], dtype=float32)
    >>> jax.grad(lambda x: braintrace.feedback_matmul(x, weight, feedback).sum())(x)
    Array([15., 15.], dtype=float32)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight)
    quantities.check_axes("feedback_matmul", weight, "(in, out)")
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("feedback_matmul", bias, unit, weight.shape[1:])
    feedback = quantities.in_unit(*quantities.split(feedback), weight_unit).astype(weight.dtype)
    operands = (weight, feedback, *biases)
    forms, has_bias = feedback_primitives(), bool(biases)
    return quantities.attach(quantities.bind_folded(forms, x, *operands, has_bias=has_bias), unit)

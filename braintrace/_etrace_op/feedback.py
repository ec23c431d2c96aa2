r"""Matrix product with a way back of its own: ``etp_fb_mm`` (a batch), ``etp_fb_mv`` (one sample).

.. math:: y_{bo} = \sum_i x_{bi} w_{io} + c_o, \qquad
          \bar x_{bi} = \sum_o \bar y_{bo} B_{io}, \qquad
          \bar w_{io} = \bar B_{io} = \sum_b x_{bi} \bar y_{bo}

Forward it is a dense product, and its trace is that of one (see `dense`). What arrives at ``y``
goes back to ``x`` by another matrix ``B`` of the weight's shape; a tangent of ``x`` goes forward by
it, so that both modes of differentiation agree. Where ``B`` is a parameter, it learns by the
gradient of ``w``: with the same decay, the two become alike whatever they started from.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.custom_derivatives import SymbolicZero

from .._errors import DtypeError, ShapeError, UnitError
from . import quantities
from .dense import etp_mm_p, etp_mv_p
from .on_demand import on_demand
from .primitive import get_primitive_spec
from .registry import Arrays, Shapes
from .rules import like_operand
from .sums import sum_over_samples


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

_DENSE, _DENSE_VECTOR = map(get_primitive_spec, (etp_mm_p, etp_mv_p))


def _impl(x: Any, weight: Any, feedback: Any, *bias: Any, has_bias: bool = False) -> Any:
    y = _product(x, weight, feedback)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _xy_to_dw(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    return _of_both(_DENSE.xy_to_dw(x, hidden_dim, weights, has_bias=has_bias), weights)


def _contract(
    signal: jax.Array, trace: Arrays, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    def products(operands: Any) -> Arrays:
        found: Arrays = _DENSE.yw_to_w(*operands, has_bias=has_bias)
        return found

    return _of_both(sum_over_samples(products, (signal, trace), axes=signal.ndim - 1), weights)


def _input_derivative(
    weights: Arrays,
    shapes: Shapes,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    has_bias: bool = False,
) -> jax.Array:
    return weights["feedback"][inputs, outputs]


def _of_both(gradients: Arrays, weights: Arrays) -> Arrays:
    """Return the gradients of all operands: the weight's is that of the feedback too."""
    found = {**gradients, "feedback": gradients["weight"]}
    return {name: like_operand(found[name], operand) for name, operand in weights.items()}


def _trainable_invars(params: Mapping[str, Any]) -> dict[str, int]:
    layout = {"weight": 1, "feedback": 2}
    return {**layout, "bias": 3} if params.get("has_bias", False) else layout


_spec = functools.partial(
    dataclasses.replace,
    impl=_impl,
    xy_to_dw=_xy_to_dw,
    contract=_contract,
    trainable_invars_fn=_trainable_invars,
    input_derivative=_input_derivative,
)


feedback_primitives = on_demand(
    vector=_spec(_DENSE_VECTOR, name="etp_fb_mv"), batch=_spec(_DENSE, name="etp_fb_mm")
)
"""Returns the primitives, of one sample and of a batch."""


def feedback_matmul(x: Any, weight: Any, feedback: Any, bias: Any = None) -> Any:
    """Multiply by a matrix that learns online, and go back by another one.

    The value is ``x @ weight (+ bias)``. What arrives at the result goes back to ``x`` by
    ``feedback`` in the place of ``weight``, under every learning rule and in backpropagation
    through time: random feedback, also called feedback alignment.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    weight : array or Quantity ``(in, out)``
        Trainable.
    feedback : array or Quantity ``(in, out)``
        The way back, in a unit of the dimension of the weight's. Held in a State that is no
        parameter, it stays as it is. Held in a ``ParamState``, it has the gradient of ``weight``;
        a decay of both, which is the optimizer's business, makes them alike.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x @ weight``.

    Returns
    -------
    array or Quantity ``(..., out)``
        With the unit of ``x`` times that of ``weight``.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    DtypeError
        If an operand is nothing that JAX computes with, or ``feedback`` complex for a real weight.
    UnitError
        If the unit of the bias has another dimension than the product, or that of ``feedback``
        another one than ``weight``.

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
    x, x_unit = quantities.split("feedback_matmul", "x", x)
    weight, weight_unit = quantities.split("feedback_matmul", "weight", weight)
    quantities.check_matrix("feedback_matmul", x, weight)
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("feedback_matmul", bias, unit, weight.shape[1:])
    operands = (weight, _like_weight(feedback, weight, weight_unit), *biases)
    vector, batch = (
        functools.partial(primitive.bind, has_bias=bool(biases))
        for primitive in feedback_primitives()
    )
    return quantities.attach(quantities.bind_folded(vector, batch, x, *operands), unit)


def _like_weight(feedback: Any, weight: Any, unit: Any) -> Any:
    """Return the feedback as an array in the weight's unit, shape and dtype."""
    array, own = quantities.split("feedback_matmul", "feedback", feedback)
    if not own.has_same_dim(unit):
        raise UnitError(
            f"`feedback_matmul`: `feedback` has unit `{own}`, but `weight` has unit `{unit}`. Give "
            "both a unit of the same dimension."
        )
    if array.shape != weight.shape:
        raise ShapeError(
            f"`feedback_matmul`: expected `feedback` of the weight's shape {weight.shape}, got "
            f"{array.shape}."
        )
    if jnp.iscomplexobj(array) and not jnp.iscomplexobj(weight):
        raise DtypeError(
            f"`feedback_matmul`: `feedback` has dtype {array.dtype}, but `weight` has dtype "
            f"{weight.dtype}. Give a real weight a real feedback."
        )
    if own != unit:
        array = jnp.asarray(saiunit.Quantity(array, unit=own).to_decimal(unit))
    return array.astype(weight.dtype)

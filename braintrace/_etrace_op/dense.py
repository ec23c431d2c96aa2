r"""Matrix products: ``etp_mm`` (a batch) and ``etp_mv`` (one sample), and with a feedback matrix.

.. math:: y_{bo} = \sum_i x_{bi} w_{io} + c_o

Shapes: x ``(batch, in)`` or ``(in,)``, weight ``(in, out)``, bias ``(out,)``, y ``(batch, out)`` or
``(out,)``. Since :math:`\partial y_{bo} / \partial w_{io} = x_{bi}` for the same ``o`` only, the
exact trace has the weight's shape, one per sample: :math:`\epsilon_{bio}` and, for the bias,
:math:`\epsilon_{bo}`.

One rule is written by hand: without ``accumulate``, a stream of one layer needs a third more
floating-point operations, since XLA materialises the outer product of a step.

With a feedback matrix (``etp_fb_mm``, ``etp_fb_mv``),

.. math::
    \bar x_{bi} = \sum_o \bar y_{bo} B_{io}, \qquad
    \bar w_{io} = \bar B_{io} = \sum_b x_{bi} \bar y_{bo}.

It is the same product with a weight :math:`w` that includes the tangent of ``B``
(``effective_weights``). Cotangents of ``y`` pass back to ``x`` by another matrix ``B`` of the
weight's shape. Tangents of ``x`` pass forward by the same matrix, so that both modes of
differentiation agree. If ``B`` is a parameter, it learns by the gradient of ``w``: with the same
decay, the two matrices converge to each other from any start.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax_kernels import with_derivative_of
from . import quantities
from .primitive import ETPPrimitive, register_forms
from .registry import Arrays

MANY_ROWS = 256


def _impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False) -> Any:
    # The gradient of a narrow matrix, such as a readout for all steps at once, is a product over
    # the rows of `x`. With its result transposed, XLA takes a quarter of the time (6,400 rows, 128
    # inputs, 20 outputs, CPU); without the barrier, it would exchange the factors again.
    if x.ndim == 2 and len(x) >= MANY_ROWS and 4 * weight.shape[1] <= weight.shape[0]:
        weight = jax.lax.optimization_barrier(weight.T).T
    return quantities.add_bias(jnp.matmul(x, weight), bias)


def outer_terms(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False, **_: Any
) -> Arrays:
    """Return the rule ``accumulate`` of a product with a matrix, for any operands."""
    x = x.astype(hidden_dim.dtype)
    if x.shape[0] == 1:
        # A product that XLA fuses into the update of the trace; a dot of inner size one would be
        # materialised first.
        weight = x[0][..., :, None] * hidden_dim[0][..., None, :]
    else:
        weight = jnp.einsum("k...i,k...o->...io", x, hidden_dim)
    return {"weight": weight, "bias": hidden_dim.sum(0)} if has_bias else {"weight": weight}


MATRIX_AXES: Any = {"weight": ("input", "output"), "bias": ("output",)}

etp_mv_p, etp_mm_p = register_forms(
    "etp_mv",
    "etp_mm",
    impl=_impl,
    trace_axes=MATRIX_AXES,
    linear_in_input=True,
    accumulate=outer_terms,
)


def bind_dense(x: Any, weight: Any, *bias: Any) -> Any:
    """Bind the form for ``x`` with any number of axes before the axis of inputs."""
    forms = etp_mv_p, etp_mm_p
    return quantities.bind_folded(forms, x, weight, *bias, has_bias=bool(bias))


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
        ``weight`` may then be any pytree that ``weight_fn`` maps to a matrix.

    Returns
    -------
    array or Quantity ``(..., out)``
        Its unit is the product of the units of ``x`` and ``weight``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.matmul(jnp.ones(3), jnp.ones((3, 2)), jnp.zeros(2))
    Array([3., 3.], dtype=float32)
    >>> braintrace.matmul(jnp.ones(3), -jnp.ones((3, 2)), weight_fn=jnp.abs)
    Array([3., 3.], dtype=float32)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight, weight_fn)
    quantities.check_axes("matmul", weight, "(in, out)")
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("matmul", bias, unit, weight.shape[1:], bias_fn)
    return quantities.attach(bind_dense(x, weight, *biases), unit)


# --- with a feedback matrix


def _feedback_impl(x: Any, weight: Any, feedback: Any, *bias: Any, has_bias: bool = False) -> Any:
    hold = jax.lax.stop_gradient
    # Errors pass back to the input through ``feedback``; both matrices have the forward gradient.
    slope = jnp.matmul(x, hold(feedback)) + jnp.matmul(hold(x), weight + feedback)
    return quantities.add_bias(with_derivative_of(jnp.matmul(x, weight), slope), bias)


def _with_tangent(weights: Arrays, *, has_bias: bool = False) -> Arrays:
    feedback, others = weights["feedback"], {"bias": weights["bias"]} if has_bias else {}
    return {"weight": weights["weight"] + (feedback - jax.lax.stop_gradient(feedback)), **others}


@functools.cache
def feedback_primitives() -> tuple[ETPPrimitive, ETPPrimitive]:
    """Return the primitives, for one sample and for a batch; register them at the first call."""
    return register_forms(
        "etp_fb_mv",
        "etp_fb_mm",
        impl=_feedback_impl,
        trace_axes=MATRIX_AXES,
        effective_weights=_with_tangent,
        linear_in_input=True,
        accumulate=outer_terms,
    )


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

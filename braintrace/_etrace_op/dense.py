r"""Dense matrix product: ``etp_mm`` (a batch) and ``etp_mv`` (one sample).

.. math:: y_{bo} = \sum_i x_{bi} w_{io} + c_o

Shapes: x ``(batch, in)`` or ``(in,)``, weight ``(in, out)``, bias ``(out,)``, y ``(batch, out)`` or
``(out,)``. Since :math:`\partial y_{bo} / \partial w_{io} = x_{bi}` for the same ``o`` only, the
exact trace has the weight's shape, one per sample: :math:`\epsilon_{bio}` and, for the bias,
:math:`\epsilon_{bo}`.

One rule is written by hand: without ``accumulate``, a stream of one layer needs a third more
floating-point operations, since XLA materialises the outer product of a step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import rules
from . import quantities
from .primitive import ETPPrimitive, register_primitive_spec
from .registry import Arrays
from .spec import ETPPrimitiveSpec, Rule


def _impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False) -> Any:
    y = jnp.matmul(x, weight)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _accumulate(
    x: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, has_bias: bool = False
) -> Arrays:
    x = x.astype(hidden_dim.dtype)
    if x.shape[0] == 1:
        # A product that XLA fuses into the update of the trace; a dot of inner size one would be
        # materialised first.
        result = {"weight": x[0][..., :, None] * hidden_dim[0][..., None, :]}
    else:
        result = {"weight": jnp.einsum("k...i,k...o->...io", x, hidden_dim)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


def terms_of_product(primitive: ETPPrimitive, effective_weights: Rule) -> Rule:
    """Return the rule ``accumulate`` for a product with an effective weight.

    Parameters
    ----------
    primitive : ETPPrimitive
        ``etp_mm`` or ``etp_mv``, whose terms they are.
    effective_weights : callable
        The weight and the bias, if there is one, as a function of the operands.
    """

    def accumulate(x: Any, hidden_dim: Any, weights: Arrays, **params: Any) -> Arrays:
        effective = effective_weights(weights, **params)
        names = dict(zip(("weight", "bias"), effective, strict=False))
        operands = {name: effective[operand] for name, operand in names.items()}
        terms = rules.accumulate(primitive, {"has_bias": len(names) > 1}, x, hidden_dim, operands)
        return {operand: terms[name] for name, operand in names.items()}

    return accumulate


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    trace_axes={"weight": ("input", "output"), "bias": ("output",)},
    linear_in_input=True,
    accumulate=_accumulate,
)
etp_mm_p = register_primitive_spec(_spec(name="etp_mm", batched=True))
etp_mv_p = register_primitive_spec(_spec(name="etp_mv", batched_form=etp_mm_p))


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

r"""Elementwise parameter: ``etp_elemwise``.

.. math:: y = w

The operation is the identity on an array of any shape. It marks a parameter that enters a model
elementwise, after any function of the parameter alone. It has neither an input nor a batch axis;
the trace is the factor itself, shaped like ``w``.
"""

from collections.abc import Callable
from typing import Any

from . import quantities
from .primitive import register_primitive_spec
from .registry import ETPPrimitiveSpec


def _identity(weight: Any) -> Any:
    return weight


etp_elemwise_p = register_primitive_spec(
    ETPPrimitiveSpec(
        name="etp_elemwise",
        impl=_identity,
        trace_axes={"weight": ("output",)},
        x_invar_index=None,
        gradient_enabled=True,
    )
)


def element_wise(
    weight: Any,
    fn: Callable[[Any], Any] = _identity,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Mark a parameter that enters the model elementwise, so that it learns online.

    Parameters
    ----------
    weight : array or Quantity of any shape
        Trainable. If the model broadcasts the result against a batched state, each unit that it
        reaches has its own trace.
    fn : callable
        Differentiable function of the weight, applied first; may return a quantity.
    weight_fn : callable, optional
        Another name of ``fn``, as in the other operations.

    Returns
    -------
    array or Quantity
        ``fn(weight)``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.element_wise(jnp.array([1.0, -2.0]), fn=jnp.abs)
    Array([1., 2.], dtype=float32)
    """
    value, unit = quantities.split(weight, fn if weight_fn is None else weight_fn)
    return quantities.attach(etp_elemwise_p.bind(value), unit)

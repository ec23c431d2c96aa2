"""Rewrite a step into the form that the analysis reads.

Calls are inlined by `braintrace._jaxpr.evaluate_inlined`; the rewriting here makes
broadcasts explicit, so that an element-wise equation has operands of one shape only and every
fan-out has a variable of its own.
"""

from typing import Any

import jax.numpy as jnp

from .._jax import bind, is_tracer
from .transfer import ELEMENTWISE


def rewrite(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Return the outputs of a rewritten equation, or ``None`` to keep it as it is."""
    if equation.primitive.name not in ELEMENTWISE or len(equation.outvars) != 1:
        return None
    shape = equation.outvars[0].aval.shape
    if all(_fits(value, shape) for value in operands):
        return None
    full = [
        value if _fits(value, shape) else jnp.broadcast_to(value, shape) for value in operands
    ]
    return bind(equation, full)


def _fits(value: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether an operand may stay: it has the full shape, or is a literal scalar."""
    return jnp.shape(value) == shape or (jnp.shape(value) == () and not is_tracer(value))

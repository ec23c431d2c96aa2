"""Derivatives of operations that do not depend on recomputed values.

Maxima and minima: JAX's derivative tests which operand equals the result. XLA may compute an
operand twice, once for the result and once for the test, with different rounding (fused
multiply-add). Then no operand is equal, and the derivative is zero or NaN. Here, operands are
compared with each other. In a reduction without an equal element, the element of `argmax` counts.

`tanh` and others: JAX computes the derivative from the result, which may be known already.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Equation, bind
from .._jax_kernels import with_derivative_of
from .program import Program, Rule


def _choice(wins: Callable[..., Any], choose: Callable[..., Any], x: Any, y: Any) -> jax.Array:
    """Return the elementwise maximum or minimum; equal elements share the derivative."""
    share = jnp.where(wins(x, y), 1.0, jnp.where(x == y, 0.5, 0.0)).astype(jnp.result_type(x))
    return with_derivative_of(choose(x, y), share * x + (1 - share) * y)


def _extremum(
    index: Callable[..., Any], reduce: Callable[..., Any], x: jax.Array, axes: Sequence[int]
) -> jax.Array:
    """Return the extremum over axes; equal elements share the derivative."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    flat = jnp.transpose(x, [*kept, *axes]).reshape(*(x.shape[axis] for axis in kept), -1)
    value, first = reduce(flat, axis=-1, keepdims=True), index(flat, axis=-1, keepdims=True)
    counts = ((flat == value) | (jnp.arange(flat.shape[-1]) == first)).astype(x.dtype)
    share = counts / jnp.sum(counts, axis=-1, keepdims=True)
    return with_derivative_of(value[..., 0], jnp.sum(share * flat, axis=-1))


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "max": functools.partial(_choice, jnp.greater, jax.lax.max),
    "min": functools.partial(_choice, jnp.less, jax.lax.min),
    "reduce_max": functools.partial(_extremum, jnp.argmax, jnp.max),
    "reduce_min": functools.partial(_extremum, jnp.argmin, jnp.min),
}


def bind_differentiable(equation: Equation, values: list[Any]) -> list[Any]:
    """Run an equation; maxima and minima have the derivative of this module."""
    rule = DIFFERENTIABLE.get(equation.primitive.name)
    if rule is None or not all(jnp.issubdtype(jnp.result_type(v), jnp.floating) for v in values):
        return bind(equation, values)
    axes = [equation.params["axes"]] if "axes" in equation.params else []
    return [rule(*values, *axes)]


def maxima_of(program: Program) -> dict[int, Rule]:
    """Return rules for the maxima and minima of a program, by equation index."""
    found = (i for i, e in enumerate(program.equations) if e.primitive.name in DIFFERENTIABLE)
    return dict.fromkeys(found, bind_differentiable)


# The derivatives of operations that JAX computes from their result.
_DERIVATIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "exp": lambda y: y,
    "exp2": lambda y: math.log(2) * y,
    "logistic": lambda y: y * (1 - y),
    "rsqrt": lambda y: -0.5 * y**3,
    "sqrt": lambda y: 0.5 / y,
    "tan": lambda y: 1 + y * y,
    "tanh": lambda y: 1 - y * y,
}
FROM_RESULT = frozenset(_DERIVATIVES)


def from_result(equation: Equation, x: jax.Array, known: jax.Array) -> jax.Array:
    """Return the known result of an operation; its derivative is computed from that."""
    derivative = _DERIVATIVES[equation.primitive.name](jax.lax.stop_gradient(known))
    return with_derivative_of(known, derivative * x)

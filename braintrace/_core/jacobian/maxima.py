"""Derivatives of maxima and minima that do not depend on recomputed values.

JAX's derivative tests which operand equals the result. XLA may compute an operand twice, once for
the result and once for the test, with different rounding (fused multiply-add). Then no operand is
equal, and the derivative is zero. Here, operands are compared with each other. In a reduction
without an equal element, the element of `argmax` counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import Equation, bind
from ..._jaxpr import Program, Rule

Binary: TypeAlias = Callable[[Any, Any], jax.Array]
Pair: TypeAlias = tuple[jax.Array, jax.Array]


def larger(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the elementwise maximum of two arrays; equal elements share the derivative."""
    return _choice(x, y, jax.lax.max, jnp.greater)


def smaller(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the elementwise minimum of two arrays; equal elements share the derivative."""
    return _choice(x, y, jax.lax.min, jnp.less)


def _choice(x: jax.Array, y: jax.Array, choose: Binary, wins: Binary) -> jax.Array:
    def value(x: jax.Array, y: jax.Array) -> jax.Array:
        return choose(x, y)

    def derivative(primals: Pair, tangents: Pair) -> Pair:
        (x, y), (dx, dy) = primals, tangents
        share = jnp.where(wins(x, y), 1.0, jnp.where(x == y, 0.5, 0.0)).astype(dx.dtype)
        return choose(x, y), share * dx + (1 - share) * dy

    choice = jax.custom_jvp(value)
    choice.defjvp(derivative)
    return choice(x, y)


def extremum(
    x: jax.Array, axes: Sequence[int], reduce: Callable[..., Any], index: Callable[..., Any]
) -> jax.Array:
    """Return the extremum over axes; equal elements share the derivative.

    Parameters
    ----------
    x
        An array.
    axes
        Axes that are reduced.
    reduce, index
        ``jnp.max`` and ``jnp.argmax``, or ``jnp.min`` and ``jnp.argmin``.
    """
    axes = tuple(axes)

    def value(x: jax.Array) -> jax.Array:
        return reduce(x, axis=axes)

    def derivative(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Pair:
        (x,), (dx,) = primals, tangents
        found = reduce(x, axis=axes)
        counts = (x == jnp.expand_dims(found, axes)) | _first(x, axes, index)
        share = counts.astype(dx.dtype) / jnp.sum(counts, axis=axes, keepdims=True, dtype=dx.dtype)
        return found, jnp.sum(share * dx, axis=axes)

    result = jax.custom_jvp(value)
    result.defjvp(derivative)
    return result(x)


def _first(x: jax.Array, axes: tuple[int, ...], index: Callable[..., Any]) -> jax.Array:
    """Return a mask of the first extremum over axes."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    order = [*kept, *axes]
    flat = jnp.transpose(x, order).reshape(*(x.shape[axis] for axis in kept), -1)
    size = flat.shape[-1]
    found = jnp.arange(size) == index(flat, axis=-1, keepdims=True)
    return jnp.transpose(found.reshape([x.shape[a] for a in order]), tuple(np.argsort(order)))


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "max": lambda x, y, **_: larger(x, y),
    "min": lambda x, y, **_: smaller(x, y),
    "reduce_max": lambda x, axes, **_: extremum(x, axes, jnp.max, jnp.argmax),
    "reduce_min": lambda x, axes, **_: extremum(x, axes, jnp.min, jnp.argmin),
}


def bind_differentiable(equation: Equation, values: list[Any]) -> list[Any]:
    """Run an equation; maxima and minima have the derivative of this module."""
    rule = DIFFERENTIABLE.get(equation.primitive.name)
    is_real = all(jnp.issubdtype(jnp.result_type(value), jnp.floating) for value in values)
    if rule is None or not is_real:
        return bind(equation, values)
    return [rule(*values, **equation.params)]


def maxima_of(program: Program) -> dict[int, Rule]:
    """Return rules for the maxima and minima of a program, by equation index."""
    return {
        index: bind_differentiable
        for index, equation in enumerate(program.equations)
        if equation.primitive.name in DIFFERENTIABLE
    }

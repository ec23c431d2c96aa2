"""Derivatives of operations that do not depend on recomputed values.

Maxima and minima: JAX's derivative tests which operand equals the result. XLA may compute an
operand twice, once for the result and once for the test, with different rounding (fused
multiply-add). Then no operand is equal, and the derivative is zero. Here, operands are compared
with each other. In a reduction without an equal element, the element of `argmax` counts.

`tanh` and others: JAX computes the derivative from the result, which may be known already.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._jax import Equation, bind
from .evaluate import Rule, evaluate
from .program import Program, program_of

Binary: TypeAlias = Callable[[Any, Any], jax.Array]


Pair: TypeAlias = tuple[jax.Array, jax.Array]


def _choice(x: jax.Array, y: jax.Array, choose: Binary, wins: Binary) -> jax.Array:
    """Return the elementwise maximum or minimum; equal elements share the derivative."""

    def derivative(primals: Pair, tangents: Pair) -> Pair:
        (x, y), (dx, dy) = primals, tangents
        share = jnp.where(wins(x, y), 1.0, jnp.where(x == y, 0.5, 0.0)).astype(dx.dtype)
        return choose(x, y), share * dx + (1 - share) * dy

    choice = jax.custom_jvp(lambda x, y: choose(x, y))
    choice.defjvp(derivative)
    return choice(x, y)


def _extremum(
    x: jax.Array, axes: Sequence[int], reduce: Callable[..., Any], index: Callable[..., Any]
) -> jax.Array:
    """Return the extremum over axes; equal elements share the derivative."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    flat = jnp.transpose(x, [*kept, *axes]).reshape(*(x.shape[axis] for axis in kept), -1)

    def derivative(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Pair:
        (x,), (dx,) = primals, tangents
        found = reduce(x, axis=-1)
        first = jnp.arange(x.shape[-1]) == index(x, axis=-1, keepdims=True)
        counts = (x == found[..., None]) | first
        share = counts.astype(dx.dtype) / jnp.sum(counts, axis=-1, keepdims=True, dtype=dx.dtype)
        return found, jnp.sum(share * dx, axis=-1)

    result = jax.custom_jvp(lambda x: reduce(x, axis=-1))
    result.defjvp(derivative)
    return result(flat)


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "max": lambda x, y, **_: _choice(x, y, jax.lax.max, jnp.greater),
    "min": lambda x, y, **_: _choice(x, y, jax.lax.min, jnp.less),
    "reduce_max": lambda x, axes, **_: _extremum(x, axes, jnp.max, jnp.argmax),
    "reduce_min": lambda x, axes, **_: _extremum(x, axes, jnp.min, jnp.argmin),
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


# Operations whose derivative JAX computes from their result.
FROM_RESULT = frozenset({"exp", "exp2", "logistic", "rsqrt", "sqrt", "tan", "tanh"})


def from_result(equation: Equation, x: jax.Array, known: jax.Array) -> jax.Array:
    """Return the known result of an operation; its derivative is computed from that."""

    def derivative(primals: Any, tangents: Any) -> Any:
        (x, known), (dx, _) = primals, tangents
        settings = tuple(equation.params.items())
        program = _with_derivative(equation.primitive, settings, x.shape, x.dtype)
        result, change = program.out_atoms
        inputs = dict(zip(program.in_vars, (x, dx), strict=True))
        return known, evaluate(program, [change], inputs, {result: known})[0]

    around = jax.custom_jvp(lambda x, known: known)
    around.defjvp(derivative)
    found: jax.Array = around(x, known)
    return found


@functools.lru_cache(
    maxsize=256
)  # tracing it for each operation takes a third of a trace of `pull`
def _with_derivative(
    primitive: Any, settings: tuple[Any, ...], shape: tuple[int, ...], dtype: Any
) -> Program:
    """Return the program ``(x, dx) -> (result, its derivative)`` of an elementwise operation."""

    def both(x: jax.Array, dx: jax.Array) -> Any:
        return jax.jvp(lambda x: primitive.bind(x, **dict(settings)), (x,), (dx,))

    like = jax.ShapeDtypeStruct(shape, dtype)
    return program_of(jax.make_jaxpr(both)(like, like))

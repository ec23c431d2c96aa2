"""Inlining of ETP operations: replace them by their implementation in plain JAX.

The jaxpr of a function is evaluated again with every ETP primitive replaced. Equations with bodies
(loops, branches, custom derivatives) are rebuilt only if a body contains an ETP primitive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from .._errors import PrimitiveError
from .._jax import (
    OWN_DERIVATIVE,
    TRANSPARENT_CALLS,
    AnyJaxpr,
    ClosedJaxpr,
    Equation,
    bind,
    sub_jaxprs,
    trace_to_jaxpr,
)
from .._jaxpr.program import evaluate_all
from .registry import holds_marked, is_marked


def inline(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with every ETP operation replaced by plain JAX.

    Use it with tools that only support JAX's own primitives. It inlines the operations of ``fn``
    itself, including loops and branches. To inline a gradient, pass the gradient function.

    Parameters
    ----------
    fn : callable
        Function of arrays (any pytrees, quantities included) without side effects.

    Returns
    -------
    callable
        Same arguments, results and derivatives; nested ``jit`` calls that contain an ETP operation
        are flattened.

    Raises
    ------
    PrimitiveError
        When called, if an ETP operation is inside a construct that cannot be rebuilt.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> plain = braintrace.inline(braintrace.matmul)
    >>> jaxpr = jax.make_jaxpr(plain)(jnp.ones(3), jnp.ones((3, 2)))
    >>> [equation.primitive.name for equation in jaxpr.eqns]
    ['dot_general']
    """

    @functools.wraps(fn)
    def inlined(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        results = _evaluate(jaxpr, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return inlined


def _evaluate(jaxpr: AnyJaxpr, values: list[ArrayLike]) -> list[ArrayLike]:
    return evaluate_all(jaxpr, values, _plain)


def _plain(equation: Equation, operands: list[ArrayLike]) -> Sequence[ArrayLike] | None:
    """Run an ETP operation as its implementation, also inside of a body."""
    primitive = equation.primitive
    if is_marked(equation):
        return [primitive.implementation(*operands, **equation.params)]
    if not holds_marked(equation):
        return None
    results = _rebuilt(equation, operands)
    if results is None:
        raise PrimitiveError(
            f"`inline` cannot rebuild `{primitive.name}`, which contains an ETP operation. Inline "
            "the function inside it instead."
        )
    return results


def _rebuilt(equation: Equation, operands: list[ArrayLike]) -> list[ArrayLike] | None:
    """Rebuild an equation around its bodies by JAX's functions; ``None`` if it cannot be."""
    name, params = equation.primitive.name, equation.params

    def function(*values: ArrayLike) -> list[ArrayLike]:
        (body,) = sub_jaxprs(equation)
        return _evaluate(body, list(values))

    if name in ("remat2", "checkpoint"):
        options = {option: params[option] for option in ("policy", "prevent_cse")}
        return list(jax.checkpoint(function, **options)(*operands))
    if name in TRANSPARENT_CALLS:
        return function(*operands)
    if name in OWN_DERIVATIVE | {"cond", "while", "scan"}:
        bodies = {option: _with_bodies(value) for option, value in params.items()}
        return list(bind(equation.replace(params=bodies), operands))
    return None


def _with_bodies(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_with_bodies, value))
    if not isinstance(value, ClosedJaxpr):
        return value
    avals = [var.aval for var in value.jaxpr.invars]
    return trace_to_jaxpr(lambda *values: _evaluate(value, list(values)), avals)

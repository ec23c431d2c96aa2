"""Part of `_jax`: values with the derivative of another, and values without a derivative."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def zero_tangent(value: Any) -> Any:
    """Return the symbolic zero that is the tangent of a value."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


# --- a value with the derivative of another


def _abstract_value(value: Any, other: Any) -> Any:
    return value


def _lower_value(value: Any, other: Any) -> Any:
    return value


def _jvp_of_other(operands: Any, tangents: Any) -> Any:
    value = _with_derivative_p.bind(*operands)
    is_zero = isinstance(tangents[1], ad.Zero)
    return value, zero_tangent(value) if is_zero else tangents[1]


def _batched_value(operands: Any, dims: Any) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    return _with_derivative_p.bind(*moved), 0


_with_derivative_p = Primitive("with_derivative_of")
_with_derivative_p.def_impl(_lower_value)
_with_derivative_p.def_abstract_eval(_abstract_value)
mlir.register_lowering(_with_derivative_p, mlir.lower_fun(_lower_value, multiple_results=False))
ad.primitive_jvps[_with_derivative_p] = _jvp_of_other
batching.primitive_batchers[_with_derivative_p] = _batched_value


def with_derivative_of(value: Any, other: Any) -> Any:
    """Return a value with the derivative of another value of the same type.

    The other value is computed only if a derivative is taken. The derivative of the value itself is
    zero, which a ``stop_gradient`` in the program shows.
    """
    return _with_derivative_p.bind(jax.lax.stop_gradient(value), other)


def without_derivative(sources: Any, results: Any, kind: type[Exception], message: str) -> Any:
    """Return results that raise an error if their gradient is taken.

    This includes results that hold their sources constant, whose derivative would be zero.
    """

    def refuse(residuals: None, cotangents: Any) -> Any:
        raise kind(message)

    refused = jax.custom_vjp(lambda sources, results: results)
    refused.defvjp(lambda sources, results: (results, None), refuse)
    return refused(sources, results)

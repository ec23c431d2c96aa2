"""Derivatives of steps with a zero cotangent, which count for exactly nothing.

Zero times an infinite derivative is NaN: at a masked step, whose input or state may be NaN.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from .._typing import PyTree


def map_one_by_one(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Run a function step after step, with the derivatives of `map_masked`."""
    return jax.lax.map(pass_no_zero(function), over_time)


def map_masked(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Map a function over time; steps with a zero cotangent add exactly zero to derivatives."""

    def backward(run: Callable[..., Any], is_live: list[bool], values: list[Any], cts: Any) -> Any:
        # Zero times an infinite derivative is NaN, so these steps get the values of another one.
        counts = _is_nonzero(cts, lambda cotangent: tuple(range(1, cotangent.ndim)))
        first, length = jnp.argmax(counts), len(jax.tree.leaves(over_time))
        usual = [_select(counts, value, value[first]) for value in values[:length]]
        _, pull = _vjp(run, is_live, [*usual, *values[length:]])
        found = pull(cts)
        of_time = [_select(counts, value) for value in found[:length]]
        return *of_time, *(_select(counts.any(), value) for value in found[length:])

    def keep(run: Callable[..., Any], is_live: list[bool], values: list[Any]) -> Any:
        return run(*values), Partial(functools.partial(backward, run, is_live), values)

    return _with_derivative(keep, jax.vmap(function), over_time)


def pass_no_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose derivatives are exactly zero if all cotangents are."""

    def backward(pull: Callable[[PyTree], Any], cts: PyTree) -> Any:
        counts = _is_nonzero(cts, lambda cotangent: None)
        return tuple(_select(counts, value) for value in pull(cts))

    def keep(run: Callable[..., Any], is_live: list[bool], values: list[Any]) -> Any:
        results, pull = _vjp(run, is_live, values)
        return results, Partial(backward, pull)

    return lambda *arguments: _with_derivative(keep, function, *arguments)


def _with_derivative(
    keep: Callable[..., Any], function: Callable[..., Any], *arguments: PyTree
) -> Any:
    """Call a function, which may close over differentiated arrays, with another derivative.

    ``keep`` takes the function of flat arguments, whether each of them is differentiated, and their
    values. It returns the results, and a pytree that is called with cotangents.
    """
    pure, captured = jax.closure_convert(function, *arguments)
    leaves, tree = jax.tree.flatten(arguments)

    def run(*values: Any) -> Any:
        return pure(*jax.tree.unflatten(tree, values[: len(leaves)]), *values[len(leaves) :])

    def forward(*given: Any) -> Any:
        return keep(run, [value.perturbed for value in given], [value.value for value in given])

    def backward(pull: Callable[[PyTree], Any], cotangents: PyTree) -> Any:
        return pull(jax.tree.map(_instantiate, cotangents))

    own = jax.custom_vjp(run)
    own.defvjp(forward, backward, symbolic_zeros=True)
    return own(*leaves, *captured)


def _instantiate(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    is_integer = cotangent.dtype == jax.dtypes.float0  # which jax.numpy does not have
    return (np if is_integer else jnp).zeros(cotangent.shape, cotangent.dtype)


def _vjp(run: Callable[..., Any], is_live: list[bool], values: list[Any]) -> Any:
    """Return results, and a function that returns the cotangents of live arguments, else None."""
    live = [value for value, is_own in zip(values, is_live, strict=True) if is_own]

    def of_live(*live: Any) -> Any:
        given = iter(live)
        return run(*(next(given) if own else v for v, own in zip(values, is_live, strict=True)))

    results, pull = jax.vjp(of_live, *live)
    return results, Partial(functools.partial(_spread, is_live), pull)


def _spread(is_live: list[bool], pull: Callable[[PyTree], Any], cotangents: PyTree) -> list[Any]:
    found = iter(pull(cotangents))
    return [next(found) if is_own else None for is_own in is_live]


def _is_nonzero(cotangents: PyTree, axes_of: Callable[[Any], tuple[int, ...] | None]) -> jax.Array:
    leaves = [c for c in jax.tree.leaves(cotangents) if c.dtype != jax.dtypes.float0]
    return functools.reduce(jnp.logical_or, [jnp.any(c != 0, axis=axes_of(c)) for c in leaves])


def _select(counts: jax.Array, value: Any, otherwise: Any = 0) -> Any:
    """Select values of steps that count; without a time axis, all or none do."""
    if value is None or value.dtype == jax.dtypes.float0:
        return value
    shape = counts.shape + (1,) * (value.ndim - counts.ndim)
    return jnp.where(counts.reshape(shape), value, otherwise)

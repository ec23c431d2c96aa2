"""Functions of a step for all steps of a chunk, time first: at once, or one by one.

At once, a function is mapped over time, so that products are taken over time and batch together.
One by one, it runs in a loop.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._jax import Atom
from ..._jaxpr import Program, evaluate
from ..._typing import PyTree
from ..time_loops import scan_over_time
from .step_program import ByVar, zip_dict

MapOverTime: TypeAlias = Callable[[Callable[[Any], Any], PyTree], PyTree]
"""``(function, slices over time) -> results over time``."""

Loss: TypeAlias = Callable[[list[Any], list[Any], Any], tuple[jax.Array, PyTree]]
"""``(parameters, probes, slices) -> (loss, aux)`` of one step."""

GradientsAndLosses: TypeAlias = tuple[tuple[list[Any], list[Any]], tuple[jax.Array, PyTree]]
"""Gradients of parameters (sums) and of probes (over time); losses and auxiliary results."""

Differentiate: TypeAlias = Callable[
    [Loss, list[Any], list[Any], PyTree, jax.Array], GradientsAndLosses
]
"""``(loss, parameters, probes, slices over time, factors of the losses) -> results``."""

map_one_by_one: MapOverTime = jax.lax.map


def map_at_once(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Map a function over time."""
    return jax.vmap(function)(over_time)


def differentiate_at_once(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
    """Differentiate the sum of all losses."""

    def total(parameters: list[Any], probes: list[Any]) -> Any:
        of_step = functools.partial(loss, parameters)
        losses, aux = jax.vmap(of_step, axis_size=len(scales))(probes, over_time)
        return jnp.sum(losses * scales), (losses, aux)

    zeros = [jnp.zeros((len(scales), *zero.shape), zero.dtype) for zero in probes]
    result: GradientsAndLosses = jax.grad(total, argnums=(0, 1), has_aux=True)(parameters, zeros)
    return result


def differentiate_unmasked(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
    """Differentiate the sum of all losses, with masked steps at the values of an unmasked one."""
    # The derivative of a masked loss may be infinite, and zero times infinity is NaN.
    counts = scales != 0

    def only_counted(value: jax.Array, otherwise: Any) -> jax.Array:
        return jnp.where(counts.reshape(-1, *(1,) * (value.ndim - 1)), value, otherwise)

    first = jnp.argmax(counts)
    values = jax.tree.map(lambda value: only_counted(value, value[first]), over_time)
    (gradients, signal), (losses, _) = differentiate_at_once(
        loss, parameters, probes, values, scales
    )
    gradients = [jnp.where(counts.any(), gradient, 0) for gradient in gradients]
    signal = [only_counted(value, 0) for value in signal]
    of_step = functools.partial(loss, parameters, probes)
    _, aux = jax.vmap(of_step, axis_size=len(scales))(over_time)
    return (gradients, signal), (losses, aux)


def differentiate_one_by_one(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
    """Differentiate loss after loss, none of masked steps; sums have at least single precision."""

    def one_step(sums: list[Any], now: Any) -> Any:
        slices, scale = now

        def scaled(parameters: list[Any], probes: list[Any]) -> Any:
            value, aux = loss(parameters, probes, slices)
            return value * scale, (value, aux)

        def counted(*arguments: list[Any]) -> Any:
            return jax.grad(scaled, argnums=(0, 1), has_aux=True)(*arguments)

        def masked(*arguments: list[Any]) -> Any:
            return jax.tree.map(jnp.zeros_like, arguments), scaled(*arguments)[1]

        (gradients, signal), results = jax.lax.cond(scale != 0, counted, masked, parameters, probes)
        return jax.tree.map(jnp.add, sums, gradients), (signal, results)

    sums = jax.tree.map(zero_sum, parameters)
    sums, (signal, results) = scan_over_time(one_step, sums, (over_time, scales))
    return (sums, signal), results


def values_over_time(
    map_over_time: MapOverTime,
    program: Program,
    targets: Sequence[Atom],
    fixed: ByVar,
    over_time: ByVar,
) -> list[jax.Array]:
    """Return variables for every step, from values that are equal in all steps and per step."""

    def of_step(now: list[Any]) -> list[Any]:
        return evaluate(program, targets, {**fixed, **zip_dict(list(over_time), now)})

    return list(map_over_time(of_step, list(over_time.values()))) if targets else []


def stretched(tree: PyTree, steps: int) -> PyTree:
    """Broadcast arrays with a time axis of length 1 to all steps."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (steps, *leaf.shape[1:]))

    return jax.tree.map(of_leaf, tree)


def zero_sum(value: ArrayLike) -> jax.Array:
    """Return the initial value of a sum of arrays like ``value``.

    It has at least single precision: in bfloat16 a sum of ones stops at 256.
    """
    dtype = jnp.result_type(value)  # that of a NumPy array may be one that JAX does not use
    return jnp.zeros(jnp.shape(value), jnp.float32 if is_half(dtype) else dtype)


def is_half(dtype: Any) -> bool:
    """Test whether a dtype is floating-point with less than single precision."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4)

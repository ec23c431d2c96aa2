"""Functions of a step for all steps of a chunk, time first: at once, or one by one.

`AT_ONCE` maps a function over time, so that products are taken over time and batch together.
`AT_ONCE_BUT_MASKED` does the same, with a derivative of zero at masked steps, also if it is not
finite. `ONE_BY_ONE` is a loop, whose sums have at least single precision; masked steps have no
backward pass there.
"""

import dataclasses
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

Loss: TypeAlias = Callable[[list[Any], list[Any], Any], tuple[jax.Array, PyTree]]
"""``(parameters, probes, slices) -> (loss, aux)`` of one step."""

GradientsAndLosses: TypeAlias = tuple[tuple[list[Any], list[Any]], tuple[jax.Array, PyTree]]
"""Gradients of parameters (sums) and of probes (over time); losses and auxiliary results."""


def _mapped(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    return jax.vmap(function)(over_time)


def _gradient_at_once(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
    def total(parameters: list[Any], probes: list[Any]) -> Any:
        of_step = functools.partial(loss, parameters)
        losses, aux = jax.vmap(of_step, axis_size=len(scales))(probes, over_time)
        return jnp.sum(losses * scales), (losses, aux)

    zeros = [jnp.zeros((len(scales), *zero.shape), zero.dtype) for zero in probes]
    result: GradientsAndLosses = jax.grad(total, argnums=(0, 1), has_aux=True)(parameters, zeros)
    return result


def _gradient_of_counted(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
    """Differentiate masked steps at the values of an unmasked step.

    The derivative of a masked loss may be infinite, and zero times infinity is NaN.
    """
    counts = scales != 0

    def only_counted(value: jax.Array, otherwise: Any) -> jax.Array:
        return jnp.where(counts.reshape(-1, *(1,) * (value.ndim - 1)), value, otherwise)

    first = jnp.argmax(counts)
    values = jax.tree.map(lambda value: only_counted(value, value[first]), over_time)
    (gradients, signal), (losses, _) = _gradient_at_once(loss, parameters, probes, values, scales)
    gradients = [jnp.where(counts.any(), gradient, 0) for gradient in gradients]
    signal = [only_counted(value, 0) for value in signal]
    of_step = functools.partial(loss, parameters, probes)
    _, aux = jax.vmap(of_step, axis_size=len(scales))(over_time)
    return (gradients, signal), (losses, aux)


def _gradient_one_by_one(
    loss: Loss, parameters: list[Any], probes: list[Any], over_time: PyTree, scales: jax.Array
) -> GradientsAndLosses:
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


@dataclasses.dataclass(frozen=True)
class OverTime:
    """How a function of one step runs for all steps.

    Attributes
    ----------
    map
        ``(function, slices over time) -> results over time``.
    gradient
        ``(loss, parameters, probes, slices over time, scales) -> (gradients, results)``, where
        ``scales`` are the factors of the losses.
    """

    map: Callable[[Callable[[Any], Any], PyTree], PyTree]
    gradient: Callable[[Loss, list[Any], list[Any], PyTree, jax.Array], GradientsAndLosses]


AT_ONCE = OverTime(_mapped, _gradient_at_once)
AT_ONCE_BUT_MASKED = OverTime(_mapped, _gradient_of_counted)
ONE_BY_ONE = OverTime(jax.lax.map, _gradient_one_by_one)


def values_over_time(
    mode: OverTime, program: Program, targets: Sequence[Atom], fixed: ByVar, over_time: ByVar
) -> list[jax.Array]:
    """Return variables for every step.

    Parameters
    ----------
    mode
        At once, or one by one.
    program, targets
        The program of one step, and the variables.
    fixed, over_time
        Values that are equal in all steps, and values per step.
    """

    def of_step(now: list[Any]) -> list[Any]:
        current = {**fixed, **zip_dict(list(over_time), now)}
        return evaluate(program, targets, current)

    return list(mode.map(of_step, list(over_time.values()))) if targets else []


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

"""Values of all steps of a chunk, time first: evaluation, broadcasting and sums."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import ETPPrimitive, get_primitive_spec
from .._jax import Atom, Equation, bind, divided_dependent
from .._jaxpr import Program, evaluate
from .._typing import PyTree
from .step_program import ByVar, zip_dict


def mapped(
    program: Program, targets: Sequence[Atom], fixed: ByVar, over_time: ByVar
) -> list[jax.Array]:
    """Return variables for every step.

    Parameters
    ----------
    program, targets
        The program of one step, and the variables.
    fixed, over_time
        Values that are equal in all steps, and values per step.
    """

    def of_step(now: list[Any]) -> list[Any]:
        current = {**fixed, **zip_dict(list(over_time), now)}
        return evaluate(program, targets, current, rules=run_where_samples_lie)

    return list(jax.vmap(of_step)(list(over_time.values()))) if targets else []


def run_where_samples_lie(equation: Equation, values: list[Any]) -> list[jax.Array] | None:
    """Run an ETP operation that is mapped over time.

    This is a rule for `evaluate`; all other operations are left to JAX. The operation itself folds
    samples into time, which would need communication if samples are sharded. In that case, time is
    folded into samples.
    """
    if not isinstance(equation.primitive, ETPPrimitive):
        return None
    plain = functools.partial(equation.primitive.implementation, **equation.params)
    x_index = get_primitive_spec(equation.primitive).x_invar_index
    divided = jax.custom_batching.custom_vmap(plain)

    def marked(*values: Any) -> Any:
        return bind(equation, values)[0]

    def over_time(steps: int, is_mapped: list[bool], *values: Any) -> tuple[Any, bool]:
        is_of_samples = equation.primitive.batched and x_index == 0
        if not is_of_samples or list(is_mapped) != [True] + [False] * (len(values) - 1):
            axes = [0 if mapped else None for mapped in is_mapped]
            return jax.vmap(plain, axes)(*values), True
        x, *weights = values
        x = jnp.swapaxes(x, 0, 1)
        y = plain(x.reshape(-1, *x.shape[2:]), *weights)
        return jnp.swapaxes(y.reshape(-1, steps, *y.shape[1:]), 0, 1), True

    divided.def_vmap(over_time)
    return [divided_dependent(*values, divided=divided, whole=marked)]


def stretched(tree: PyTree, steps: int) -> PyTree:
    """Broadcast arrays with a time axis of length 1 to all steps."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (steps, *leaf.shape[1:]))

    return jax.tree.map(of_leaf, tree)


def zero_sum(value: jax.Array) -> jax.Array:
    """Return the initial value of a sum of arrays like ``value``.

    It has at least single precision: in bfloat16 a sum of ones stops at 256.
    """
    return jnp.zeros(value.shape, jnp.float32 if is_half(value.dtype) else value.dtype)


def is_half(dtype: Any) -> bool:
    """Test whether a dtype is floating-point with less than single precision."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4)

"""Functions of a step for all steps of a chunk, time first: at once, or one by one.

At once, a function is mapped over time, so that products are taken over time and batch together.
One by one, it runs in a loop.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._compiler import Derivative
from ..._jax import Atom, Equation, Var, equations_inside, is_var
from ..._jaxpr import Program, evaluate
from ..._jaxpr.dataflow import CONSTANT
from ..._typing import PyTree
from ..time_loops import scan_over_time
from .step_program import ByVar, StepProgram, equations_of, is_product, vars_of, zip_dict

STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that differ, or cost more, when mapped over time: both branches of a `cond` would run,
and some random number generators would return other numbers."""

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


def choose_differentiate(
    step: StepProgram,
    targets: PyTree,
    differentiable: Collection[Var],
    computed: set[Var],
    has_mask: bool,
) -> Differentiate:
    """Return how the gradients of some targets are computed for all steps.

    Parameters
    ----------
    step, differentiable
        The step, and its variables with a derivative.
    targets, computed
        Variables to differentiate, and those that are computed for it.
    has_mask
        Whether some steps may be masked.
    """
    # If the gradient of a sum over time differs from the sum of the gradients:
    if (
        any(map(is_step_by_step, equations_of(step.program, computed)))
        or _is_nonlinear_in_sum(step, differentiable)
        or _adds_up_in_half_precision(step, targets)
    ):
        return differentiate_one_by_one
    return differentiate_unmasked if has_mask else differentiate_at_once


def _is_nonlinear_in_sum(step: StepProgram, differentiable: Collection[Var]) -> bool:
    """Test whether a nonlinear backward rule would receive the sum of all gradients.

    A loop-invariant value exists once, so its gradient is the sum over the steps.
    """
    fixed = {var for var in differentiable if var not in step.varying}
    readers = (e for e in step.program.equations if _any_in(e.invars, fixed))
    return any(
        _any_in([equation.invars[operand] for operand in Derivative(equation).nonlinear], fixed)
        for equation in readers
    )


def _adds_up_in_half_precision(step: StepProgram, targets: PyTree) -> bool:
    """Test whether the gradient of a parameter is a plain sum over time in half precision.

    Products accumulate in single precision; elsewhere a sum of ones in bfloat16 stops at 256.
    """
    program = step.program
    half = [var for var in step.parameters if is_half(var.aval.dtype)]
    ancestors = program.depends_on(vars_of(targets), blocked=CONSTANT)
    of_half = program.dependents_of(half) - step.varying
    met = (e for e in equations_of(program, ancestors & step.varying) if not is_product(e))
    return any(_any_in(e.invars, of_half & ancestors) for e in met)


def _any_in(atoms: Iterable[Atom], variables: set[Var]) -> bool:
    return any(is_var(atom) and atom in variables for atom in atoms)


def is_step_by_step(equation: Equation) -> bool:
    """Test whether an equation is not mapped over time."""
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)


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

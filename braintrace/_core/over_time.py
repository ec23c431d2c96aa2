"""Values of all steps of a chunk: scans, mapped functions, and results with their sources.

On an accelerator, an iteration of a loop costs at least as much as about three small kernels. Four
steps per iteration take 0.4 to 0.7 of the time on an H200 (64 to 256 steps of 256 units: one leaky
layer 0.69, an LSTM 0.50, four leaky layers 0.45, windows of 16 steps 0.61), and programs compile
about as fast. A CPU gains nothing.

A step with a zero cotangent counts for exactly nothing in derivatives (`map_masked`,
`pass_no_zero`): zero times an infinite derivative is NaN, at a masked step, whose input or state
may be NaN.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial
from jax.typing import ArrayLike

from .._jax import Atom, Equation, Var, equations_inside, is_var
from .._jax_kernels import current_device
from .._jaxpr.evaluate import evaluate
from .._jaxpr.program import Program
from .._jaxpr.vjp import nonlinear_operands
from .._typing import PyTree
from .step_program import (
    ByVar,
    StepProgram,
    equations_of,
    find_varying,
    is_product,
    value_of,
    vars_of,
    zip_dict,
)

STEPS_AN_ITERATION = 4

Carry = TypeVar("Carry")
Now = TypeVar("Now")
Result = TypeVar("Result")


def scan_over_time(
    step: Callable[[Carry, Now], tuple[Carry, Result]],
    start: Carry,
    sequences: Now,
    steps: int | None = None,
    reverse: bool = False,
) -> tuple[Carry, Result]:
    """Scan over the first axis of sequences, on accelerators several steps per iteration."""
    unroll = 1 if current_device().platform == "cpu" else STEPS_AN_ITERATION
    return jax.lax.scan(step, start, sequences, length=steps, reverse=reverse, unroll=unroll)


def scan_records(
    step: Callable[[Carry, PyTree], tuple[Carry, Result]],
    start: Carry,
    records: PyTree,
    steps: int,
    reverse: bool = False,
) -> tuple[Carry, Result]:
    """Scan over recorded steps; residuals of length 1 are equal in all steps.

    A single step runs without a loop.
    """
    if steps == 1:
        last, results = step(start, jax.tree.map(lambda leaf: leaf[0], records))
        return last, jax.tree.map(lambda leaf: leaf[None], results)
    leaves, tree = jax.tree.flatten(records)
    is_fixed = [leaf.shape[0] == 1 for leaf in leaves]
    fixed = [leaf[0] for leaf, once in zip(leaves, is_fixed, strict=True) if once]
    varying = [leaf for leaf, once in zip(leaves, is_fixed, strict=True) if not once]

    def body(carry: Carry, now: list[jax.Array]) -> tuple[Carry, Result]:
        sources = iter(fixed), iter(now)
        merged = [next(sources[0] if once else sources[1]) for once in is_fixed]
        return step(carry, jax.tree.unflatten(tree, merged))

    return scan_over_time(body, start, varying, steps, reverse)


STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that differ, or cost more, when mapped over time: both branches of a `cond` would run,
and some random number generators would return other numbers."""

MapOverTime: TypeAlias = Callable[[Callable[[Any], Any], PyTree], PyTree]
"""``(function, slices over time) -> results over time``."""


def map_at_once(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Map a function over time."""
    return jax.vmap(function)(over_time)


def map_one_by_one(function: Callable[[Any], Any], over_time: PyTree) -> PyTree:
    """Run a function step after step, with the derivatives of `map_masked`."""
    return jax.lax.map(pass_no_zero(function), over_time)


def choose_map(
    step: StepProgram, targets: PyTree, made: Collection[Var], live: Collection[Var], has_mask: bool
) -> MapOverTime:
    """Return how some variables of a step are computed and differentiated for all steps.

    Parameters
    ----------
    step
        The step.
    targets, made
        The variables, and those that are computed for them.
    live
        Variables with a derivative.
    has_mask
        Whether some steps may be masked.
    """
    # If the gradient of a sum over time differs from the sum of the gradients:
    if (
        any(map(is_step_by_step, equations_of(step.program, made)))
        or _is_nonlinear_in_sum(step, live)
        or _adds_up_in_half_precision(step, targets, live)
    ):
        return map_one_by_one
    return map_masked if has_mask else map_at_once


def is_step_by_step(equation: Equation) -> bool:
    """Test whether an equation is not mapped over time."""
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)


def _is_nonlinear_in_sum(step: StepProgram, live: Collection[Var]) -> bool:
    """Test whether a nonlinear backward rule would receive the sum of all gradients.

    A loop-invariant value exists once, so its gradient is the sum over the steps.
    """
    fixed = {var for var in live if var not in step.varying}
    readers = (e for e in step.program.equations if _any_in(e.invars, fixed))
    return any(
        _any_in([equation.invars[operand] for operand in nonlinear_operands(equation)], fixed)
        for equation in readers
    )


def _adds_up_in_half_precision(step: StepProgram, targets: PyTree, live: Collection[Var]) -> bool:
    """Test whether the gradient of a parameter is a plain sum over time in half precision.

    Products accumulate in single precision; elsewhere a sum of ones in bfloat16 stops at 256.
    """
    program = step.program
    half = [var for var in step.parameters if is_half(var.aval.dtype) and var in live]
    ancestors = program.ancestors(vars_of(targets))
    of_half = program.dependents_of(half) - step.varying
    met = (e for e in equations_of(program, ancestors & step.varying) if not is_product(e))
    return any(_any_in(e.invars, of_half & ancestors) for e in met)


def _any_in(atoms: Iterable[Atom], variables: set[Var]) -> bool:
    return any(is_var(atom) and atom in variables for atom in atoms)


def values_over_time(
    run: MapOverTime, program: Program, targets: Sequence[Atom], fixed: ByVar, over_time: ByVar
) -> list[jax.Array]:
    """Return variables for every step, from values that are equal in all steps and per step."""

    def of_step(now: list[Any]) -> list[Any]:
        current = {**narrowed(fixed), **zip_dict(list(over_time), now)}
        return evaluate(program, targets, current)

    return list(run(of_step, list(over_time.values()))) if targets else []


def zero_sum(value: ArrayLike) -> jax.Array:
    """Return the initial value of a sum of arrays like ``value``.

    It has at least single precision: in bfloat16 a sum of ones stops at 256.
    """
    dtype = jnp.result_type(value)  # that of a NumPy array may be one that JAX does not use
    return jnp.zeros(jnp.shape(value), jnp.float32 if is_half(dtype) else dtype)


def widened(values: ByVar) -> ByVar:
    """Return values in at least single precision, in which their gradients are then summed."""
    return {
        var: x.astype(jnp.float32) if is_half(var.aval.dtype) else x for var, x in values.items()
    }


def narrowed(values: ByVar) -> ByVar:
    """Return the values before `widened`."""
    return {
        var: x.astype(var.aval.dtype) if is_half(var.aval.dtype) else x for var, x in values.items()
    }


def is_half(dtype: Any) -> bool:
    """Test whether a dtype is floating-point with less than single precision."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4)


# --- derivatives of steps with a zero cotangent


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


# --- results of a step, from the values of other variables


@dataclasses.dataclass(frozen=True)
class SourceValues:
    """Values of the variables from which results of a chunk are computed; see `Results`.

    Attributes
    ----------
    over_time, once
        Values per step, and loop-invariant values.
    steps
        Number of steps.
    """

    over_time: list[jax.Array]
    once: list[jax.Array]
    steps: int


jax.tree_util.register_dataclass(SourceValues, ["over_time", "once"], ["steps"])


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Some results of a step, and the sources of their values over time.

    Attributes
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    source
        For variables with values over time: the variable that has the value.
    sources
        These variables.
    computed
        Variables computed from these.
    once
        Loop-invariant results and operands; those of literals alone are not stored.
    map_over_time
        How the variables are computed for all steps.
    """

    step: StepProgram
    results: PyTree
    source: Mapping[Var, Var]
    sources: tuple[Var, ...]
    computed: tuple[Var, ...]
    once: tuple[Var, ...]
    map_over_time: MapOverTime

    def compute(self, values: SourceValues) -> PyTree:
        """Return the results, time first, with a time axis of length 1 if loop-invariant."""
        program, once = self.step.program, zip_dict(self.once, values.once)
        over_time = zip_dict(self.sources, values.over_time)
        varying = {var: over_time[first] for var, first in self.source.items()}
        same = [var for var in vars_of(self.results) if var not in self.step.varying]
        once.update(zip_dict(same, evaluate(program, same, {}, once)))
        computed = values_over_time(self.map_over_time, program, self.computed, once, varying)
        varying.update(zip_dict(self.computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            is_varying = is_var(atom) and atom in varying
            return varying[atom] if is_varying else value_of(atom, once)[None]

        return jax.tree.map(of_atom, self.results)


def find_sources(step: StepProgram, results: PyTree, known: Mapping[Var, Var]) -> Results:
    """Find the sources of some results of a step.

    Parameters
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    known
        For all variables with values over time: the variable that has the value.
    """
    targets, program = vars_of(results), step.program
    behind = find_varying(step, program, targets, known)
    source = {var: first for var, first in known.items() if var in behind}
    computed = behind - source.keys()
    run = list(equations_of(program, computed))
    operands = [equation.invars for equation in run]
    map_over_time = map_one_by_one if any(map(is_step_by_step, run)) else map_at_once
    of_arrays = program.dependents_of([*program.in_vars, *program.constants]) - step.varying
    once = tuple(var for var in vars_of((targets, operands)) if var in of_arrays)
    in_order = tuple(var for var in targets if var in computed)
    sources = tuple(dict.fromkeys(source.values()))
    return Results(step, results, source, sources, in_order, once, map_over_time)

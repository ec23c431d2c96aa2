"""What of a step has to wait for the step before, and what can be done for all steps at once.

A loop over time is slow where a single product over time and batch is fast. Only what the next
step's States are computed from has to be in the loop. Products with the inputs alone can be
taken before it; outputs, losses and Jacobians after it, from what the loop has recorded.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from .._etrace_op import ETP_PRIMITIVES
from .._jax import Atom, Var, is_var, sub_jaxprs
from .._jaxpr import Program, equal_values

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that are another thing, or a dearer one, when they are mapped over time: both
branches of a `cond` would run, and some generators of random numbers would draw others."""

MOST_PER_STEP = 8
"""A step's largest array may be this much larger than all that is recorded of the step: beyond
(the logits of a large vocabulary) a product is large enough by itself, and its memory counts."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """How a step is cut into three.

    Attributes
    ----------
    ahead
        Variables that are computed before the loop, from the slices of the sequences.
    recorded
        Variables that the loop records.
    source
        For each variable that is known from then on: which of `ahead`, `recorded` and the slices
        has its value.
    """

    ahead: tuple[Var, ...]
    recorded: tuple[Var, ...]
    source: Mapping[Var, Var]


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of one step, and what its variables are.

    Attributes
    ----------
    program
        Flat, in that calls are inlined.
    carried, slices
        Inputs that change with every step: States that it writes, slices of sequences.
    differentiable
        Inputs that the loss is differentiated by.
    written, results
        Outputs: new values of the carried States, and everything else.
    """

    program: Program
    carried: tuple[Var, ...]
    slices: tuple[Var, ...]
    differentiable: frozenset[Var]
    written: tuple[Atom, ...]
    results: tuple[Atom, ...]


def split_step(step: StepProgram) -> Split | None:
    """Cut a step into three; ``None`` for one that has to be run step by step."""
    program = step.program
    if any(equation.effects for equation in program.equations):
        return None
    equal = equal_values(program)
    varying = program.dependents_of([*step.carried, *step.slices])
    moving = moving_variables(program, step.differentiable)
    wanted = [a for a in step.results if is_var(a) and a in varying]
    in_loop = program.depends_on([*step.written, *step.carried]) & varying
    while True:
        made = {equal.get(var, var): var for var in sorted_by_program(program, in_loop)}
        made.update({var: var for var in step.slices})
        known = {v: made[equal[v]] for v in equal if equal[v] in made and v not in moving}
        later = program.depends_on(wanted, frozenset(known)) & varying
        waiting = [e for e in equations_of(program, later - set(known)) if _is_step_by_step(e)]
        if any(var in moving for equation in waiting for var in equation.outvars):
            return None
        if not waiting:
            break
        outputs = [var for equation in waiting for var in equation.outvars]
        in_loop |= program.depends_on(outputs) & varying
    ahead = _ahead(step, in_loop)
    by_value = {equal[var]: var for var in ahead}
    source = {
        var: by_value.get(equal[var], known[var])
        for var in sorted_by_program(program, later)
        if var in known
    }
    given = {*ahead, *step.slices}
    recorded = tuple(var for var in dict.fromkeys(source.values()) if var not in given)
    split = Split(ahead, recorded, source)
    return split if _is_worth_it(step, split, later) else None


def moving_variables(program: Program, differentiable: Iterable[Var]) -> set[Var]:
    """Return the variables that have a derivative with respect to some inputs."""
    moving = set(differentiable)
    for equation in program.equations:
        if equation.primitive.name == "stop_gradient":
            continue
        if any(is_var(atom) and atom in moving for atom in equation.invars):
            moving.update(v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return moving


def equations_of(program: Program, variables: Iterable[Var]) -> Iterator[Any]:
    """Yield the equations that make some variables, in execution order."""
    made = {program.producer[var] for var in variables if var in program.producer}
    return (program.equations[index] for index in sorted(made))


def sorted_by_program(program: Program, variables: set[Var]) -> list[Var]:
    """Return variables in the order in which the program has them."""
    inputs = [var for var in program.in_vars if var in variables]
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return inputs + [var for var in made if var in variables]


def _is_step_by_step(equation: Any) -> bool:
    name = equation.primitive.name
    if name in STEP_BY_STEP or "random" in name or "callback" in name:
        return True
    return any(
        _is_step_by_step(inner)
        for body in sub_jaxprs(equation)
        for inner in getattr(body, "jaxpr", body).eqns
    )


def _is_product(equation: Any) -> bool:
    return equation.primitive.name in PRODUCTS or equation.primitive in ETP_PRIMITIVES


def _ahead(step: StepProgram, in_loop: set[Var]) -> tuple[Var, ...]:
    """Return products in the loop that depend on the slices alone, without those behind others."""
    program = step.program
    waiting = program.dependents_of(step.carried)
    possible = in_loop - waiting
    products = [
        equation.outvars[0]
        for equation in equations_of(program, possible)
        if _is_product(equation)
        and not any(map(_is_step_by_step, _behind(program, equation, possible)))
    ]
    behind = {v for p in products for v in program.depends_on([p]) if v is not p}
    return tuple(p for p in products if p not in behind)


def _behind(program: Program, equation: Any, possible: set[Var]) -> Iterator[Any]:
    return equations_of(program, program.depends_on(equation.outvars) & possible)


def _is_worth_it(step: StepProgram, split: Split, later: set[Var]) -> bool:
    def size(var: Var) -> int:
        return int(var.aval.size * var.aval.dtype.itemsize)

    kept = sum(map(size, (*split.recorded, *split.ahead, *step.slices, *step.carried)))
    largest = max(map(size, (var for var in later if var not in split.source)), default=0)
    return largest <= MOST_PER_STEP * kept

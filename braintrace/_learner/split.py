"""What of a step has to wait for the step before, and what can be done for all steps at once.

A loop over time is slow where a single product over time and batch is fast. Only what the next
step's States are computed from has to be in the loop. Products with the inputs alone can be
taken before it; outputs, losses and Jacobians after it, from what the loop has recorded.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from .._compiler import Derivatives
from .._etrace_op import ETP_PRIMITIVES
from .._jax import Atom, Equation, Var, equations_inside, is_var
from .._jaxpr import Program, equal_values

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that are another thing, or a dearer one, when they are mapped over time: both
branches of a `cond` would run, and some generators of random numbers would draw others."""

MOST_EXTRA = 4
"""How much more than what a step takes in and gives out its products may take, to be kept for all
steps of a chunk at once: the logits of a large vocabulary are worth a loop."""


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

    @functools.cached_property
    def varying(self) -> set[Var]:
        """The variables that are not the same in every step."""
        return self.program.dependents_of([*self.carried, *self.slices])

    @property
    def bytes_in_and_out(self) -> int:
        """The bytes that one step takes from the sequences and gives out, States apart."""
        results = {atom for atom in self.results if is_var(atom)}
        return sum(map(size_of, (*self.slices, *results)))


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
        For each variable that is given after the loop: which of `ahead`, `recorded` and the
        slices has its value.
    """

    ahead: tuple[Var, ...]
    recorded: tuple[Var, ...]
    source: Mapping[Var, Var]


def split_step(step: StepProgram) -> Split | None:
    """Cut a step into three; ``None`` for one that has to be run step by step."""
    program = step.program
    equal = equal_values(program)
    moving = moving_variables(program, step.differentiable)
    if any(_has_moving(e.invars, moving) for e in program.equations if e.effects):
        return None
    if _bends_sums(step, moving):
        return None
    in_loop = {*step.carried}
    waiting = [e for e in program.equations if e.effects]
    outputs = list(step.written)
    while waiting or outputs:
        outputs += [atom for e in waiting for atom in (*e.invars, *e.outvars)]
        in_loop |= program.depends_on(outputs) & step.varying
        given = _given(step, equal, in_loop, moving)
        later = program.depends_on(step.results, frozenset(given)) & step.varying
        computed = equations_of(program, later - given.keys())
        waiting, outputs = [e for e in computed if _is_step_by_step(e)], []
        if any(_has_moving(equation.outvars, moving) for equation in waiting):
            return None
    ahead = _ahead(step, in_loop)
    by_value = {equal[var]: var for var in ahead}
    source = {
        var: by_value.get(equal[var], given[var])
        for var in sorted_by_program(program, later)
        if var in given
    }
    elsewhere = {*ahead, *step.slices}
    recorded = tuple(var for var in dict.fromkeys(source.values()) if var not in elsewhere)
    is_small = sum(map(size_of, recorded)) <= MOST_EXTRA * step.bytes_in_and_out
    return Split(ahead, recorded, source) if is_small else None


def _bends_sums(step: StepProgram, moving: set[Var]) -> bool:
    """Tell whether a backward pass would bend the sum of all steps' gradients, instead of each.

    Of what is the same in every step there is one, whose gradient is the sum over the steps.
    """
    derivatives, fixed = Derivatives(), moving - step.varying
    readers = (e for e in step.program.equations if _has_moving(e.invars, fixed))
    return any(
        _has_moving([equation.invars[operand] for operand in derivatives.bent(equation)], fixed)
        for equation in readers
    )


def _given(
    step: StepProgram, equal: Mapping[Var, Var], in_loop: set[Var], moving: set[Var]
) -> dict[Var, Var]:
    """Return the variables whose value is given after the loop, and what has it.

    A variable that has a derivative is not among them: it is computed anew, to be differentiated.
    """
    made = {equal[var]: var for var in reversed(sorted_by_program(step.program, in_loop))}
    made.update({var: var for var in step.slices})
    return {v: made[first] for v, first in equal.items() if first in made and v not in moving}


def moving_variables(program: Program, differentiable: Iterable[Var]) -> set[Var]:
    """Return the variables that have a derivative with respect to some inputs."""
    moving = set(differentiable)
    for equation in program.equations:
        is_stopped = equation.primitive.name == "stop_gradient"
        if not is_stopped and _has_moving(equation.invars, moving):
            moving.update(v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return moving


def _has_moving(atoms: Iterable[Atom], moving: set[Var]) -> bool:
    return any(is_var(atom) and atom in moving for atom in atoms)


def equations_of(program: Program, variables: Iterable[Var]) -> Iterator[Any]:
    """Yield the equations that make some variables, in execution order."""
    made = {program.producer[var] for var in variables if var in program.producer}
    return (program.equations[index] for index in sorted(made))


def sorted_by_program(program: Program, variables: set[Var]) -> list[Var]:
    """Return variables in the order in which the program has them."""
    inputs = [var for var in program.in_vars if var in variables]
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return inputs + [var for var in made if var in variables]


def size_of(var: Var) -> int:
    """Return the bytes of a variable."""
    return int(var.aval.size * var.aval.dtype.itemsize)


def is_product(equation: Any) -> bool:
    """Tell whether an equation is a product with weights, whose result is written out."""
    return equation.primitive.name in PRODUCTS or equation.primitive in ETP_PRIMITIVES


def _is_step_by_step(equation: Equation) -> bool:
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)


def _ahead(step: StepProgram, in_loop: set[Var]) -> tuple[Var, ...]:
    """Return the last products in the loop that depend on the slices alone."""
    program = step.program
    possible = in_loop - program.dependents_of(step.carried)
    products = [e.outvars[0] for e in equations_of(program, possible) if is_product(e)]

    def is_good(product: Var) -> bool:
        behind = list(equations_of(program, program.depends_on([product]) & possible))
        extra = sum(size_of(e.outvars[0]) for e in behind if is_product(e))
        waits = any(e.effects or _is_step_by_step(e) for e in behind)
        return not waits and extra <= MOST_EXTRA * step.bytes_in_and_out

    good = [product for product in products if is_good(product)]
    others = {v for product in good for v in program.depends_on([product]) if v is not product}
    return tuple(product for product in good if product not in others)

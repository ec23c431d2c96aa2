"""Loop fission: operations that depend on the step before, and operations for all steps at once.

A loop over time is slow compared with a single product over time and batch. Only the operations
that the next step's States depend on must be in loops (see `stages`). Outputs, losses and Jacobians
are computed after the loops, from their recorded values.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from .._compiler import Derivative
from .._jax import Atom, Equation, Var, equations_inside, is_var, runs_on_several_devices
from .._jaxpr import Program, carries_derivative, equal_values, merged
from .._jaxpr.dataflow import CONSTANT
from .._typing import PyTree
from .over_time import AT_ONCE, AT_ONCE_BUT_MASKED, ONE_BY_ONE, OverTime, is_half
from .stages import MOST_EXTRA, Loops, loops_of
from .step_program import StepProgram, equations_of, is_product, size_of, vars_of

STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that differ, or cost more, when mapped over time: both branches of a `cond` would run,
and some random number generators would return other numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Fission of a step into loops, and operations between and after them.

    Attributes
    ----------
    values
        The program of the step after CSE, without its derivatives.
    loops
        The loops.
    recorded
        Variables that the loops record.
    ahead
        Results of hoisted products that are read later.
    source
        For each variable that is given after the loops: the variable that has its value.
    same
        For each variable with a derivative and a known value: the variable that has the value.
    of_products
        Bytes of operands and results of the products for the loss, if they are large enough to
        limit the chunk length.
    losses, results
        How losses with their derivatives are computed for all steps, and how other results are.
    """

    values: Program
    loops: Loops
    recorded: tuple[Var, ...]
    ahead: tuple[Var, ...]
    source: Mapping[Var, Var]
    same: Mapping[Var, Var]
    of_products: int
    losses: OverTime
    results: OverTime


def split_step(step: StepProgram, has_mask: bool) -> Split:
    """Split a step into loops and the rest.

    Parameters
    ----------
    step
        The step.
    has_mask
        Whether the scale of some steps is zero.
    """
    program = step.program
    equal = equal_values(program, step.probes)
    inputs = (*step.parameters, *step.probes)
    differentiable = program.dependents_of(inputs, None, CONSTANT, carries_derivative)
    values = _without_effects(merged(program, equal), differentiable)
    later = values.depends_on([equal[var] for var in vars_of(step.results)]) & step.varying
    needed = later | values.depends_on(values.out_atoms[: len(step.carried)]) & step.varying
    held = {first for var, first in equal.items() if var not in differentiable}
    waiting = {i for i in values.making(needed & held) if _is_step_by_step(values.equations[i])}
    waiting |= {i for i, equation in enumerate(values.equations) if equation.effects}
    loops = loops_of(step, values, waiting, later)
    source = {
        var: first
        for var, first in equal.items()
        if first in loops.given and var not in differentiable
    }
    behind = program.depends_on(vars_of(step.results), frozenset(source)) & step.varying
    source = {var: first for var, first in source.items() if var in behind}
    read = loops.read.union(source.values())
    ahead = tuple(var for loop in loops.in_order for var in loop.ahead if var in read)
    made = {var for loop in loops.in_order for var in loop.made if var in read}
    there, twice = read | {*step.slices}, behind & differentiable
    same = {var: first for var, first in equal.items() if var in twice and first in there}
    extra = _bytes_of_products(step, behind - source.keys(), behind)
    losses = AT_ONCE_BUT_MASKED if has_mask else AT_ONCE
    # In a loop over steps, devices would sum the gradients of all weights at each step.
    is_large = extra > 0 and not runs_on_several_devices()
    if is_large or _differs_over_time(step, differentiable, source):
        losses, extra = ONE_BY_ONE, 0
    is_mapped = not _any_is_step_by_step(step, step.results[2], source)
    over_time = losses, AT_ONCE if is_mapped else ONE_BY_ONE
    recorded = tuple(_sorted_by_program(values, made))
    return Split(values, loops, recorded, ahead, source, same, extra, *over_time)


def _without_effects(program: Program, differentiable: set[Var]) -> Program:
    """Return a program without the effects of equations whose results have a derivative.

    They run once, where the derivative is taken.
    """

    def left(equation: Equation) -> Equation:
        has_derivative = _any_in(equation.outvars, differentiable)
        return equation.replace(effects=set()) if has_derivative else equation

    return dataclasses.replace(program, equations=tuple(map(left, program.equations)))


def _bytes_of_products(step: StepProgram, computed: set[Var], behind: set[Var]) -> int:
    """Return the bytes of operands and results of the products for the loss; 0 if few."""
    products = [e for e in equations_of(step.program, computed) if is_product(e)]
    met = [v for e in products for v in vars_of((e.invars, e.outvars)) if v in behind]
    found = sum(map(size_of, met))
    return found if found > MOST_EXTRA * step.bytes_in_and_out else 0


def _differs_over_time(
    step: StepProgram, differentiable: set[Var], source: Mapping[Var, Var]
) -> bool:
    """Test whether the gradient of a sum over time differs from the sum of the gradients."""
    return (
        _any_is_step_by_step(step, step.results[:2], source)
        or _bends_sums(step, differentiable)
        or _adds_up_in_half_precision(step)
    )


def _any_is_step_by_step(step: StepProgram, results: PyTree, given: Mapping[Var, Var]) -> bool:
    """Test whether results depend on given values by an operation that is not mapped over time."""
    behind = step.program.depends_on(vars_of(results), frozenset(given)) & step.varying
    return any(map(_is_step_by_step, equations_of(step.program, behind - given.keys())))


def _bends_sums(step: StepProgram, differentiable: set[Var]) -> bool:
    """Test whether a nonlinear backward rule would receive the sum of all gradients.

    A loop-invariant value exists once, so its gradient is the sum over the steps.
    """
    fixed = differentiable - step.varying
    readers = (e for e in step.program.equations if _any_in(e.invars, fixed))
    return any(
        _any_in([equation.invars[operand] for operand in Derivative(equation).nonlinear], fixed)
        for equation in readers
    )


def _adds_up_in_half_precision(step: StepProgram) -> bool:
    """Test whether the gradient of a parameter is a plain sum over time in half precision.

    Products accumulate in single precision; elsewhere a sum of ones stops at 256.
    """
    program = step.program
    half = [var for var in step.parameters if is_half(var.aval.dtype)]
    behind_loss = program.depends_on([step.results[0]], blocked=CONSTANT)
    of_half = program.dependents_of(half) - step.varying
    met = (e for e in equations_of(program, behind_loss & step.varying) if not is_product(e))
    return any(_any_in(e.invars, of_half & behind_loss) for e in met)


def _any_in(atoms: Iterable[Atom], variables: set[Var]) -> bool:
    return any(is_var(atom) and atom in variables for atom in atoms)


def _sorted_by_program(program: Program, variables: set[Var]) -> list[Var]:
    """Return variables in the order of a program."""
    inputs = [var for var in program.in_vars if var in variables]
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return inputs + [var for var in made if var in variables]


def _is_step_by_step(equation: Equation) -> bool:
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)

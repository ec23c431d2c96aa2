"""Loop fission: operations that depend on the step before, and operations for all steps at once.

A loop over time is slow compared with a single product over time and batch. Only the operations
that the next step's States depend on must be in loops (see `find_loops`). Outputs, losses and
Jacobians are computed after the loops, from their recorded values.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ..._compiler import Derivative
from ..._jax import Atom, Equation, Var, equations_inside, is_var, runs_on_several_devices
from ..._jaxpr import Program, carries_derivative, equal_values, merged
from ..._jaxpr.dataflow import CONSTANT
from ..._typing import PyTree
from .find_loops import MOST_EXTRA, Loops, loops_of
from .known import Known
from .over_time import AT_ONCE, AT_ONCE_BUT_MASKED, ONE_BY_ONE, OverTime, is_half
from .step_program import StepProgram, equations_of, is_product, size_of, vars_of

STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that differ, or cost more, when mapped over time: both branches of a `cond` would run,
and some random number generators would return other numbers."""


PARTS = frozenset({"slice", "split"})
"""Operations whose results are not recorded beside their operand."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Fission of a step into loops, and operations between and after them.

    Attributes
    ----------
    values
        The program of the step after CSE, which the loops evaluate. It has no derivatives.
    loops
        The loops.
    recorded
        Variables that the loops record.
    hoisted
        Results of hoisted products that are read after their loop.
    known
        For each variable whose value a loop can record: the variable after CSE that has it.
    differentiable
        Variables with a derivative.
    perturbed
        The variables to which the losses have a derivative, each with the variable that has its
        value; ``None``: the value is zero.
    of_losses
        Known variables that the losses read.
    of_records
        For each known variable that the residuals read: the variable that has its value.
    product_bytes
        Bytes of operands and results of the products for all losses and residuals of a step; 0 if
        they are too small to limit the chunk length.
    loss_mode, result_mode
        How losses with their derivatives are computed for all steps, and how hoisted products and
        residuals are.
    """

    values: Program
    loops: Loops
    recorded: tuple[Var, ...]
    hoisted: tuple[Var, ...]
    known: Mapping[Var, Var]
    differentiable: frozenset[Var]
    perturbed: Mapping[Var, Var | None]
    of_losses: Known
    of_records: Mapping[Var, Var]
    product_bytes: int
    loss_mode: OverTime
    result_mode: OverTime

    def recording(self, variables: Iterable[Var | None]) -> "Split":
        """Return the same split that records more variables."""
        read = {*self.recorded, *self.hoisted, *variables}
        made = {var for loop in self.loops.in_order for var in loop.made if var in read}
        hoisted = tuple(var for loop in self.loops.in_order for var in loop.hoisted if var in read)
        recorded = tuple(_sorted_by_program(self.values, made))
        return dataclasses.replace(self, recorded=recorded, hoisted=hoisted)


def split_step(step: StepProgram, has_mask: bool, passes: bool = False) -> Split:
    """Split a step into loops and the rest.

    Parameters
    ----------
    step
        The step.
    has_mask
        Whether some steps may be masked: the scale of their loss is zero.
    passes
        Whether derivatives pass from step to step. The losses are then perturbed at the States and
        products of their step, else at its probes.
    """
    equal = equal_values(step.program, step.probes)
    differentiable = _differentiable(step, passes)
    values = merged(step.program, equal)
    loops = _loops(step, values, equal, differentiable)
    parts = {v for e in values.equations if e.primitive.name in PARTS for v in e.outvars}
    available = loops.available - parts
    known = {var: first for var, first in equal.items() if first in available}
    losses, constant, perturbed = _losses(step, known, differentiable, passes)
    records = varying_ancestors(step, step.results[2], known)
    of_records = {var: first for var, first in known.items() if var in records}
    read = loops.read.union(constant.values(), of_records.values(), perturbed.values())
    there, twice = read | {*step.slices}, losses & differentiable - perturbed.keys()
    same = {var: first for var, first in equal.items() if var in twice and first in there}
    of_results = records - of_records.keys()
    extra = _bytes_of_products(step, losses - constant.keys() | of_results, losses | of_results)
    computed = losses - constant.keys() - perturbed.keys()
    # In a loop over steps, devices would sum the gradients of all weights at each step.
    if extra > 0 and not runs_on_several_devices():
        mode = ONE_BY_ONE
    else:
        mode = mode_of_gradients(step, step.results[:1], differentiable, computed, has_mask)
    has_branches = any(map(_is_step_by_step, equations_of(step.program, of_results)))
    split = Split(
        values,
        loops,
        recorded=(),
        hoisted=(),
        known=known,
        differentiable=frozenset(differentiable),
        perturbed=perturbed,
        of_losses=Known(constant, same),
        of_records=of_records,
        product_bytes=0 if mode is ONE_BY_ONE else extra,
        loss_mode=mode,
        result_mode=ONE_BY_ONE if has_branches else AT_ONCE,
    )
    return split.recording(read)


def _differentiable(step: StepProgram, passes: bool) -> set[Var]:
    """Return the variables with a derivative by parameters or probes, or, if passed, by States."""
    inputs = (*step.parameters, *step.probes, *(step.carried if passes else ()))
    result: set[Var] = step.program.dependents_of(inputs, None, CONSTANT, carries_derivative)
    return result


def _loops(
    step: StepProgram, values: Program, equal: Mapping[Var, Var], differentiable: set[Var]
) -> Loops:
    """Return the loops of a step.

    Parameters
    ----------
    step, values, equal
        The step, its program after CSE, and for each variable the one that has its value there.
    differentiable
        Variables of the step with a derivative: they are computed after the loops if the next
        step's States do not need them.
    """
    later = values.depends_on([equal[var] for var in vars_of(step.results)]) & step.varying
    needed = later | values.depends_on(values.out_atoms[: len(step.carried)]) & step.varying
    constant = {first for var, first in equal.items() if var not in differentiable}
    run = values.making(needed & constant)
    in_loops = {i for i in run if _is_step_by_step(values.equations[i])}
    in_loops |= {i for i, equation in enumerate(values.equations) if equation.effects}
    return loops_of(step, values, in_loops, later)


def _losses(
    step: StepProgram, known: Mapping[Var, Var], differentiable: set[Var], passes: bool
) -> tuple[set[Var], dict[Var, Var], dict[Var, Var | None]]:
    """Return how the losses of a step depend on known values.

    Returns
    -------
    ancestors
        The varying variables that losses and auxiliary results depend on, up to the others.
    constant
        Known variables without a derivative, each with the variable that has its value.
    perturbed
        See `Split`.
    """
    constant = {var: first for var, first in known.items() if var not in differentiable}
    places = _places(step) if passes else step.probes
    cuts = [v for v in places if v in differentiable and (v in known or not passes)]
    ancestors = varying_ancestors(step, step.results[:2], {*constant, *cuts})
    of_loss = step.program.depends_on(vars_of(step.results[:1]), blocked=CONSTANT)
    reached = ancestors if passes else of_loss
    perturbed = {v: known.get(v) for v in cuts if v in reached}
    return ancestors, {v: first for v, first in constant.items() if v in ancestors}, perturbed


def mode_of_gradients(
    step: StepProgram,
    targets: PyTree,
    differentiable: Collection[Var],
    computed: set[Var],
    has_mask: bool,
) -> OverTime:
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
        any(map(_is_step_by_step, equations_of(step.program, computed)))
        or _is_nonlinear_in_sum(step, differentiable)
        or _adds_up_in_half_precision(step, targets)
    ):
        return ONE_BY_ONE
    return AT_ONCE_BUT_MASKED if has_mask else AT_ONCE


def _places(step: StepProgram) -> list[Var]:
    """Return the States of a step before and after it, and its products."""
    products = (e.outvars[0] for e in step.program.equations if is_product(e))
    return list(dict.fromkeys([*step.carried, *vars_of(step.written), *products]))


def varying_ancestors(step: StepProgram, targets: PyTree, known: Collection[Var]) -> set[Var]:
    """Return the varying variables that some targets depend on, up to known ones.

    The targets, and the known variables that are met, are included.
    """
    return step.program.depends_on(vars_of(targets), frozenset(known)) & step.varying


def _bytes_of_products(step: StepProgram, computed: set[Var], ancestors: set[Var]) -> int:
    """Return the bytes of computed products and of their operands among ancestors; 0 if few."""
    products = [e for e in equations_of(step.program, computed) if is_product(e)]
    met = [v for e in products for v in vars_of((e.invars, e.outvars)) if v in ancestors]
    size = sum(map(size_of, met))
    return size if size > MOST_EXTRA * step.bytes_in_and_out else 0


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


def _sorted_by_program(program: Program, variables: set[Var]) -> list[Var]:
    """Return variables in the order of a program."""
    inputs = [var for var in program.in_vars if var in variables]
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return inputs + [var for var in made if var in variables]


def _is_step_by_step(equation: Equation) -> bool:
    names = (inner.primitive.name for inner in (equation, *equations_inside(equation)))
    return any(n in STEP_BY_STEP or "random" in n or "callback" in n for n in names)

"""What of a step has to wait for the step before, and what can be done for all steps at once.

A loop over time is slow where a single product over time and batch is fast. Only what the next
step's States are computed from has to be in the loop. Products with the inputs alone can be
taken before it; outputs, losses and Jacobians after it, from what the loop has recorded.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from .._compiler import Derivatives
from .._jax import Atom, Equation, Var, equations_inside, is_var
from .._jaxpr import Program, equal_values
from .over_time import is_half
from .step_program import StepProgram, equations_of, is_product, size_of, vars_of

STEP_BY_STEP = frozenset({"cond", "while", "rng_bit_generator", "rng_uniform", "ffi_call"})
"""Operations that are another thing, or a dearer one, when they are mapped over time: both
branches of a `cond` would run, and some generators of random numbers would draw others."""

MOST_EXTRA = 4
"""How much more than what a step takes in and gives out its products may take, to be kept for all
steps of a chunk at once: the logits of a large vocabulary are worth a loop."""


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
    differentiable = _differentiable_variables(program, (*step.parameters, *step.probes))
    if any(_any_in(e.invars, differentiable) for e in program.equations if e.effects):
        return None
    if _bends_sums(step, differentiable) or _adds_up_in_half_precision(step):
        return None
    in_loop = {*step.carried}
    waiting = [e for e in program.equations if e.effects]
    outputs = list(step.written)
    while waiting or outputs:
        outputs += [atom for e in waiting for atom in (*e.invars, *e.outvars)]
        in_loop |= program.depends_on(outputs) & step.varying
        given = _given(step, equal, in_loop, differentiable)
        later = program.depends_on(vars_of(step.results), frozenset(given)) & step.varying
        computed = equations_of(program, later - given.keys())
        waiting, outputs = [e for e in computed if _is_step_by_step(e)], []
        if any(_any_in(equation.outvars, differentiable) for equation in waiting):
            return None
    ahead = _ahead(step, in_loop)
    by_value = {equal[var]: var for var in ahead}
    source = {
        var: by_value.get(equal[var], given[var])
        for var in _sorted_by_program(program, later)
        if var in given
    }
    elsewhere = {*ahead, *step.slices}
    recorded = tuple(var for var in dict.fromkeys(source.values()) if var not in elsewhere)
    is_small = sum(map(size_of, recorded)) <= MOST_EXTRA * step.bytes_in_and_out
    return Split(ahead, recorded, source) if is_small else None


def _bends_sums(step: StepProgram, differentiable: set[Var]) -> bool:
    """Tell whether a backward pass would bend the sum of all steps' gradients, instead of each.

    Of what is the same in every step there is one, whose gradient is the sum over the steps.
    """
    derivatives, fixed = Derivatives(), differentiable - step.varying
    readers = (e for e in step.program.equations if _any_in(e.invars, fixed))
    return any(
        _any_in([equation.invars[operand] for operand in derivatives.of(equation).bent], fixed)
        for equation in readers
    )


def _adds_up_in_half_precision(step: StepProgram) -> bool:
    """Tell whether the gradient of a parameter is a plain sum over time in half precision.

    Products add up in single precision inside; elsewhere a sum of ones stops at 256.
    """
    program = step.program
    half = [var for var in step.parameters if is_half(var.aval.dtype)]
    behind_loss = program.depends_on([step.results[0]], blocked=frozenset({"stop_gradient"}))
    of_half = program.dependents_of(half) - step.varying
    met = (e for e in equations_of(program, behind_loss & step.varying) if not is_product(e))
    return any(_any_in(e.invars, of_half & behind_loss) for e in met)


def _given(
    step: StepProgram, equal: Mapping[Var, Var], in_loop: set[Var], differentiable: set[Var]
) -> dict[Var, Var]:
    """Return the variables whose value is given after the loop, and what has it.

    A variable that has a derivative is not among them: it is computed anew, to be differentiated.
    """
    made = {equal[var]: var for var in reversed(_sorted_by_program(step.program, in_loop))}
    made.update({var: var for var in step.slices})
    known = {var: made[first] for var, first in equal.items() if first in made}
    return {var: source for var, source in known.items() if var not in differentiable}


def _differentiable_variables(program: Program, inputs: Iterable[Var]) -> set[Var]:
    """Return the variables that have a derivative with respect to some inputs."""
    found = set(inputs)
    for equation in program.equations:
        is_stopped = equation.primitive.name == "stop_gradient"
        if not is_stopped and _any_in(equation.invars, found):
            found.update(v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return found


def _any_in(atoms: Iterable[Atom], variables: set[Var]) -> bool:
    return any(is_var(atom) and atom in variables for atom in atoms)


def _sorted_by_program(program: Program, variables: set[Var]) -> list[Var]:
    """Return variables in the order in which the program has them."""
    inputs = [var for var in program.in_vars if var in variables]
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return inputs + [var for var in made if var in variables]


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

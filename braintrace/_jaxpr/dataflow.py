"""Forward dataflow through a jaxpr: the sources of each element.

The analysis visits equations in order. It follows calls into their bodies, joins the results of
branches, and iterates scans to a fixpoint. `primitives` has the rules of single equations.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._jax import TRANSPARENT_CALLS, Equation, Var, call_body, equations_inside, is_var
from .constants import Constants
from .evaluate import loop_of
from .lattices import Flow, Lattice, everything, filled, joined, spread
from .primitives import DRAWS, through_primitive
from .program import CONSTANT, Program, carries_derivative

# ``(equation, flows of its operands) -> flows of its results``, or ``None`` for no answer.
Special: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any] | None]

# In a longer scan, all slices of a sequence count as one.
LONGEST_WALK = 256


@dataclasses.dataclass(frozen=True)
class Question:
    """The lattice of an analysis, and the dependence that it follows.

    Attributes
    ----------
    lattice
        The facts about an element.
    derivatives
        Whether only derivatives are followed, not values. A function with a custom derivative then
        couples everything, unless ``special`` answers: its body is not its derivative.
    special
        A rule that is tried first for every equation, also in bodies.
    """

    lattice: Any
    derivatives: bool = False
    special: Special | None = None


def flows_from(
    question: Question, constants: Constants, starts: Mapping[Var, Flow]
) -> dict[Var, Flow]:
    """Return the flows of all variables that depend on some others."""
    known, program = dict(starts), constants.program
    equations = (program.equations[index] for index in program.forward(known))
    _pass(question, constants, equations, known)
    return known


def flows_of_outputs(
    question: Question, constants: Constants, inputs: Sequence[Flow]
) -> list[Flow]:
    """Return the flows of a program's outputs, given the flows of its inputs."""
    program = constants.program
    known: dict[Var, Flow] = dict(zip(program.in_vars, inputs, strict=True))
    _pass(question, constants, program.equations, known)
    return [known.get(atom) if is_var(atom) else None for atom in program.out_atoms]


def _pass(
    question: Question,
    constants: Constants,
    equations: Iterable[Equation],
    known: dict[Var, Flow],
) -> None:
    """Add the flows of the results of equations; known flows do not change."""
    for equation in equations:
        operands = [known.get(atom) if is_var(atom) else None for atom in equation.invars]
        if all(flow is None for flow in operands):
            continue
        flows = flows_of_results(question, constants, equation, operands)
        for var, flow in zip(equation.outvars, flows, strict=True):
            if flow is not None and (not question.derivatives or carries_derivative(var)):
                known.setdefault(var, flow)


def flows_of_results(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> Sequence[Flow]:
    """Return the flows of one equation's results, given the flows of its operands.

    Parameters
    ----------
    question, constants
        The question, and the constants of the program of the equation.
    equation, operands
        The equation, and one flow for each operand.
    """
    lattice, name = question.lattice, equation.primitive.name
    flows = None if question.special is None else question.special(equation, operands)
    if flows is not None:
        return flows
    if question.derivatives and name in CONSTANT:
        return [None] * len(equation.outvars)
    if name == "optimization_barrier":  # operand by operand
        return list(operands)
    body = call_body(equation)
    if body is not None and (name in TRANSPARENT_CALLS or not question.derivatives):
        return flows_of_outputs(question, constants.body(body, equation.invars), operands)
    if name == "cond":
        return _cond(question, constants, equation, operands)
    if name == "scan":
        return _scan(question, constants, equation, operands)
    return through_primitive(lattice, equation, operands, constants)


def _cond(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Join the results of the branches, and the flow of the index that selects one."""
    choice, *arguments = operands
    bodies = [constants.body(body, equation.invars[1:]) for body in equation.params["branches"]]
    every = [flows_of_outputs(question, body, arguments) for body in bodies]
    chosen = everything(question.lattice, [choice])
    if chosen is not None:
        shapes = (var.aval.shape for var in equation.outvars)
        every.append([spread(question.lattice, chosen, shape) for shape in shapes])
    return [joined(question.lattice, flows) for flows in zip(*every, strict=True)]


def _scan(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Follow a scan to a fixpoint of its carry, which then holds at each of its steps."""
    lattice, loop = question.lattice, loop_of(equation, operands)
    count, length = len(loop.carried), equation.params["length"]
    body = constants.body(loop.body, loop_of(equation, equation.invars).fixed)

    def run(carried: Sequence[Flow], slices: Sequence[Flow]) -> list[Flow]:
        return flows_of_outputs(question, body, [*loop.fixed, *carried, *slices])

    steps = [[s if s is None else lattice.over(s, [0]) for s in loop.sequences]]
    carried = fixpoint(lattice, lambda now: run(now, steps[0])[:count], loop.carried)
    differ = any(s is not None and (s != s[:1]).any() for s in loop.sequences)
    if differ and length <= LONGEST_WALK:
        steps = [[s if s is None else s[i] for s in loop.sequences] for i in range(length)]
    stacked = []
    every = (run(carried, step)[count:] for step in steps)
    for var, *flows in zip(equation.outvars[count:], *every, strict=True):
        full = [filled(lattice, flow, var.aval.shape[1:]) for flow in flows]
        is_none = all(flow is None for flow in flows)
        stacked.append(None if is_none else spread(lattice, np.stack(full), var.aval.shape))
    return [*carried, *stacked]


def fixpoint(
    lattice: Lattice,
    step: Callable[[Sequence[Flow]], Sequence[Flow]],
    carried: Sequence[Flow],
) -> list[Flow]:
    r"""Return the least :math:`c` with :math:`c = c_0 \vee f(c)`, by iteration."""
    while True:
        after = [joined(lattice, pair) for pair in zip(carried, step(carried), strict=True)]
        pairs = zip(carried, after, strict=True)
        if all(b is None or (a is not None and np.array_equal(a, b)) for a, b in pairs):
            return after
        carried = after


# --- binding times
#
# A value is *parameter-derived* if it depends only on parameters, constants and read-only States: a
# mask times a weight, its transpose, the exponential of a time constant. It is the same for all
# samples and all steps between two updates of the parameters. Every other value is data.


class BindingTime(enum.IntEnum):
    """Binding time of a value; a value has the latest binding time of its operands.

    A value without a derivative to a parameter (an index, the result of ``stop_gradient``) counts
    as constant.
    """

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


def binding_times(
    program: Program, inputs: Sequence[BindingTime], becomes_data: Callable[[Equation], bool]
) -> dict[Var, BindingTime]:
    """Return the binding times of all variables.

    Parameters
    ----------
    program, inputs
        The program, and the binding times of its inputs.
    becomes_data
        Tells whether the results of an equation count as data, even if they depend on parameters
        alone.
    """
    times = dict.fromkeys(program.constants, BindingTime.CONSTANT)
    times.update(
        (v, _of_variable(v, time)) for v, time in zip(program.in_vars, inputs, strict=True)
    )
    for equation in program.equations:
        last = max((times[a] for a in equation.invars if is_var(a)), default=BindingTime.CONSTANT)
        is_parametric, name = last is BindingTime.PARAMETER, equation.primitive.name
        if equation.effects or _draws(equation) or (is_parametric and becomes_data(equation)):
            last = BindingTime.DATA
        elif is_parametric and name in CONSTANT:
            last = BindingTime.CONSTANT
        times.update((var, _of_variable(var, last)) for var in equation.outvars)
    return times


def _draws(equation: Equation) -> bool:
    every = (equation, *equations_inside(equation))
    return any(inner.primitive.name in DRAWS for inner in every)


def _of_variable(var: Var, time: BindingTime) -> BindingTime:
    is_held = time is BindingTime.PARAMETER and not carries_derivative(var)
    return BindingTime.CONSTANT if is_held else time

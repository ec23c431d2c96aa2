"""Forward dataflow through a jaxpr: the sources of each element or variable.

The analysis visits equations in order. It follows calls into their bodies and joins the results of
branches. It iterates a loop to a fixpoint (see `fixpoint`), or follows it step by step if its
slices differ.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..._jax import TRANSPARENT_CALLS, AnyJaxpr, Atom, Equation, Var, call_body, is_var
from ..bodies import loop_of
from ..program import carries_derivative
from .constants import Constants
from .lattices import Flow, Lattice, PerVariable, everything, filled, joined, same, spread
from .primitives import CONSTANT, through_primitive

Special: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any] | None]
"""``(equation, flows of its operands) -> flows of its results``, or ``None`` for no answer."""

LONGEST_WALK = 256
"""A scan with more steps is not followed step by step."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The lattice of an analysis, and the dependence that it follows.

    Attributes
    ----------
    lattice
        The facts about an element, or about a variable.
    derivatives
        Whether only derivatives are followed, not values. A function with a custom derivative then
        couples everything, unless ``special`` answers: its body is not its derivative.
    special
        A rule that is tried first for every equation, also in bodies.
    """

    lattice: Lattice | PerVariable
    derivatives: bool = False
    special: Special | None = None


def flows_to(
    question: Question,
    constants: Constants,
    starts: Mapping[Var, Flow],
    targets: Sequence[Atom],
) -> list[Flow]:
    """Return the flows of some variables of a program, given the flows of others.

    Parameters
    ----------
    question
        The analysis.
    constants
        The program, with its constants.
    starts
        Variables, inputs or not, and their flows.
    targets
        The variables in question.
    """
    program = constants.program
    between = program.depends_on(targets, frozenset(starts)).difference(starts)
    equations = (program.equations[index] for index in program.making(between))
    known = dict(starts)
    _pass(question, constants, equations, known)
    return [known.get(atom) if is_var(atom) else None for atom in targets]


def flows_from(
    question: Question, constants: Constants, starts: Mapping[Var, Flow], last: int | None = None
) -> dict[Var, Flow]:
    """Return the flows of all variables that depend on some others.

    Equations after the one with index ``last`` are ignored.
    """
    known, program = dict(starts), constants.program
    equations = (program.equations[index] for index in program.forward(starts, known, last))
    _pass(question, constants, equations, known)
    return known


def flows_of_outputs(question: Question, constants: Constants, inputs: Sequence[Any]) -> list[Any]:
    """Return the flows of a program's outputs, given the flows of its inputs."""
    known = flows_of_variables(question, constants, inputs)
    return [_flow_of(question.lattice, atom, known) for atom in constants.program.out_atoms]


def flows_of_variables(
    question: Question, constants: Constants, inputs: Sequence[Any]
) -> dict[Var, Any]:
    """Return the flows of all variables of a program, given the flows of its inputs."""
    program, lattice = constants.program, question.lattice
    known: dict[Var, Flow] = dict(zip(program.in_vars, inputs, strict=True))
    if isinstance(lattice, PerVariable):
        known.update((var, lattice.of_value(value)) for var, value in program.constants.items())
    _pass(question, constants, program.equations, known)
    return known


def _flow_of(lattice: Lattice | PerVariable, atom: Atom, known: Mapping[Var, Flow]) -> Flow:
    if is_var(atom):
        return known.get(atom)
    return lattice.of_value(atom.val) if isinstance(lattice, PerVariable) else None


def _pass(
    question: Question,
    constants: Constants,
    equations: Iterable[Equation],
    known: dict[Var, Flow],
) -> None:
    """Add the flows of the results of equations; known flows do not change."""
    lattice = question.lattice
    is_sparse = not isinstance(lattice, PerVariable)
    for equation in equations:
        operands = [_flow_of(lattice, atom, known) for atom in equation.invars]
        if is_sparse and all(flow is None for flow in operands):
            continue
        flows = flows_of_results(question, constants, equation, operands)
        for var, flow in zip(equation.outvars, flows, strict=True):
            if not question.derivatives or carries_derivative(var):
                known.setdefault(var, flow)


def flows_of_results(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> Sequence[Any]:
    """Return the flows of one equation's results, given the flows of its operands.

    Parameters
    ----------
    question, constants
        The question, and the program of the equation.
    equation, operands
        The equation, and one flow for each operand.
    """
    lattice, name = question.lattice, equation.primitive.name
    flows = None if question.special is None else question.special(equation, operands)
    if flows is not None:
        return flows
    if question.derivatives and name in CONSTANT:
        return [None] * len(equation.outvars)
    body = call_body(equation)
    if body is not None and (name in TRANSPARENT_CALLS or not question.derivatives):
        return flows_of_outputs(question, constants.body(body, equation.invars), operands)
    drive = DRIVERS.get(name)
    flows = None if drive is None else drive(question, constants, equation, operands)
    if flows is not None:
        return flows
    if isinstance(lattice, PerVariable):
        return lattice.through(equation, operands)
    return through_primitive(lattice, equation, operands, constants)


def flows_into_bodies(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[tuple[AnyJaxpr, list[Any]]]:
    """Return the bodies of a branch, loop or call, with the flows of their inputs.

    For a loop, the lattice is `PerVariable`, and the flows are for the inputs of any step.
    """
    name = equation.primitive.name
    if name == "cond":
        return [(branch, list(operands[1:])) for branch in equation.params["branches"]]
    if name in ("scan", "while"):
        loop = loop_of(equation, operands)
        results = flows_of_results(question, constants, equation, operands)
        carried = results[: len(loop.carried)]
        return [(loop.body, [*loop.fixed, *carried, *loop.sequences])]
    return [(call_body(equation), list(operands))] if name in TRANSPARENT_CALLS else []


def _cond(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Join the results of the branches, and the flow of the index that selects one."""
    lattice, branches = question.lattice, equation.params["branches"]
    choice, *arguments = operands
    taken = lattice.branch(choice) if isinstance(lattice, PerVariable) else None
    branches = branches if taken is None else branches[taken : taken + 1]
    bodies = [constants.body(branch, equation.invars[1:]) for branch in branches]
    every = [flows_of_outputs(question, body, arguments) for body in bodies]
    every.append(_everywhere(lattice, choice, equation.outvars))
    return [joined(lattice, flows) for flows in zip(*every, strict=True)]


def _everywhere(lattice: Lattice | PerVariable, choice: Flow, atoms: Sequence[Atom]) -> list[Flow]:
    """Return flows of variables that depend, in every element, on all of a choice."""
    if isinstance(lattice, PerVariable):
        return [lattice.decided(choice)] * len(atoms)
    one = everything(lattice, [choice])
    return [None if one is None else spread(lattice, one, atom.aval.shape) for atom in atoms]


def _while(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Follow a loop of unknown length."""
    loop, atoms = loop_of(equation, operands), loop_of(equation, equation.invars)
    assert loop.condition is not None
    body = constants.body(loop.body, atoms.fixed)
    test = constants.body(loop.condition, atoms.tested)

    def step(carried: Sequence[Flow]) -> list[Flow]:
        (goes_on,) = flows_of_outputs(question, test, [*loop.tested, *carried])
        decided = _everywhere(question.lattice, goes_on, atoms.carried)
        after = flows_of_outputs(question, body, [*loop.fixed, *carried])
        return [joined(question.lattice, [a, d]) for a, d in zip(after, decided, strict=True)]

    return fixpoint(_join(question.lattice), step, loop.carried)


def fixpoint(
    join: Callable[[Any, Any], Any],
    step: Callable[[Sequence[Any]], Sequence[Any]],
    carried: Sequence[Any],
) -> list[Any]:
    r"""Return the least :math:`c` with :math:`c = c_0 \vee f(c)`, by iteration.

    Parameters
    ----------
    join
        Returns the least upper bound of two values.
    step
        Maps all values through one step of a loop.
    carried
        The values before the first step.
    """
    while True:
        after = [*map(join, carried, step(carried))]
        if all(same(a, b) for a, b in zip(carried, after, strict=True)):
            return after
        carried = after


def _join(lattice: Lattice | PerVariable) -> Callable[[Flow, Flow], Flow]:
    return lambda first, second: joined(lattice, [first, second])


def _scan(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Follow a scan step by step, or all steps as one if there are too many."""
    lattice, length = question.lattice, equation.params["length"]
    loop, atoms = loop_of(equation, operands), loop_of(equation, equation.invars)
    join, count = _join(lattice), len(loop.carried)
    body = constants.body(loop.body, atoms.fixed)

    def results(carried: Sequence[Flow], slices: Sequence[Flow]) -> list[Flow]:
        return flows_of_outputs(question, body, [*loop.fixed, *carried, *slices])

    if isinstance(lattice, PerVariable):
        carried = fixpoint(join, lambda c: results(c, loop.sequences)[:count], loop.carried)
        return [*carried, *results(carried, loop.sequences)[count:]]
    if length > LONGEST_WALK:
        slices = [s if s is None else lattice.over(s, [0]) for s in loop.sequences]
        carried = fixpoint(join, lambda c: results(c, slices)[:count], loop.carried)
        steps = [results(carried, slices)[count:]] * length
    else:
        order = range(length)[::-1] if equation.params["reverse"] else range(length)
        carried, by_step = _walk(results, loop.carried, loop.sequences, order)
        steps = [by_step[step] for step in range(length)]
    variables = equation.outvars[count:]
    return [*carried, *(_stacked(lattice, steps, i, v) for i, v in enumerate(variables))]


def _walk(
    results: Callable[[Sequence[Flow], Sequence[Flow]], list[Flow]],
    start: Sequence[Flow],
    sequences: Sequence[Flow],
    order: Sequence[int],
) -> tuple[list[Flow], dict[int, list[Flow]]]:
    """Return the final carry of a scan, and the other results of each step."""
    carried, count = list(start), len(start)
    by_step: dict[int, list[Flow]] = {}
    is_steady = all(s is None or (s == s[:1]).all() for s in sequences)
    for position, step in enumerate(order):
        flows = results(carried, [None if s is None else s[step] for s in sequences])
        by_step[step] = flows[count:]
        if is_steady and all(same(a, b) for a, b in zip(flows, carried, strict=False)):
            by_step.update(dict.fromkeys(order[position:], flows[count:]))
            break
        carried = flows[:count]
    return carried, by_step


def _stacked(lattice: Lattice, steps: Sequence[Sequence[Flow]], index: int, var: Var) -> Flow:
    flows = [step[index] for step in steps]
    first = next((flow for flow in flows if flow is not None), None)
    if first is None or all(flow is first for flow in flows):
        return None if first is None else spread(lattice, first, var.aval.shape)
    return np.stack([filled(lattice, flow, var.aval.shape[1:]) for flow in flows])


def _linear_solve(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow] | None:
    """Follow the solver of a linear equation whose matrix is not followed.

    The solution is linear in the right-hand side, so its derivative runs the same program on
    values.
    """
    lengths = equation.params["const_lengths"]
    count = sum(lengths)
    if any(flow is not None for flow in operands[:count]):
        return None
    start = lengths.matvec + lengths.vecmat
    atoms = [*equation.invars[start : start + lengths.solve], *equation.invars[count:]]
    body = constants.body(equation.params["jaxprs"].solve, atoms)
    inputs = [None] * lengths.solve + list(operands[count:])
    return flows_of_outputs(Question(question.lattice), body, inputs)


def _barrier(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Follow a barrier, operand by operand."""
    return list(operands)


DRIVERS: Mapping[
    str, Callable[[Question, Constants, Equation, Sequence[Flow]], list[Flow] | None]
] = {
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "optimization_barrier": _barrier,
    "scan": _scan,
    "while": _while,
}

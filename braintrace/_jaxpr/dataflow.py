"""Forward dataflow through a jaxpr: the sources of each element or variable.

The analysis visits equations in order. It follows calls into their bodies, joins the results of
branches, and iterates loops to a fixpoint. `primitives` has the rules of single equations.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.typing import ArrayLike

from .._jax import (
    OWN_DERIVATIVE,
    TRANSPARENT_CALLS,
    AnyJaxpr,
    Atom,
    Equation,
    Var,
    call_body,
    is_var,
)
from .evaluate import Constants, loop_of
from .lattices import Flow, Lattice, everything, filled, joined, same, spread
from .primitives import CONSTANT, DRAWS, through_primitive
from .program import carries_derivative


class PerVariable(abc.ABC):
    """A lattice with one entry for each variable, constants included.

    Its entries are immutable values. `through` is the rule of all equations without bodies.
    """

    @abc.abstractmethod
    def of_value(self, value: Any) -> Any:
        """Return the entry of a literal or of a constant."""

    @abc.abstractmethod
    def join(self, first: Any, second: Any) -> Any:
        """Return the least upper bound of two entries."""

    @abc.abstractmethod
    def through(self, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the entries of an equation's results, given the entries of its operands."""


# ``(equation, flows of its operands) -> flows of its results``, or ``None`` for no answer.
Special: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any] | None]

# A scan with more steps is not followed step by step.
LONGEST_WALK = 256


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

    lattice: Any
    derivatives: bool = False
    special: Special | None = None

    def join(self, flows: Sequence[Any]) -> Any:
        """Return the least upper bound of several flows."""
        return joined(self.lattice, flows)


def flows_to(
    question: Question,
    constants: Constants,
    starts: Mapping[Var, Flow],
    targets: Sequence[Atom],
) -> list[Flow]:
    """Return the flows of some variables of a program, given the flows of others."""
    program = constants.program
    between = program.depends_on(targets, frozenset(starts)).difference(starts)
    known = dict(starts)
    _pass(question, constants, (program.equations[i] for i in program.making(between)), known)
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
    known: dict[Var, Any] = dict(zip(program.in_vars, inputs, strict=True))
    if isinstance(lattice, PerVariable):
        known.update((var, lattice.of_value(value)) for var, value in program.constants.items())
    _pass(question, constants, program.equations, known)
    return known


def _flow_of(lattice: Any, atom: Atom, known: Mapping[Var, Any]) -> Any:
    if is_var(atom):
        return known.get(atom)
    return lattice.of_value(atom.val) if isinstance(lattice, PerVariable) else None


def _pass(
    question: Question,
    constants: Constants,
    equations: Iterable[Equation],
    known: dict[Var, Any],
) -> None:
    """Add the flows of the results of equations; known flows do not change."""
    is_sparse = not isinstance(question.lattice, PerVariable)
    for equation in equations:
        operands = [_flow_of(question.lattice, atom, known) for atom in equation.invars]
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
    if name in ("scan", "while"):
        return _loop(question, constants, equation, operands)
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
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[Any]:
    """Join the results of the branches, and the flow of the index that selects one."""
    choice, *arguments = operands
    bodies = [constants.body(body, equation.invars[1:]) for body in equation.params["branches"]]
    every = [flows_of_outputs(question, body, arguments) for body in bodies]
    every.append(_decided(question.lattice, choice, equation.outvars))
    return [question.join(flows) for flows in zip(*every, strict=True)]


def _decided(lattice: Any, choice: Any, atoms: Sequence[Atom]) -> list[Any]:
    """Return flows of variables that depend, in every element, on all of a choice."""
    if isinstance(lattice, PerVariable):
        return [choice] * len(atoms)
    one = everything(lattice, [choice])
    return [None if one is None else spread(lattice, one, atom.aval.shape) for atom in atoms]


def _loop(
    question: Question, constants: Constants, equation: Equation, operands: Sequence[Any]
) -> list[Any]:
    """Follow a loop to a fixpoint of its carry, or step by step if the slices of a scan differ."""
    lattice, loop = question.lattice, loop_of(equation, operands)
    atoms, count = loop_of(equation, equation.invars), len(loop.carried)
    body, per_variable = constants.body(loop.body, atoms.fixed), isinstance(lattice, PerVariable)

    def run(carried: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
        after = flows_of_outputs(question, body, [*loop.fixed, *carried, *slices])
        if loop.condition is None:
            return after
        test = constants.body(loop.condition, atoms.tested)
        (goes_on,) = flows_of_outputs(question, test, [*loop.tested, *carried])
        decided = _decided(lattice, goes_on, atoms.carried)
        return [question.join(pair) for pair in zip(after, decided, strict=True)]

    differ = not per_variable and any(s is not None and (s != s[:1]).any() for s in loop.sequences)
    if differ and equation.params["length"] <= LONGEST_WALK:
        return _walk(lattice, equation, run, loop.carried, loop.sequences)
    slices = [s if per_variable or s is None else lattice.over(s, [0]) for s in loop.sequences]
    join = lambda first, second: question.join([first, second])  # noqa: E731
    carried = fixpoint(join, lambda c: run(c, slices)[:count], loop.carried)
    stacked = run(carried, slices)[count:]
    if not per_variable:
        pairs = zip(stacked, equation.outvars[count:], strict=True)
        stacked = [f if f is None else spread(lattice, f, v.aval.shape) for f, v in pairs]
    return [*carried, *stacked]


def _walk(
    lattice: Lattice,
    equation: Equation,
    run: Callable[[Sequence[Flow], Sequence[Flow]], list[Flow]],
    carried: Sequence[Flow],
    sequences: Sequence[Flow],
) -> list[Flow]:
    """Follow a scan step by step."""
    length, count, by_step = equation.params["length"], len(carried), {}
    for step in range(length)[::-1] if equation.params["reverse"] else range(length):
        flows = run(carried, [None if s is None else s[step] for s in sequences])
        carried, by_step[step] = flows[:count], flows[count:]
    stacked: list[Flow] = []
    for index, var in enumerate(equation.outvars[count:]):
        column = [by_step[step][index] for step in range(length)]
        full = [filled(lattice, flow, var.aval.shape[1:]) for flow in column]
        stacked.append(None if all(flow is None for flow in column) else np.stack(full))
    return [*carried, *stacked]


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


# --- binding times
#
# A value is *parameter-derived* if it depends only on parameters, constants and read-only States: a
# mask times a weight, its transpose, the exponential of a time constant. It is the same for all
# samples and all steps between two updates of the parameters. Every other value is data.


class BindingTime(enum.IntEnum):
    """Binding time of a value; a value has the latest binding time of its operands."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


class Taint(PerVariable):
    """Binding times of variables, as far as parameters learn through them.

    A value without a derivative to a parameter (an index, the result of ``stop_gradient``) counts
    as constant.
    """

    def of_value(self, value: ArrayLike) -> BindingTime:
        return BindingTime.CONSTANT

    def join(self, first: BindingTime, second: BindingTime) -> BindingTime:
        return max(first, second)

    def through(self, equation: Equation, operands: Sequence[BindingTime]) -> list[BindingTime]:
        if equation.primitive.name in DRAWS:
            return [BindingTime.DATA] * len(equation.outvars)
        last = max(operands, default=BindingTime.CONSTANT)
        last = _held(last) if equation.primitive.name in CONSTANT else last
        return [bound(var, last) for var in equation.outvars]


def question_of_taint(becomes_data: Callable[[Equation], bool] = lambda _: False) -> Question:
    """Return the question for the binding times of variables.

    Parameters
    ----------
    becomes_data
        Tells whether the results of an equation count as data, even if they depend on parameters
        alone.
    """

    def special(equation: Equation, operands: Sequence[BindingTime]) -> Sequence[Any] | None:
        last = max(operands, default=BindingTime.CONSTANT)
        if equation.effects or (last is BindingTime.PARAMETER and becomes_data(equation)):
            return [BindingTime.DATA] * len(equation.outvars)
        if equation.primitive.name in OWN_DERIVATIVE:  # its body is not its derivative
            return [bound(var, last) for var in equation.outvars]
        return None

    return Question(Taint(), special=special)


def bound(var: Var, time: BindingTime) -> BindingTime:
    """Return the binding time of a variable; an index from parameters is constant."""
    return time if carries_derivative(var) else _held(time)


def times_of_operands(equation: Equation, times: Mapping[Var, BindingTime]) -> list[BindingTime]:
    """Return the binding times of an equation's operands."""
    first = BindingTime.CONSTANT
    return [times.get(a, first) if is_var(a) else first for a in equation.invars]


def _held(time: BindingTime) -> BindingTime:
    return BindingTime.CONSTANT if time is BindingTime.PARAMETER else time

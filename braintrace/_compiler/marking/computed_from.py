"""What the variables of a program are computed from: constants, parameters, or data.

A value is *parametric* where it is computed from parameters, constants and States that the step
does not write: a mask times a weight, its transpose, the exponential of a time constant. It is the
same for all samples and all steps between two updates of the parameters. Everything else is data.
"""

import enum
from collections.abc import Sequence

from ..._graph.marked import is_marked
from ..._jax import TRANSPARENT_CALLS, AnyJaxpr, Equation, Var, call_body, is_var
from ..._jaxpr import DRAWS, Program, carries_derivative, interpret, loop_of
from ..._jaxpr.dataflow import CONSTANT

LOOPS = frozenset({"cond", "scan", "while"})
"""Equations with bodies that run several times, or not at all."""


class From(enum.IntEnum):
    """What a value is computed from; of several, the last one counts."""

    CONSTANTS = 0
    PARAMETERS = 1
    DATA = 2


def computed_from(program: Program, inputs: Sequence[From]) -> dict[Var, From]:
    """Return what every variable of a program is computed from, given what its inputs are.

    Variables that are missing are constants. What no derivative comes back to a parameter from (a
    number that is held, an index) is a constant as well, and what a marked operation gives is data.
    """
    found = dict(zip(program.in_vars, inputs, strict=True))
    for equation in program.equations:
        given = of_operands(equation, found)
        found.update(zip(equation.outvars, _of_results(equation, given), strict=True))
    return found


def of_operands(equation: Equation, found: dict[Var, From]) -> list[From]:
    """Return what the operands of an equation are computed from."""
    atoms = equation.invars
    return [found.get(a, From.CONSTANTS) if is_var(a) else From.CONSTANTS for a in atoms]


def bodies_with_inputs(
    equation: Equation, operands: Sequence[From]
) -> list[tuple[AnyJaxpr, list[From]]]:
    """Return the bodies of a branch, loop or call, and what their inputs are computed from.

    In a loop, these are the inputs at whichever step.
    """
    name = equation.primitive.name
    if name == "cond":
        return [(branch, list(operands[1:])) for branch in equation.params["branches"]]
    if name in ("scan", "while"):
        loop = loop_of(equation, operands)
        return [(loop.body, [*loop.fixed, *_carried(equation, operands), *loop.sequences])]
    return [(call_body(equation), list(operands))] if name in TRANSPARENT_CALLS else []


def _carried(equation: Equation, operands: Sequence[From]) -> list[From]:
    """Return what a loop carries from step to step, at whichever step."""
    loop = loop_of(equation, operands)
    carried = loop.carried
    while True:
        decided = From.CONSTANTS
        if loop.condition is not None:
            (decided,) = _results_of(loop.condition, [*loop.tested, *carried])
        results = _results_of(loop.body, [*loop.fixed, *carried, *loop.sequences])
        after = [max(a, b, decided) for a, b in zip(carried, results, strict=False)]
        if after == carried:
            return carried
        carried = after


def _results_of(body: AnyJaxpr, inputs: list[From]) -> list[From]:
    def run(_: int, equation: Equation, operands: list[From]) -> list[From]:
        return _of_results(equation, operands)

    return interpret(body, inputs, run, lambda _: From.CONSTANTS)


def _of_results(equation: Equation, operands: list[From]) -> list[From]:
    found = _of_values(equation, operands)
    return [
        From.CONSTANTS if what is From.PARAMETERS and not carries_derivative(var) else what
        for var, what in zip(equation.outvars, found, strict=True)
    ]


def _of_values(equation: Equation, operands: list[From]) -> list[From]:
    name, count = equation.primitive.name, len(equation.outvars)
    most = max(operands, default=From.CONSTANTS)
    if equation.effects or name in DRAWS:
        return [From.DATA] * count
    if name == "optimization_barrier":
        return operands
    if name in CONSTANT and most is From.PARAMETERS:
        return [From.CONSTANTS] * count
    if is_marked(equation) and most is From.PARAMETERS:
        return [From.DATA] * count
    bodies = bodies_with_inputs(equation, operands)
    if not bodies:
        return [most] * count
    results = [_results_of(body, inputs) for body, inputs in bodies]
    if name == "cond":
        results.append([operands[0]] * count)
    if name in ("scan", "while"):
        carried = _carried(equation, operands)
        results.append([*carried, *[From.CONSTANTS] * (count - len(carried))])
    return [max(column) for column in zip(*results, strict=True)]

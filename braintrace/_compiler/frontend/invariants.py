"""Take out of a loop what is broadcast in it alike at every step.

A parameter per unit that a loop over small steps uses for a whole batch is broadcast inside the
loop. Outside of it, its fan-out is a variable of the program, where the walks find it.
"""

from collections.abc import Sequence

from jax.typing import ArrayLike

from ..._jax import AnyJaxpr, Equation, Var
from ..._jaxpr import (
    Program,
    Rule,
    evaluate,
    evaluate_inlined,
    inlined,
    loop_of,
    program_of,
    rebuilt,
)


def without_invariants(
    equation: Equation, operands: list[ArrayLike], rule: Rule
) -> Sequence[ArrayLike] | None:
    """Return the outputs of a ``scan`` or ``while`` that is given its broadcasts from outside.

    Parameters
    ----------
    equation, operands
        The loop, and values of its operands.
    rule
        Applied to the equations inside.

    Returns
    -------
    sequence or None
        ``None`` where nothing is broadcast alike at every step.
    """
    loop = loop_of(equation, operands)
    program = program_of(inlined(loop.body, rule))
    invariant = _invariant(program, len(loop.fixed))
    if not invariant:
        return None
    known = _values(program, invariant, loop.fixed)

    def run(body: AnyJaxpr, values: list[ArrayLike]) -> list[ArrayLike]:
        if body is loop.condition:
            return evaluate_inlined(body, values, rule)
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, program.out_atoms, inputs, overrides=known, effects=True)

    return rebuilt(equation, operands, run)


def _invariant(program: Program, constants: int) -> list[int]:
    """Return the equations that read nothing that changes, if any of them is a broadcast."""
    varying = program.dependents_of(program.in_vars[constants:])
    fixed = program.dependents_of(program.in_vars[:constants])
    found = [
        index
        for index, equation in enumerate(program.equations)
        if not equation.effects
        and all(var in fixed and var not in varying for var in equation.outvars)
    ]
    names = {program.equations[index].primitive.name for index in found}
    return found if "broadcast_in_dim" in names else []


def _values(program: Program, invariant: list[int], fixed: list[ArrayLike]) -> dict[Var, ArrayLike]:
    made = [var for index in invariant for var in program.equations[index].outvars]
    inputs = dict(zip(program.in_vars, fixed, strict=False))
    return dict(zip(made, evaluate(program, made, inputs), strict=True))

"""Loop-invariant code motion for broadcasts.

A loop over small time steps that uses one parameter per unit for a whole batch broadcasts the
parameter inside the loop. Hoisting makes the broadcast a variable of the program, where the walks
find its fan-out.
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
    """Run a ``scan`` or ``while`` loop with its invariant equations hoisted.

    Parameters
    ----------
    equation, operands
        The loop, and values of its operands.
    rule
        Applied to the equations inside.

    Returns
    -------
    sequence or None
        ``None`` if no broadcast in the loop is invariant.
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
    """Return the loop-invariant equations, if any of them is a broadcast."""
    varying = program.dependents_of(program.in_vars[constants:])
    fixed = program.dependents_of(program.in_vars[:constants])
    invariant = [
        index
        for index, equation in enumerate(program.equations)
        if not equation.effects
        and all(var in fixed and var not in varying for var in equation.outvars)
    ]
    names = {program.equations[index].primitive.name for index in invariant}
    return invariant if "broadcast_in_dim" in names else []


def _values(program: Program, invariant: list[int], fixed: list[ArrayLike]) -> dict[Var, ArrayLike]:
    made = [var for index in invariant for var in program.equations[index].outvars]
    inputs = dict(zip(program.in_vars, fixed, strict=False))
    return dict(zip(made, evaluate(program, made, inputs), strict=True))

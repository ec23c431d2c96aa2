r"""Sums of parameters and data without a derivative, where the next operation mixes positions.

A weight plus noise, or plus a correction that is held, differs from step to step, but its
derivative does not:

.. math:: y = f(w + n), \qquad dy = \frac{\partial f}{\partial w} \, dw.

So the operation is run as what it does to small changes (see `own_derivatives`), of the weight
itself.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import Equation, Var, bind, is_var
from ..._jaxpr import Rule
from ..core.analysis import Analysis
from ..core.transfer import CUT
from ..core.walk import back_from_outputs
from .own_derivatives import by_its_derivative
from .parametric_uses import ParametricUses

SUMS = frozenset({"add", "add_any", "sub"})
MOVES = frozenset({"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"})


def rules_of_shifted(uses: ParametricUses, analysis: Analysis) -> dict[int, Rule]:
    """Return how the equations are run that read such sums, and those on the way; often none."""
    moves: dict[int, Rule] = {}
    reads: dict[int, Rule] = {}
    shifted: set[Var] = set()
    changes: dict[Var, Any] = {}
    for index, equation in enumerate(uses.program.equations):
        operand = _parametric_part(uses, analysis, equation)
        operands = [i for i, a in enumerate(equation.invars) if is_var(a) and a in shifted]
        if operand is not None:
            moves[index] = _sum(operand, changes)
        elif operands and equation.primitive.name in MOVES:
            moves[index] = _move(changes)
        elif operands and _mixes(uses, analysis, equation, operands):
            rule = by_its_derivative(analysis, equation, operands, changes)
            if rule is not None:
                reads[index] = rule
        if index in moves:
            shifted.update(equation.outvars)
    return {**moves, **reads} if reads else {}


def _parametric_part(uses: ParametricUses, analysis: Analysis, equation: Equation) -> int | None:
    """Return which operand of a sum is parametric; ``None``: it is no such sum."""
    if equation.primitive.name not in SUMS or not any(map(uses.is_wanted, equation.outvars)):
        return None
    parametric = [i for i, atom in enumerate(equation.invars) if uses.is_parametric(atom)]
    if len(parametric) != 1:
        return None
    (operand,) = parametric
    is_whole = equation.invars[operand].aval.shape == equation.outvars[0].aval.shape
    behind = analysis.gradients_behind([equation.invars[1 - operand]])
    return operand if is_whole and behind.isdisjoint(uses.program.in_vars) else None


def _mixes(
    uses: ParametricUses, analysis: Analysis, equation: Equation, operands: Sequence[int]
) -> bool:
    if not any(map(uses.is_wanted, equation.outvars)):
        return False
    received = back_from_outputs(analysis, equation)
    return any(received[operand] is CUT for operand in operands)


def _sum(operand: int, changes: dict[Var, Any]) -> Rule:
    def rule(equation: Equation, values: Sequence[Any]) -> list[Any]:
        is_less = equation.primitive.name == "sub" and operand == 1
        changes[equation.outvars[0]] = -values[operand] if is_less else values[operand]
        return bind(equation, list(values))

    return rule


def _move(changes: dict[Var, jax.Array]) -> Rule:
    def rule(equation: Equation, values: Sequence[Any]) -> list[Any]:
        (changes[equation.outvars[0]],) = bind(equation, [changes[equation.invars[0]]])
        return bind(equation, list(values))

    return rule

r"""Linearisation of calls with a custom derivative and parameters as operands.

The body of such a call :math:`y = f(w, x)` need not agree with its gradient. Its backward pass is
linear in the cotangent. The transpose of the backward pass is a program that is linear in the
operands, with the same gradient:

.. math:: (\bar w, \bar x) = B \, \bar y, \qquad dy = B^T (dw, dx).

Marking finds the weights in that program as in any other. The value of the call does not change.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax

from ..._jax import OWN_DERIVATIVE, Equation, bind, with_derivative_of
from ..._jaxpr import Rule, carries_derivative, evaluate_all
from ..core.analysis import Analysis
from ..core.back_through import CUT, back_from_outputs


def hides_weights(analysis: Analysis, equation: Equation, operands: Sequence[int]) -> bool:
    """Test whether a custom derivative couples the elements of some operands."""
    if equation.primitive.name not in OWN_DERIVATIVE:
        return False
    received = back_from_outputs(analysis.constants, equation)
    return any(received[operand] is CUT for operand in operands)


def by_its_derivative(
    analysis: Analysis, equation: Equation, operands: Sequence[int]
) -> Rule | None:
    """Return the rule that runs a call as its linearisation.

    ``None`` if its backward pass is nonlinear.

    Parameters
    ----------
    analysis, equation
        Analysis of the program, and the equation.
    operands
        Operands whose tangents are separate from the tangents of all others.
    """
    moving = [i for i, atom in enumerate(equation.invars) if carries_derivative(atom)]
    others = [i for i in moving if i not in operands]
    derivative = analysis.derivative(equation)
    pairs = [(group, derivative.along(group)) for group in (operands, others) if group]
    along = [(group, jaxpr) for group, jaxpr in pairs if jaxpr is not None]
    if len(along) < len(pairs):
        return None

    def rule(equation: Equation, values: Sequence[Any]) -> list[Any]:
        constants = [jax.lax.stop_gradient(value) for value in values]
        parts = [
            evaluate_all(jaxpr, [*constants, *(values[i] for i in group)], {})
            for group, jaxpr in along
        ]
        totals = (
            functools.reduce(operator.add, of_output) for of_output in zip(*parts, strict=True)
        )
        return [
            with_derivative_of(value, next(totals)) if carries_derivative(var) else value
            for value, var in zip(bind(equation, constants), equation.outvars, strict=True)
        ]

    return rule

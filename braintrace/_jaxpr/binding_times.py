"""Binding-time analysis: variables are constant, parameter-derived, or data.

A value is *parameter-derived* if it depends only on parameters, constants and read-only States: a
mask times a weight, its transpose, the exponential of a time constant. It is the same for all
samples and all steps between two updates of the parameters. Every other value that changes is data.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.typing import ArrayLike

from .._jax import OWN_DERIVATIVE, Equation, Var, is_var
from .dataflow import PerVariable, Question
from .primitives import CONSTANT, DRAWS
from .program import carries_derivative


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

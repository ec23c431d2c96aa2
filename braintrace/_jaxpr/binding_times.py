"""Binding times: which values depend on parameters alone, and which on data.

A value is *parameter-derived* if it depends only on parameters, constants and read-only States: a
mask times a weight, its transpose, the exponential of a time constant. It is the same for all
samples and all steps between two updates of the parameters. Every other value is data.
"""

import enum
from collections.abc import Callable, Sequence

from .._jax import Equation, Var, equations_inside, is_var
from .primitives import CONSTANT, DRAWS
from .program import Program, carries_derivative


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

"""Derivatives around known values.

The loops of a chunk have computed most values of a step. Where the step is differentiated after
them, a known value replaces the computed one: with its ordinary derivative, or as a constant.
No product is therefore computed twice.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..._etrace_op import etp_mm_p
from ..._jax import Atom, Equation, Var, bind, runs_on_several_devices
from ..._jaxpr import evaluate
from ..derivatives import FROM_RESULT, from_result
from .step_program import ByVar, StepProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Variables of a step with known values, each with the variable that has its value.

    Attributes
    ----------
    constant
        Variables without a derivative.
    differentiated
        Variables that keep their derivative.
    """

    constant: Mapping[Var, Var]
    differentiated: Mapping[Var, Var]

    def find_sources(self) -> list[Var]:
        """Return the variables that have the values."""
        return list(dict.fromkeys([*self.constant.values(), *self.differentiated.values()]))


def evaluate_around(
    step: StepProgram,
    known: Known,
    now: ByVar,
    targets: Sequence[Atom],
    current: ByVar,
    added: Mapping[Var, jax.Array] | None = None,
) -> list[Any]:
    """Return some values of a step, differentiable around known values.

    Parameters
    ----------
    step, known
        The step, and its known variables.
    now
        Their values in this step.
    targets
        The variables.
    current
        Values that replace variables, inputs included.
    added
        Terms to add to results of equations.
    """
    constant = {var: now[first] for var, first in known.constant.items()}
    values = {var: now[first] for var, first in known.differentiated.items()}
    terms, is_sharded = added or {}, runs_on_several_devices()

    def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
        is_mapped = any(var in step.varying for var in equation.outvars)
        found = None if is_sharded or not is_mapped else _run_as_operation(equation, operands)
        if not any(var in values or var in terms for var in equation.outvars):
            return found
        if equation.primitive.name in FROM_RESULT and equation.outvars[0] in values:
            results = [from_result(equation, operands[0], values[equation.outvars[0]])]
        else:
            pairs = zip(equation.outvars, found or bind(equation, operands), strict=True)
            results = [_replace(y, values[v]) if v in values else y for v, y in pairs]
        pairs = zip(equation.outvars, results, strict=True)
        return [value + terms[var] if var in terms else value for var, value in pairs]

    return evaluate(step.program, targets, {}, {**constant, **current}, rule)


def _run_as_operation(equation: Equation, operands: list[Any]) -> list[Any] | None:
    """Run a product with a matrix as an ETP operation, which has one axis of rows over time."""
    # With two axes, XLA copies an operand for the gradient of the matrix, which then takes
    # twice the time (16 to 64 steps of 32 samples, 256 x 1024 weights, CPU).
    params = {"dimension_numbers": (((1,), (0,)), ((), ())), "precision": None}
    is_product = equation.primitive.name == "dot_general" and [x.ndim for x in operands] == [2, 2]
    if not is_product or any(equation.params[name] != value for name, value in params.items()):
        return None
    y = etp_mm_p.bind(*operands, has_bias=False)
    return [y] if y.dtype == equation.outvars[0].aval.dtype else None


_replace: Callable[..., Any] = jax.custom_jvp(lambda value, known: known)
"""``(value, known)``: the known value, with the derivative of the computed one."""
_replace.defjvp(lambda primals, tangents: (primals[1], tangents[0]))  # type: ignore[attr-defined]

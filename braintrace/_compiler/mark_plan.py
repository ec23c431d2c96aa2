"""Mark plan: the equations of a program that become ETP operations.

- A product of data with a parameter-derived weight becomes the product's ETP operation.
- Any other parameter-derived variable that meets data gets an elementwise mark. Copies and
  elementwise functions between the variable and the data stay after the mark, for example the
  broadcast of a bias over the samples.
- Some uses cannot be marked: an operation of unknown dependence (a callback, a lookup, a call whose
  own derivative couples elements), and a product in a loop that cannot be unrolled.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from .._etrace_op.registry import is_marked
from .._jax import OWN_DERIVATIVE, Equation, Var
from .._jaxpr import BOTTOM, CONSTANT, ELEMENTWISE, IN_ORDER, loop_of
from .analysis import Analysis
from .back_through import CUT, back_from_outputs
from .parametric_uses import LOOPS, ParametricUses
from .products import Product, in_one_product, is_outer, is_sum_with_weights, product_of

_MOVES = (IN_ORDER - CONSTANT) | {"broadcast_in_dim", "tile", "rev", "transpose"}
"""Equations that may separate an elementwise mark from the data."""

_OPAQUE = "the compiler cannot follow single elements through it. Write it with ETP operations"
_OWN_DERIVATIVE = "it has a derivative rule of its own. Write it with ETP operations"


@dataclasses.dataclass(frozen=True)
class Unmarked:
    """Operands that stay without a mark, and the reason."""

    equation: Equation
    operands: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class MarkPlan:
    """The marks of a program, by index of the equation.

    Attributes
    ----------
    products
        Products with a weight.
    elementwise
        Operands with an elementwise mark.
    sources
        For each variable of such an operand, the variable at which its mark is placed.
    unmarked
        Operands that cannot be marked.
    """

    products: dict[int, Product] = dataclasses.field(default_factory=dict)
    elementwise: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sources: dict[Var, Var] = dataclasses.field(default_factory=dict)
    unmarked: list[Unmarked] = dataclasses.field(default_factory=list)


def mark_plan(uses: ParametricUses, unroll_limit: int) -> MarkPlan:
    """Plan the marks of a program whose loops are unrolled as far as possible.

    Wanted results that are parameter-derived are marked, too.
    """
    program, plan = uses.program, MarkPlan()
    for index, operands in uses:
        equation = program.equations[index]
        if is_marked(equation):
            continue
        product = product_of(equation, operands, uses.times)
        if is_sum_with_weights(equation, operands) and equation.outvars[0] in uses.broadcast:
            product = in_one_product(equation, operands[0])
        if isinstance(product, str):
            plan.unmarked.append(Unmarked(equation, operands, product))
        elif product is not None:
            plan.products[index] = product
        elif is_spelled_out(uses, index, operands):
            plan.unmarked.append(Unmarked(equation, operands, _why_closed(equation, unroll_limit)))
        else:
            passed = tuple(i for i in operands if _passes(uses.analysis, equation, i))
            if passed:
                plan.elementwise[index] = passed
            if passed != operands:
                others = tuple(i for i in operands if i not in passed)
                is_call = equation.primitive.name in OWN_DERIVATIVE
                reason = _OWN_DERIVATIVE if is_call else _OPAQUE
                plan.unmarked.append(Unmarked(equation, others, reason))
    used = [program.equations[i].invars[k] for i, ks in plan.elementwise.items() for k in ks]
    plan.sources.update({var: _source(uses, var) for var in (*used, *uses.results)})
    return plan


def _source(uses: ParametricUses, var: Var) -> Var:
    """Return the variable at which the elementwise mark of another is placed.

    It is the smallest of those that the other is computed from elementwise or by a copy, and the
    first of equal ones. A decay and one minus the decay therefore share a mark.
    """
    source = var
    while (before := _before(uses, var)) is not None:
        var = before
        if (var.aval.size, var.aval.ndim) <= (source.aval.size, source.aval.ndim):
            source = var
    return source


def _before(uses: ParametricUses, var: Var) -> Var | None:
    """Return the only parameter-derived operand of an elementwise function or copy."""
    equation = uses.program.maker(var)
    if equation is None:
        return None
    operands = {atom for atom in equation.invars if uses.is_parametric(atom)}
    if len(operands) != 1:
        return None
    (operand,) = operands
    name = equation.primitive.name
    is_alike = name in ELEMENTWISE and operand.aval.shape == var.aval.shape
    return operand if is_alike or (name in _MOVES and len(equation.invars) == 1) else None


def _passes(analysis: Analysis, equation: Equation, operand: int) -> bool:
    """Test whether elements can be followed from an equation's results to an operand."""
    name = equation.primitive.name
    if name in ELEMENTWISE or name in LOOPS:
        return True
    if is_outer(equation) or is_sum_with_weights(equation, (operand,)):
        return True
    return back_from_outputs(analysis.constants, equation)[operand] is not CUT


def is_spelled_out(uses: ParametricUses, index: int, operands: Sequence[int]) -> bool:
    """Test whether a loop or branch must be unrolled or lowered for weights to learn.

    This holds if it contains a product with a weight, or if its steps or cases broadcast parameters
    that differ between them.
    """
    equation = uses.program.equations[index]
    if equation.primitive.name not in LOOPS:
        return False
    changing = _changing(equation, operands)
    is_mixed = bool(changing) and not _keeps_positions(uses.analysis, equation, changing)
    return is_mixed or uses.holds_product(index)


def _changing(equation: Equation, operands: Sequence[int]) -> list[int]:
    """Return the operands that the steps of a scan, or cases, may use differently."""
    if equation.primitive.name == "scan":
        fixed = len(loop_of(equation, equation.invars).fixed)
        return [operand for operand in operands if operand >= fixed]
    return list(operands) if equation.primitive.name == "cond" else []


def _keeps_positions(analysis: Analysis, equation: Equation, operands: Sequence[int]) -> bool:
    """Test whether each element of some operands reaches at most one result element."""
    received = back_from_outputs(analysis.constants, equation)
    contributions = [received[operand] for operand in operands]
    return all(
        contribution is None
        or (isinstance(contribution, np.ndarray) and not np.any(contribution < BOTTOM))
        for contribution in contributions
    )


def _why_closed(equation: Equation, unroll_limit: int) -> str:
    """Return the reason why a loop cannot be unrolled."""
    if equation.primitive.name == "scan":
        return (
            f"the loop of {equation.params['length']} steps, each of which couples elements, is "
            f"longer than `unroll_limit` ({unroll_limit}); use a larger one, or make the inner "
            "steps steps of the model"
        )
    return "it is the weight of a product in a loop with an unknown number of steps"

"""Mark plan: the equations of a program that become ETP operations.

- A product of data with a parameter-derived weight becomes the product's ETP operation, together
  with a parameter-derived vector that is added right afterwards as its bias.
- Any other parameter-derived variable that meets data gets an elementwise mark. Copies and reshapes
  between the variable and the data stay after the mark, for example the broadcast of a bias over
  the samples.
- Some uses cannot be marked: an operation of unknown dependence (a callback, a call whose backward
  rule couples elements and is nonlinear), and a product in a loop that cannot be unrolled.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..._etrace_op.marked import is_marked
from ..._jax import OWN_DERIVATIVE, Atom, Equation, Var, is_var
from ..._jaxpr import loop_of
from ..._jaxpr.dataflow import BOTTOM, CONSTANT, ELEMENTWISE, IN_ORDER
from ..core.analysis import Analysis
from ..core.back_through import CUT, back_from_outputs
from .parametric_uses import LOOPS, ParametricUses
from .products import (
    Dense,
    Product,
    is_outer,
    is_sum_with_weights,
    low_rank,
    product_of,
    with_one_output,
)

MOVES = (IN_ORDER - CONSTANT) | {"broadcast_in_dim", "tile"}
"""Equations that may separate an elementwise mark from the data."""

REORDERS = frozenset({"rev", "transpose"})
"""Equations that may do so as well if several variables share a mark."""


@dataclasses.dataclass(frozen=True)
class Bias:
    """A parameter-derived variable that is the bias of a product.

    Attributes
    ----------
    total
        Index of the equation that adds it.
    operand
        Index of the product among the operands of that equation.
    var, axes
        The variable, and the axes of the sum that its own axes correspond to.
    outputs
        The axes of the sum that come from the weight.
    moves
        Equations before the sum that transpose the product, or multiply it by one.
    """

    total: int
    operand: int
    var: Var
    axes: tuple[int, ...]
    outputs: tuple[int, ...]
    moves: tuple[int, ...]


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
    products, biases
        Products, and the biases of some of them.
    inner
        Products that are a part of another one: the first of two in a row.
    elementwise
        Operands with an elementwise mark.
    sources
        For each variable of such an operand, the variable at which its mark is placed.
    unmarked
        Operands that cannot be marked.
    """

    products: dict[int, Product] = dataclasses.field(default_factory=dict)
    biases: dict[int, Bias] = dataclasses.field(default_factory=dict)
    inner: set[int] = dataclasses.field(default_factory=set)
    elementwise: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sources: dict[Var, Var] = dataclasses.field(default_factory=dict)
    unmarked: list[Unmarked] = dataclasses.field(default_factory=list)


def mark_plan(uses: ParametricUses, unroll_limit: int) -> MarkPlan:
    """Plan the marks of a program whose loops are unrolled as far as possible.

    Wanted results that are parameter-derived are marked, too.
    """
    program, plan = uses.program, MarkPlan()
    totals = set[int]()
    for index, operands in uses:
        equation = program.equations[index]
        if index in totals or is_marked(equation):
            continue
        product = product_of(equation, operands, uses.times)
        if is_sum_with_weights(equation, operands) and equation.outvars[0] in uses.broadcast:
            product = with_one_output(equation, operands)
        if isinstance(product, str):
            plan.unmarked.append(Unmarked(equation, operands, product))
        elif product is not None:
            totals.update(_planned(uses, plan, index, product))
        elif is_spelled_out(uses, index, operands):
            plan.unmarked.append(Unmarked(equation, operands, _why_closed(equation, unroll_limit)))
        elif _is_noisy_weight(uses, equation):
            plan.unmarked.append(Unmarked(equation, operands, NOISY))
        else:
            passed = tuple(i for i in operands if _passes(uses.analysis, equation, i))
            if passed:
                plan.elementwise[index] = passed
            if passed != operands:
                others = tuple(i for i in operands if i not in passed)
                is_call = equation.primitive.name in OWN_DERIVATIVE
                reason = NOT_LINEAR if is_call else OPAQUE
                plan.unmarked.append(Unmarked(equation, others, reason))
    used = [
        program.equations[i].invars[k] for i, marked in plan.elementwise.items() for k in marked
    ]
    plan.sources.update(sources_of(uses, [*used, *uses.results]))
    return plan


OPAQUE = (
    "the compiler cannot follow single elements through this operation, or each reaches several"
)


NOT_LINEAR = (
    "it has a custom backward rule, which is not proportional to the incoming gradient, or which "
    "JAX cannot transpose"
)


NOISY = (
    "its other summand, such as noise, has no derivative, and an operation that couples elements "
    "reads the sum. Call `braintrace.matmul` (or `conv`) with the parameter alone, and add the "
    "product with the other summand"
)


def _planned(uses: ParametricUses, plan: MarkPlan, index: int, product: Product) -> set[int]:
    """Plan the mark of a product, and return the other equations that it covers."""
    if isinstance(product, Dense):
        equation = uses.program.equations[index]
        below = _below(uses, plan, equation.invars[1 - product.weight])
        both = None if below is None else low_rank(plan.products[below], product)
        if below is not None and both is not None:
            del plan.products[below]
            plan.inner.add(below)
            product = both
    plan.products[index] = product
    bias = _bias(uses, index, product)
    if bias is None:
        return set()
    plan.biases[index] = bias
    return {bias.total}


def sources_of(uses: ParametricUses, used: Iterable[Var]) -> dict[Var, Var]:
    """Return the variable at which the elementwise mark of each variable is placed.

    Variables that are computed elementwise from one another, or from the same variable, share one
    mark: a decay and one minus the decay, for example. Copies of a marked variable stay after the
    mark.
    """
    chains = {var: _chain(uses, var) for var in used}
    ends = Counter(chain[-1] for chain in chains.values())
    passing = Counter(var for chain in chains.values() for var in chain)
    sources = {}
    for var, chain in chains.items():
        common = next(link for link in chain if passing[link] == ends[chain[-1]])
        sources[var] = _source_of_moves(uses, common)
    return sources


def _chain(uses: ParametricUses, var: Var) -> list[Var]:
    """Return a variable and its elementwise ancestors, the nearest first."""
    chain = [var]
    while (before := _before(uses, chain[-1])) is not None:
        chain.append(before)
    return chain


def _before(uses: ParametricUses, var: Var) -> Var | None:
    """Return the only parameter-derived operand of an elementwise function or copy."""
    equation = uses.maker(var)
    if equation is None:
        return None
    operands = {atom for atom in equation.invars if uses.is_parametric(atom)}
    if len(operands) != 1:
        return None
    (operand,) = operands
    name = equation.primitive.name
    is_alike = name in ELEMENTWISE and operand.aval.shape == var.aval.shape
    return operand if is_alike or name in REORDERS or _only_moves(equation) else None


def _source_of_moves(uses: ParametricUses, var: Var) -> Var:
    """Return the smallest variable that another is copied from, with the fewest axes."""
    best = var
    while True:
        equation = uses.maker(var)
        if equation is None or not _only_moves(equation):
            return best
        if not uses.is_parametric(equation.invars[0]):
            return best
        var = equation.invars[0]
        if (var.aval.size, var.aval.ndim) < (best.aval.size, best.aval.ndim):
            best = var


def _only_moves(equation: Equation) -> bool:
    is_move = equation.primitive.name in MOVES and len(equation.invars) == 1
    return is_move and bool(equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype)


def _below(uses: ParametricUses, plan: MarkPlan, x: Atom) -> int | None:
    """Return the product without a bias whose result only this input reads."""
    index = uses.program.producer.get(x) if is_var(x) else None
    is_alone = is_var(x) and uses.only_reader(x) is not None
    return index if is_alone and index in plan.products and index not in plan.biases else None


def _bias(uses: ParametricUses, index: int, product: Product) -> Bias | None:
    """Return the bias added right after a product, along its weight's own axes.

    The product may be transposed before, as ``jax.vmap`` does, or multiplied by one, as units are.
    """
    program, outputs = uses.program, product.outputs
    moves: list[int] = []
    if outputs is None:
        return None
    while True:
        (y,) = program.equations[index].outvars
        reader = uses.only_reader(y)
        if reader is None:
            return None
        index, operand = reader
        equation = program.equations[index]
        if equation.primitive.name == "transpose":
            outputs = tuple(map(equation.params["permutation"].index, outputs))
        elif not _multiplies_by_one(equation):
            break
        moves.append(index)
    if equation.primitive.name not in ("add", "add_any"):
        return None
    if equation.outvars[0].aval.shape != y.aval.shape:
        return None
    vector = uses.along(equation.invars[1 - operand], outputs)
    return None if vector is None else Bias(index, operand, *vector, outputs, tuple(moves))


def _multiplies_by_one(equation: Equation) -> bool:
    numbers = [atom.val for atom in equation.invars if not is_var(atom)]
    return equation.primitive.name == "mul" and len(numbers) == 1 and bool(np.all(numbers[0] == 1))


def _is_noisy_weight(uses: ParametricUses, equation: Equation) -> bool:
    """Test whether an equation adds a weight and data without a derivative."""
    if equation.primitive.name not in ("add", "add_any", "sub"):
        return False
    summands = [atom for atom in equation.invars if not uses.is_parametric(atom)]
    if not uses.analysis.gradient_ancestors(summands).isdisjoint(uses.program.in_vars):
        return False
    reader = uses.only_reader(equation.outvars[0])
    while reader is not None:
        index, operand = reader
        equation = uses.program.equations[index]
        if equation.primitive.name not in REORDERS and not _only_moves(equation):
            return back_from_outputs(uses.analysis.constants, equation)[operand] is CUT
        reader = uses.only_reader(equation.outvars[0])
    return False


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
    that     differ between them.
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

"""Backward transfer of unit ids through one equation.

Ids are integer arrays of a variable's shape. They contain the hidden unit that each element
reaches, or a code: `BOTTOM`, `TOP` (several units, by different uses of a variable) or `BROADCAST`
(several units, by a broadcast). Ids flow as labels from the cotangents of results to the operands'
cotangents (`flows_back`).

If an element of an operand reaches several units through one equation, the forward direction
decides between two cases. It is a broadcast if each element of the results depends on one element
of this operand and on no other operand. Otherwise the operand is `CUT`: the equation couples
elements, or combines them with another operand.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from .._etrace_op.registry import is_marked
from .._graph.hidden_group import Ids as Ids
from .._jax import OWN_BACKWARD, Equation, Var
from .._jaxpr.dataflow import Question, flows_of_results
from .._jaxpr.evaluate import Constants
from .._jaxpr.lattices import BOTTOM, TOP, Flow, Labels, Lattice, everything, joined, spread
from .._jaxpr.primitives import ELEMENTWISE
from .._jaxpr.vjp import flows_back, vjp_of

BROADCAST = -3  # several units, by a broadcast


class _Cut:
    """The contribution of an operand that reaches the state through coupling."""

    def __repr__(self) -> str:
        return "CUT"


CUT: Final = _Cut()

Contribution: TypeAlias = Ids | _Cut | None

_LABEL_OF_BROADCAST, _LABEL_OF_TOP = np.iinfo(np.int32).max - 1, np.iinfo(np.int32).max - 2
"""The codes `BROADCAST` and `TOP` as labels, while they flow."""


def back_through(
    constants: Constants,
    equation: Equation,
    out_ids: Sequence[Ids | None],
    writes_anywhere: bool = False,
) -> list[Contribution]:
    """Return the ids of every operand of an equation, given those of its results.

    An operand that receives no derivative has ``None``. With ``writes_anywhere``, what is written
    at an index that data choose, into any slot of a ring buffer, is a broadcast.
    """
    labels = [*map(_as_labels, out_ids)]
    flows = flows_back(Labels(), constants, equation, labels)
    if flows is None:  # the dependence of elements is unknown
        return [CUT] * len(equation.invars)
    if equation.primitive.name in ELEMENTWISE:
        same = zip(labels, out_ids, strict=True)
        unchanged = {id(flow): ids for flow, ids in same if flow is not None}
        return [unchanged[id(f)] if id(f) in unchanged else _as_ids(f) for f in flows]
    is_alone = (writes_anywhere and is_write(equation)) or sum(
        flow is not None for flow in flows
    ) == 1
    return [
        CUT if _is_cut(constants, equation, i, flow, is_alone) else _as_ids(flow)
        for i, flow in enumerate(flows)
    ]


def is_write(equation: Equation) -> bool:
    """Test whether an equation writes values to places of its first operand."""
    return bool(equation.primitive.name.startswith(("scatter", "dynamic_update_slice")))


def _as_labels(ids: Ids | None) -> Flow:
    if ids is None or _lowest(ids) == BOTTOM:
        return ids
    labels = np.where(ids == BROADCAST, _LABEL_OF_BROADCAST, ids)
    return np.where(ids == TOP, _LABEL_OF_TOP, labels).astype(np.int32)


def _as_ids(labels: Flow) -> Ids | None:
    """Convert labels to ids; several labels that are not cut are a broadcast."""
    if labels is None or (_lowest(labels) != TOP and _highest(labels) < _LABEL_OF_TOP):
        return labels
    ids = np.where((labels == TOP) | (labels == _LABEL_OF_BROADCAST), BROADCAST, labels)
    return np.where(labels == _LABEL_OF_TOP, TOP, ids).astype(np.int32)


def _is_cut(
    constants: Constants, equation: Equation, operand: int, flow: Flow, is_alone: bool
) -> bool:
    if flow is None:
        return False
    is_mixed = _lowest(flow) == TOP
    if not is_mixed and _highest(flow) != _LABEL_OF_BROADCAST:
        return False
    return (is_mixed and not is_alone) or couples(constants, equation, operand)


def _lowest(labels: np.ndarray) -> int:
    return int(np.min(labels, initial=BOTTOM))


def _highest(labels: np.ndarray) -> int:
    return int(np.max(labels, initial=BOTTOM))


def couples(constants: Constants, equation: Equation, operand: int) -> bool:
    """Test whether an element of the results depends on several of an operand."""
    flows = reached_elements(constants, equation, operand)
    return any(flow is not None and bool(np.any(flow == TOP)) for flow in flows)


def reached_elements(constants: Constants, equation: Equation, operand: int) -> Sequence[Flow]:
    """Return the element of an operand that each element of the results depends on."""
    operands: list[Flow] = [None] * len(equation.invars)
    operands[operand] = numbered(equation.invars[operand])
    return flows_of_results(SOURCES, constants, equation, operands)


def numbered(var: Var) -> Ids:
    """Return a number for every element of a variable."""
    return np.arange(var.aval.size, dtype=np.int32).reshape(var.aval.shape)


def through_derivative(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Return the flows of results along the derivative of an equation.

    A function with a custom derivative need not depend on its operands as its body does. A
    surrogate gradient may pass a derivative where the value passes none, and a custom rule may
    couple elements that the value does not couple.
    """
    return [_of_output(lattice, equation, operands, k) for k in range(len(equation.outvars))]


def _of_output(lattice: Lattice, equation: Equation, operands: Sequence[Flow], output: int) -> Flow:
    var = equation.outvars[output]
    cotangents: list[Flow] = [None] * len(equation.outvars)
    cotangents[output] = numbered(var)
    reached = vjp_of(equation).flows(Labels(), None, equation.invars, cotangents)
    results: list[Flow] = []
    for operand, flow in enumerate(operands):
        targets = None if reached is None else reached[operand]
        if flow is None or (targets is None and reached is not None):
            continue
        if targets is None or np.any(targets == TOP):
            one = everything(lattice, [flow])
            results.append(one if one is None else spread(lattice, one, var.aval.shape))
        else:
            results.append(lattice.put(lattice.empty(var.aval.shape), targets, flow))
    return joined(lattice, results)


def _special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
    """Follow custom forward derivatives; end at custom VJPs and at ETP operations."""
    if equation.primitive.name == "custom_jvp_call":
        return through_derivative(Labels(), equation, operands)
    if equation.primitive.name in OWN_BACKWARD or is_marked(equation):
        return [np.full(var.aval.shape, TOP, np.int32) for var in equation.outvars]
    return None


SOURCES = Question(Labels(), derivatives=True, special=_special)
"""The element that each element depends on, by the derivatives of ordinary operations."""

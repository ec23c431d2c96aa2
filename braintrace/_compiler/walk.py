"""Backward walk from a hidden state: the elements that reach each of its units.

A walk starts at the new value of one hidden state. It carries the unit ids of the elements backward
through the equations, to the outputs of ETP operations and to the old hidden states. Ids contain
the unit that each element reaches, or a code: `BOTTOM`, `TOP` (several units, by different uses of
a variable) or `BROADCAST` (several units, by a broadcast). If an operand reaches the state through
coupled elements, this one use of the operand is a *cut*: in the transition ``D`` and in ``Df`` its
value is held constant. An *opaque* ETP operation ends the walk; a transparent one, such as an
elementwise weight, also passes the ids on.

An element of an old state that moves to another unit is coupling as well. The *origin* of a
variable's elements detects it: the unit that they depend on, as the labels of `Units` say.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._graph.hidden_group import Cut, Ids
from .._jax import Equation, Var
from .._jaxpr.dataflow import BOTTOM, TOP, Flow, Labels, merge
from .._jaxpr.primitives import ELEMENTWISE, Constants
from .._jaxpr.program import carries_derivative
from .._jaxpr.vjp import flows_back
from .analysis import Analysis, couples

BROADCAST = -3  # several units, by a broadcast

_LABEL_OF_BROADCAST, _LABEL_OF_TOP = np.iinfo(np.int32).max - 1, np.iinfo(np.int32).max - 2
"""The codes `BROADCAST` and `TOP` as labels, while they flow."""

_ELSEWHERE, _ANY = -9, -10
"""The origin of old states that have no element in the walk's units, and an unknown origin."""

_Use: TypeAlias = tuple[Cut, Ids]
"""A use of a variable, and the ids that the variable receives through it."""


class Walk:
    """A walk back from new hidden states to all their ancestors.

    Parameters
    ----------
    analysis
        Analysis of the program.
    start
        Ids of the variables at which the walk starts.
    labels
        The units that the elements of variables depend on, by the numbers of `Units`.
    place
        The id of each of these units; `BOTTOM`: it is in another group.
    stops
        Variables at which the walk stops: new values of other groups.
    writes_anywhere
        See `back_through`.

    Attributes
    ----------
    ids
        Unit ids of every variable that reaches the state elementwise.
    cuts
        The uses of variables that are held constant.
    roots
        Variables at which a broadcast from fewer elements begins.
    weights_met
        Equations of the opaque operations at which the walk ended.
    states_met
        Variables of ``stops`` that the walk reached, each with an equation that reads it.
    """

    def __init__(
        self,
        analysis: Analysis,
        start: Mapping[Var, Ids],
        labels: Mapping[Var, Ids],
        place: np.ndarray,
        stops: frozenset[Var] = frozenset(),
        writes_anywhere: bool = False,
    ) -> None:
        self._analysis, self._labels, self._place = analysis, labels, place
        self.stops, self._writes_anywhere = stops, writes_anywhere
        self.ids, self.cuts, self.roots = dict(start), set[Cut](), list[Var]()
        self.weights_met, self.states_met = list[int](), list[tuple[int, Var]]()
        # The uses through which a variable has received ids, until all its readers are visited.
        self._received: dict[Var, list[_Use]] = {}
        for index in analysis.program.backward(start, self._received):
            self._go_through(index)
        for var in list(self._received):
            self._settle(var)
        for var in stops:
            self.ids.pop(var, None)

    def _go_through(self, index: int) -> None:
        """Give the operands of an equation the ids that they receive through it."""
        equation = self._analysis.program.equations[index]
        for var in equation.outvars:
            self._settle(var)
        out_ids = [None if v in self.stops else self.ids.get(v) for v in equation.outvars]
        if all(ids is None for ids in out_ids):
            return
        role = self._analysis.roles.get(index)
        if role == "opaque":
            self.weights_met.append(index)
            return
        received, cut = [out_ids[0], *[None] * (len(equation.invars) - 1)], list[int]()
        if role != "transparent":
            constants = self._analysis.constants
            received, cut = back_through(constants, equation, out_ids, self._writes_anywhere)
        pairs = [*zip(equation.invars, received, strict=True)]
        own = [ids if carries_derivative(atom) else None for atom, ids in pairs]
        if _begins_fan_out(own, out_ids):
            self.roots.extend(equation.outvars)
        for operand, (atom, ids) in enumerate(zip(equation.invars, own, strict=True)):
            if ids is not None and np.any(ids != BOTTOM):
                self._received.setdefault(atom, []).append((Cut(index, operand), ids))
        moving = (operand for operand in cut if carries_derivative(equation.invars[operand]))
        self.cuts.update(Cut(index, operand) for operand in moving)

    def _settle(self, var: Var) -> None:
        """Determine the ids of a variable when all its uses are known."""
        if var in self.ids or var not in self._received:
            return
        in_place, moved = _parted(self._received.pop(var), self._origin_of(var))
        if not in_place and self._is_followed(var, moved):
            in_place, moved = moved, []
        if not moved and var in self._labels:
            # Of the uses of an old state that reach different units, the one in order counts.
            in_place, moved = _in_order(in_place)
        self.cuts.update(use for use, _ in moved)
        if not in_place:
            return
        self.ids[var] = _merged(in_place)
        if var in self.stops:
            self.states_met.extend((use.equation, var) for use, _ in in_place)

    def _is_followed(self, var: Var, uses: Sequence[_Use]) -> bool:
        """Return whether a moved old state is cut further back, nearer to the state itself.

        Values that join it on the way, such as an input, reach the units without a move.
        """
        is_computed = var in self._analysis.program.producer and var not in self.stops
        return is_computed and all(np.array_equal(ids, uses[0][1]) for _, ids in uses)

    def _origin_of(self, var: Var) -> Ids | None:
        """Return the unit that each element of a variable depends on."""
        labels = self._labels.get(var)
        if labels is None:
            return None
        numbers = np.where(labels >= 0, self._place[labels], _ANY)
        is_computed = var in self._analysis.program.producer
        return np.where(numbers == BOTTOM, _ANY if is_computed else _ELSEWHERE, numbers)


def _begins_fan_out(received: Sequence[Ids | None], out_ids: Sequence[Ids | None]) -> bool:
    made = [ids for ids in received if not any(ids is own for own in out_ids)]
    return _has_broadcast(made) and not _has_broadcast(out_ids)


def _has_broadcast(every: Sequence[Ids | None]) -> bool:
    return any(ids is not None and bool(np.any(ids == BROADCAST)) for ids in every)


def _in_order(uses: list[_Use]) -> tuple[list[_Use], list[_Use]]:
    """Separate the uses that reach other units than a use in order does."""
    whole = (ids for _, ids in uses if np.array_equal(ids.ravel(), np.arange(ids.size)))
    return _parted(uses, next(whole, None))


def _parted(uses: Sequence[_Use], expected: Ids | None) -> tuple[list[_Use], list[_Use]]:
    """Separate the uses that reach other units than expected."""
    kept, moved = list[_Use](), list[_Use]()
    for use, ids in uses:
        differs = expected is not None and ids is not expected
        is_moved = differs and np.any((ids != BOTTOM) & (expected != _ANY) & (expected != ids))
        (moved if is_moved else kept).append((use, ids))
    return kept, moved


def _merged(uses: Sequence[_Use]) -> Ids:
    return functools.reduce(merge, (ids for _, ids in uses))


# --- one equation


def back_through(
    constants: Constants,
    equation: Equation,
    out_ids: Sequence[Ids | None],
    writes_anywhere: bool = False,
) -> tuple[list[Ids | None], list[int]]:
    """Return the ids of every operand of an equation, given those of its results, and its cuts.

    If an element of an operand reaches several units, the forward direction decides between two
    cases. It is a broadcast if each element of the results depends on one element of this operand
    and on no other operand. Otherwise the operand is cut: the equation couples elements, or
    combines them with another operand. With ``writes_anywhere``, what is written at an index that
    data choose, into any slot of a ring buffer, is a broadcast.
    """
    labels, every = [*map(_as_labels, out_ids)], range(len(equation.invars))
    flows = flows_back(Labels(), constants, equation, labels)
    if flows is None:  # the dependence of elements is unknown
        return [None] * len(every), [*every]
    if equation.primitive.name in ELEMENTWISE:
        same = zip(labels, out_ids, strict=True)
        unchanged = {id(flow): ids for flow, ids in same if flow is not None}
        return [unchanged[id(f)] if id(f) in unchanged else _as_ids(f) for f in flows], []
    is_alone = (writes_anywhere and is_write(equation)) or sum(
        flow is not None for flow in flows
    ) == 1
    cut = [i for i in every if _is_cut(constants, equation, i, flows[i], is_alone)]
    return [None if i in cut else _as_ids(flows[i]) for i in every], cut


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

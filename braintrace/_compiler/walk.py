"""Backward walk from a hidden state: the elements that reach each of its units.

A walk starts at the new value of one hidden state. It carries the unit ids of the elements backward
through the equations (see `back_through`), to the outputs of ETP operations and to the old hidden
states. If an operand reaches the state through coupled elements, this one use of the operand is a
*cut*: in the transition ``D`` and in ``Df`` its value is held constant.

An element of an old state that moves to another unit is coupling as well. The *origin* of a
variable's elements detects it: the unit that they depend on, as the labels of `Units` say.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._graph.hidden_group import Cut
from .._jax import Var
from .._jaxpr.lattices import BOTTOM, merge
from .._jaxpr.program import carries_derivative
from .analysis import Analysis
from .back_through import BROADCAST, CUT, Contribution, Ids, back_through

_ELSEWHERE, _ANY = -9, -10
"""The origin of old states that have no element in the walk's units, and an unknown origin."""

_Use: TypeAlias = tuple[Cut, Ids]
"""A use of a variable, and the ids that the variable receives through it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """A walk back from new hidden states; see `walk_back`.

    Attributes
    ----------
    analysis, labels, place, stops, writes_anywhere
        The parameters of `walk_back`.
    ids
        Unit ids of every variable that reaches the state elementwise.
    received
        The uses through which a variable has received ids, until all its readers are visited.
    cuts
        The uses of variables that are held constant.
    roots
        Variables at which a broadcast from fewer elements begins.
    weights_met
        Equations of the opaque operations at which the walk ended.
    states_met
        Variables of ``stops`` that the walk reached, each with an equation that reads it.
    """

    analysis: Analysis
    labels: Mapping[Var, Ids]
    place: np.ndarray
    stops: frozenset[Var]
    writes_anywhere: bool
    ids: dict[Var, Ids]
    received: dict[Var, list[_Use]] = dataclasses.field(default_factory=dict)
    cuts: set[Cut] = dataclasses.field(default_factory=set)
    roots: list[Var] = dataclasses.field(default_factory=list)
    weights_met: list[int] = dataclasses.field(default_factory=list)
    states_met: list[tuple[int, Var]] = dataclasses.field(default_factory=list)

    def go_through(self, index: int) -> None:
        """Give the operands of an equation the ids that they receive through it."""
        equation = self.analysis.program.equations[index]
        for var in equation.outvars:
            self.settle(var)
        out_ids = [None if v in self.stops else self.ids.get(v) for v in equation.outvars]
        if all(ids is None for ids in out_ids):
            return
        role = self.analysis.roles.get(index)
        if role == "opaque":
            self.weights_met.append(index)
            return
        received: Sequence[Contribution]
        if role == "transparent":
            received = [out_ids[0], *[None] * (len(equation.invars) - 1)]
        else:
            constants = self.analysis.constants
            received = back_through(constants, equation, out_ids, self.writes_anywhere)
        contributions = [
            contribution if carries_derivative(atom) else None
            for atom, contribution in zip(equation.invars, received, strict=True)
        ]
        if _begins_fan_out(contributions, out_ids):
            self.roots.extend(equation.outvars)
        for operand, (atom, contribution) in enumerate(
            zip(equation.invars, contributions, strict=True)
        ):
            if contribution is CUT:
                self.cuts.add(Cut(index, operand))
            elif isinstance(contribution, np.ndarray) and np.any(contribution != BOTTOM):
                self.received.setdefault(atom, []).append((Cut(index, operand), contribution))

    def settle(self, var: Var) -> None:
        """Determine the ids of a variable when all its uses are known."""
        if var in self.ids or var not in self.received:
            return
        in_place, moved = _parted(self.received.pop(var), self._origin_of(var))
        if not in_place and self._is_followed(var, moved):
            in_place, moved = moved, []
        if not moved and var in self.labels:
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
        is_computed = var in self.analysis.program.producer and var not in self.stops
        return is_computed and all(np.array_equal(ids, uses[0][1]) for _, ids in uses)

    def _origin_of(self, var: Var) -> Ids | None:
        """Return the unit that each element of a variable depends on."""
        labels = self.labels.get(var)
        if labels is None:
            return None
        numbers = np.where(labels >= 0, self.place[labels], _ANY)
        is_computed = var in self.analysis.program.producer
        return np.where(numbers == BOTTOM, _ANY if is_computed else _ELSEWHERE, numbers)


def walk_back(
    analysis: Analysis,
    start: Mapping[Var, Ids],
    labels: Mapping[Var, Ids],
    place: np.ndarray,
    stops: frozenset[Var] = frozenset(),
    writes_anywhere: bool = False,
) -> Walk:
    """Carry unit ids from new hidden states to all their ancestors.

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
    """
    walk = Walk(analysis, labels, place, stops, writes_anywhere, dict(start))
    for index in analysis.program.backward(start, walk.received):
        walk.go_through(index)
    for var in list(walk.received):
        walk.settle(var)
    for var in stops:
        walk.ids.pop(var, None)
    return walk


def _begins_fan_out(contributions: Sequence[Contribution], out_ids: Sequence[Ids | None]) -> bool:
    made = [c for c in contributions if not any(c is ids for ids in out_ids)]
    after = any(isinstance(c, np.ndarray) and np.any(c == BROADCAST) for c in made)
    return after and not any(ids is not None and np.any(ids == BROADCAST) for ids in out_ids)


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

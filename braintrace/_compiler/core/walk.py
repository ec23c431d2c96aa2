"""Which elements reach which hidden position.

A walk starts at the new value of one hidden state, whose elements are its positions, and
carries the position ids backward through the equations (see `back_through`) to the outputs of the
marked operations and to the old hidden states. Where an operand reaches the state through
mixing of positions, that one use of it is *cut*: in the transition ``D`` and in ``Df`` its
value is held constant.

An element that an old state's element has moved to another position is mixing as well. It
is recognised by the *origin* of a variable's elements: the position of the old hidden state
that they come from, carried forward.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ..._graph import Cut
from ..._jax import Var, is_var
from ..._jaxpr import Program, carries_derivative
from ..._jaxpr.dataflow import MIXED, NONE, merge
from .analysis import Analysis, Origin
from .back_through import CUT, MANY, Contribution, Ids, back_through

COPIES = frozenset({"copy", "copy_p"})

_ELSEWHERE: Ids = np.full((), -9, np.int32)
"""The origin of old states that are at none of the walk's positions."""

_Use: TypeAlias = tuple[Cut, Ids]
"""A use of a variable, and the ids that the variable receives through it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """What a walk found.

    Attributes
    ----------
    ids
        Position ids of every variable that reaches the state position by position.
    cuts
        The uses of variables that are held constant.
    roots
        Variables at which a broadcast from fewer elements begins.
    shared
        Variables of which two uses reach different positions.
    weights_met
        Equations of the opaque operations at which the walk ended.
    states_met
        Variables behind which it did not look, and an equation that reads each.
    """

    ids: Mapping[Var, Ids]
    cuts: tuple[Cut, ...]
    roots: tuple[Var, ...]
    shared: tuple[Var, ...]
    weights_met: tuple[int, ...]
    states_met: tuple[tuple[int, Var], ...]


def walk_back(
    analysis: Analysis,
    start: Mapping[Var, Ids],
    stops: frozenset[Var] = frozenset(),
    origin: Origin | None = None,
    elsewhere: frozenset[Var] = frozenset(),
) -> Walk:
    """Carry position ids from new hidden states to everything that they depend on.

    Parameters
    ----------
    analysis
        Of the program.
    start
        Ids of the variables at which the walk starts.
    stops
        Variables behind which it does not look: new values of other groups.
    origin
        Where elements come from, in the same positions; ``None``: there are no old states.
    elsewhere
        Old states that are at none of these positions.
    """
    walk = _WalkUnderWay(analysis, start, stops, origin, elsewhere)
    for index in _backward(analysis.program, start, walk.received):
        walk.go_through(index)
    return walk.at_its_end()


def _backward(
    program: Program, start: Iterable[Var], received: Mapping[Var, Sequence[_Use]]
) -> Iterator[int]:
    """Yield the equations that make what the walk has reached, the last of them first."""
    queued: set[int] = set()
    pending: list[int] = []

    def queue(reached: Iterable[Var]) -> None:
        for var in reached:
            index = program.producer.get(var)
            if index is not None and index not in queued:
                queued.add(index)
                heapq.heappush(pending, -index)

    queue(start)
    while pending:
        index = -heapq.heappop(pending)
        yield index
        queue(a for a in program.equations[index].invars if is_var(a) and a in received)


class _WalkUnderWay:
    """A walk, and what it has found so far; the parameters are those of `walk_back`.

    Attributes
    ----------
    received
        The uses through which a variable has received ids, until all of its readers are passed.
    """

    def __init__(
        self,
        analysis: Analysis,
        start: Mapping[Var, Ids],
        stops: frozenset[Var],
        origin: Origin | None,
        elsewhere: frozenset[Var],
    ) -> None:
        self._analysis, self._stops = analysis, stops
        self._origin, self._elsewhere = origin, elsewhere
        self.received: dict[Var, list[_Use]] = {}
        self._ids: dict[Var, Ids] = dict(start)
        self._cuts: set[Cut] = set()
        self._roots: list[Var] = []
        self._shared: list[Var] = []
        self._weights_met: list[int] = []
        self._states_met: list[tuple[int, Var]] = []

    def go_through(self, index: int) -> None:
        """Give the operands of an equation the ids that they receive through it."""
        equation = self._analysis.program.equations[index]
        for var in equation.outvars:
            self._settle(var)
        out_ids = [None if v in self._stops else self._ids.get(v) for v in equation.outvars]
        if all(ids is None for ids in out_ids):
            return
        role = self._analysis.roles.get(index)
        if role == "opaque":
            self._weights_met.append(index)
            return
        received: Sequence[Contribution]
        if role == "transparent":
            received = [out_ids[0], *[None] * (len(equation.invars) - 1)]
        else:
            received = back_through(self._analysis.constants, equation, out_ids)
        contributions = [
            given if carries_derivative(atom) else None
            for atom, given in zip(equation.invars, received, strict=True)
        ]
        if _begins_fan_out(contributions, out_ids):
            self._roots.extend(equation.outvars)
        for operand, (atom, given) in enumerate(zip(equation.invars, contributions, strict=True)):
            if given is CUT:
                self._cuts.add(Cut(index, operand))
            elif isinstance(given, np.ndarray) and np.any(given != NONE):
                self.received.setdefault(atom, []).append((Cut(index, operand), given))

    def _settle(self, var: Var) -> None:
        """Find the ids of a variable when all of its uses are known."""
        if var in self._ids or var not in self.received:
            return
        kept, moved = _in_place(self.received.pop(var), self._origin_of(var))
        self._cuts.update(use for use, _ in moved)
        if not kept:
            return
        self._ids[var] = _merged(kept)
        if var in self._stops:
            self._states_met.extend((use.equation, var) for use, _ in kept)
        elif self._ids[var] is not kept[0][1]:  # else all uses reach the same positions
            self._settle_conflict(var, kept)

    def _origin_of(self, var: Var) -> Ids | None:
        if var in self._elsewhere:
            return _ELSEWHERE
        return None if self._origin is None else self._origin.of(var)

    def _settle_conflict(self, var: Var, uses: list[_Use]) -> None:
        """Take uses that reach different positions for a fan-out, or split the value.

        See `split_shared_uses`.
        """
        conflict = _conflict(self._ids[var], uses)
        if not np.any(conflict):
            return
        readers = [self._analysis.program.equations[use.equation] for use, _ in uses]
        if all(reader.primitive.name in COPIES for reader in readers):
            self._ids[var] = np.where(conflict, MANY, self._ids[var])
            self._roots.extend(out for reader in readers for out in reader.outvars)
        else:
            self._shared.append(var)

    def at_its_end(self) -> Walk:
        """Return what has been found when no equation is left."""
        for var in list(self.received):
            self._settle(var)
        return Walk(
            ids={var: found for var, found in self._ids.items() if var not in self._stops},
            cuts=tuple(sorted(self._cuts)),
            roots=tuple(self._roots),
            shared=tuple(self._shared),
            weights_met=tuple(self._weights_met),
            states_met=tuple(self._states_met),
        )


def _begins_fan_out(contributions: Sequence[Contribution], out_ids: Sequence[Ids | None]) -> bool:
    made = [c for c in contributions if not any(c is ids for ids in out_ids)]
    after = any(isinstance(c, np.ndarray) and np.any(c == MANY) for c in made)
    return after and not any(ids is not None and np.any(ids == MANY) for ids in out_ids)


def _in_place(uses: Sequence[_Use], origin: Ids | None) -> tuple[list[_Use], list[_Use]]:
    """Set apart the uses of a variable that move an old state to another position."""
    kept: list[_Use] = []
    rejected: list[_Use] = []
    for use, given in uses:
        moved = origin is not None and np.any(
            (origin != NONE) & (given != NONE) & (origin != given)
        )
        (rejected if moved else kept).append((use, given))
    return kept, rejected


def _merged(uses: Sequence[_Use]) -> Ids:
    return functools.reduce(merge, (given for _, given in uses))


def _conflict(merged: Ids, uses: Sequence[_Use]) -> np.ndarray:
    """Return where uses of a variable reach different positions, each of them one."""
    mixed = [given == MIXED for _, given in uses]
    return np.asarray((merged == MIXED) & ~np.any(mixed, axis=0))

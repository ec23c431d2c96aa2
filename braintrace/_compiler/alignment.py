"""State alignment: the units that elements of several hidden states share.

An element of one state belongs to the same unit as the element of another state that it reaches, or
is reached by, one to one. A state may have elements in a part of the units only. For example, a
vector of synapses of which one slice feeds one population and another slice the next has the units
of both populations.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from .._jax import Var
from .._jaxpr import BOTTOM
from .analysis import Analysis, Origin
from .back_through import Ids
from .candidates import Candidate, are_distinct, places_of
from .walk import Walk, walk_back

Reached = Callable[[int], Mapping[Var, Ids]]
"""``Reached(index of a state)``: the variables that reach the state, with ids of its elements."""


class SharedUnits:
    """Union-find over the elements of all states: one number for each unit.

    Parameters
    ----------
    candidates
        The states; each numbers its elements from zero.
    reached
        See `Reached`.
    """

    def __init__(self, candidates: Sequence[Candidate], reached: Reached) -> None:
        self._candidates = candidates
        starts = np.cumsum([0, *(c.count for c in candidates)])
        self._total = int(starts[-1])
        self._numbers = [
            np.arange(start, start + c.count) for start, c in zip(starts, candidates, strict=False)
        ]
        self._set_of = list(range(len(candidates)))
        for a, c, of_a, of_c in [*self._parts_of_one_state(), *self._shared(reached)]:
            self._join(a, c, of_a, of_c)

    def of(self, members: Sequence[int]) -> list[Candidate]:
        """Return some states with the numbers of their common units."""
        numbers = [self._numbers[a] for a in members]
        raw = [self._candidates[a] for a in members]
        if all(_equal(units, numbers[0]) for units in numbers[1:]):
            shape = next((c.leaf.shape for c in raw if c.slots is None), raw[0].shape)
            return [dataclasses.replace(candidate, shape=shape) for candidate in raw]
        every = np.flatnonzero(places_of(np.concatenate(numbers), self._total))
        wholes = [i for i, units in enumerate(numbers) if units.size == every.size]
        wholes.sort(key=lambda i: raw[i].slots is not None)
        shape = raw[wholes[0]].shape if wholes else (every.size,)
        order = numbers[wholes[0]] if wholes else every
        place = np.full(self._total + 1, BOTTOM, np.int32)
        place[order] = np.arange(order.size)
        aligned = []
        for candidate, units in zip(raw, numbers, strict=True):
            own = place[np.append(units, self._total)]  # the last one is for `BOTTOM`
            ids, old_ids = np.asarray(own[candidate.ids]), np.asarray(own[candidate.old_ids])
            aligned.append(dataclasses.replace(candidate, ids=ids, old_ids=old_ids, shape=shape))
        return aligned

    def sets(self) -> list[tuple[int, ...]]:
        """Return the sets of states that share units, as indices."""
        members: dict[int, list[int]] = {}
        for a, number in enumerate(self._set_of):
            members.setdefault(number, []).append(a)
        return [tuple(states) for states in members.values()]

    def _shared(self, reached: Reached) -> Iterator[tuple[int, int, Ids, Ids]]:
        """Yield ``(a, c, elements of a, elements of c)`` that share units.

        States of the same size that meet in any other way are aligned in order. Among several uses
        of a state, the walk then keeps the one that stays in place.
        """
        elements: dict[Var, list[tuple[int, Ids]]] = {}
        for i, own in enumerate(self._candidates):
            for var, ids in ((own.leaf.in_var, own.old_ids), (own.var, own.ids)):
                elements.setdefault(var, []).append((i, ids))
        otherwise = []
        for a, candidate in enumerate(self._candidates):
            found = (
                (ids, part) for var, ids in reached(a).items() for part in elements.get(var, ())
            )
            for ids, (c, places) in found:
                if self._candidates[c].leaf is candidate.leaf:
                    continue
                of_a, of_c = ids[places != BOTTOM], places[places != BOTTOM]
                is_whole = candidate.count == of_c.size
                if is_whole and _equal(of_a, of_c):
                    yield self._concatenated(a, c)
                    continue
                used = of_a != BOTTOM
                if np.all(of_a[used] >= 0) and are_distinct(of_a[used], candidate.count):
                    yield a, c, of_a[used], of_c[used]
                elif is_whole:
                    otherwise.append((a, c))
        for a, c in otherwise:
            yield self._concatenated(a, c)

    def _parts_of_one_state(self) -> Iterator[tuple[int, int, Ids, Ids]]:
        """Yield the slots of every State."""
        first: dict[Var, int] = {}
        for c, candidate in enumerate(self._candidates):
            if candidate.slots is not None:
                a = first.setdefault(candidate.leaf.in_var, c)
                own = candidate.slots.unit[candidate.old_ids != BOTTOM]
                of_first = candidate.slots.unit[self._candidates[a].old_ids != BOTTOM]
                place = np.empty(of_first.size, int)  # the first slot has an element of each unit
                place[of_first] = np.arange(of_first.size)
                yield a, c, place[own], np.arange(own.size)

    def _concatenated(self, a: int, c: int) -> tuple[int, int, Ids, Ids]:
        every = np.arange(self._candidates[a].count)
        return a, c, every, every

    def _join(self, a: int, c: int, of_a: Ids, of_c: Ids) -> None:
        """Give elements of one state the unit numbers of another state.

        States of one set stay as they are if two elements of one state would coincide: two vectors
        of synapses that feed the same populations meet in each of these.
        """
        if np.array_equal(self._numbers[a][of_a.ravel()], self._numbers[c][of_c.ravel()]):
            return
        if self._set_of.count(self._set_of[c]) > self._set_of.count(self._set_of[a]):
            a, c, of_a, of_c = c, a, of_c, of_a
        target, source = self._set_of[a], self._set_of[c]
        moved = [k for k, number in enumerate(self._set_of) if number == source]
        if of_a is of_c and moved == [c] != [a]:
            self._numbers[c] = self._numbers[a]
        else:
            renumbering = np.arange(self._total)
            renumbering[self._numbers[c][of_c.ravel()]] = self._numbers[a][of_a.ravel()]
            joined = {k: renumbering[self._numbers[k]] for k in moved}
            if all(are_distinct(numbers, self._total) for numbers in joined.values()):
                self._numbers = [joined.get(k, old) for k, old in enumerate(self._numbers)]
        self._set_of = [target if number == source else number for number in self._set_of]


def _equal(first: Ids, second: Ids) -> bool:
    return first is second or (
        first.size == second.size and bool(np.array_equal(first.ravel(), second.ravel()))
    )


@dataclasses.dataclass(frozen=True, eq=False)
class AlignedStates:
    """Some hidden states, aligned at their common units.

    Attributes
    ----------
    analysis
        Analysis of the step.
    states
        The states.
    origin
        The old element that each element of a variable comes from, for these states.
    elsewhere
        The old values of all other states.
    """

    analysis: Analysis
    states: Sequence[Candidate]
    origin: Origin
    elsewhere: frozenset[Var]

    def walk(self, state: Candidate, stops: frozenset[Var] = frozenset()) -> Walk:
        """Walk back from the new value of one of the states."""
        start = {state.var: state.ids}
        return walk_back(self.analysis, start, stops, self.origin, self.elsewhere)


class Alignment:
    """The hidden states of a step, and the units that some of them share.

    Parameters
    ----------
    analysis
        Analysis of the step.
    candidates
        Its hidden states; each numbers its elements from zero.
    """

    def __init__(self, analysis: Analysis, candidates: Sequence[Candidate]) -> None:
        self.analysis, self.candidates = analysis, candidates
        self._shared = SharedUnits(candidates, self._reached)
        self._aligned: dict[tuple[int, ...], AlignedStates] = {}

    def _reached(self, state: int) -> Mapping[Var, Ids]:
        alone = [self.candidates[state]]
        aligned = AlignedStates(self.analysis, alone, self._origin(alone), frozenset())
        return aligned.walk(alone[0]).ids

    def _origin(self, states: Sequence[Candidate]) -> Origin:
        # A walk visits no equation after the one that writes its state.
        last = max(self.analysis.program.producer[state.var] for state in states)
        starts: dict[Var, Ids] = {}
        for state in states:
            known = starts.get(state.leaf.in_var, state.old_ids)
            starts[state.leaf.in_var] = np.maximum(known, state.old_ids)
        return self.analysis.origin(starts, last)

    def sets(self) -> list[tuple[int, ...]]:
        """Return the sets of states that share units, as indices."""
        return self._shared.sets()

    def align(self, members: tuple[int, ...]) -> AlignedStates:
        """Return some states, aligned at their common units."""
        if members not in self._aligned:
            inside = self._shared.of(members)
            own = {state.leaf.in_var for state in inside}
            others = {c.leaf.in_var for c in self.candidates} - own
            self._aligned[members] = AlignedStates(
                self.analysis, inside, self._origin(inside), frozenset(others)
            )
        return self._aligned[members]

"""State alignment: the units that elements of several hidden states share.

An element of one state belongs to the same unit as the element of another state that it reaches, or
is reached by, one to one. A state may have elements in a part of the units only. For example, a
vector of synapses of which one slice feeds one population and another slice the next has the units
of both populations.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..._jax import Var
from ..._jaxpr import BOTTOM
from ..._typing import Path
from ..core.back_through import Ids
from ..core.candidates import Candidate, are_distinct, places_of

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
        starts = np.cumsum([0, *(c.old_ids.size for c in candidates)])
        self._total = int(starts[-1])
        self._numbers = [
            np.arange(start, start + c.old_ids.size)
            for start, c in zip(starts, candidates, strict=False)
        ]
        self._set_of = list(range(len(candidates)))
        for a, c, of_a, of_c in [*self._parts_of_one_state(), *self._shared(reached)]:
            self._join(a, c, of_a, of_c)

    def of(self, members: Sequence[int]) -> list[Candidate]:
        """Return some states with the numbers of their common units."""
        numbers = [self._numbers[a] for a in members]
        raw = [self._candidates[a] for a in members]
        if all(_equal(units, numbers[0]) for units in numbers[1:]):
            shape = raw[0].leaf.shape
            return [dataclasses.replace(candidate, shape=shape) for candidate in raw]
        every = np.flatnonzero(places_of(np.concatenate(numbers), self._total))
        whole = next((i for i, units in enumerate(numbers) if units.size == every.size), None)
        shape = (every.size,) if whole is None else raw[whole].leaf.shape
        order = every if whole is None else numbers[whole]
        place = np.full(self._total, BOTTOM, np.int32)
        place[order] = np.arange(order.size)
        aligned = []
        for candidate, units in zip(raw, numbers, strict=True):
            places = place[units].reshape(candidate.leaf.shape)
            ids = np.asarray(place[units][candidate.ids])  # an array also for a state without axes
            aligned.append(dataclasses.replace(candidate, ids=ids, old_ids=places, shape=shape))
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
        elements = {c.leaf.in_var: (i, c.old_ids) for i, c in enumerate(self._candidates)}
        elements |= {c.var: (i, c.ids) for i, c in enumerate(self._candidates)}
        otherwise = []
        for a, candidate in enumerate(self._candidates):
            for var, ids in reached(a).items():
                c, numbers = elements.get(var, (a, ids))
                if c == a:
                    continue
                if candidate.ids.size == numbers.size and _equal(ids, numbers):
                    yield self._concatenated(a, c)
                    continue
                used = ids != BOTTOM
                if np.all(ids[used] >= 0) and are_distinct(ids[used], candidate.ids.size):
                    yield a, c, ids[used], numbers[used]
                elif candidate.ids.size == numbers.size:
                    otherwise.append((a, c))
        for a, c in otherwise:
            yield self._concatenated(a, c)

    def _parts_of_one_state(self) -> Iterator[tuple[int, int, Ids, Ids]]:
        """Yield the components of every `HiddenGroupState`: they always share units."""
        first: dict[Path, int] = {}
        for c, candidate in enumerate(self._candidates):
            if candidate.leaf.component is not None:
                yield self._concatenated(first.setdefault(candidate.leaf.path, c), c)

    def _concatenated(self, a: int, c: int) -> tuple[int, int, Ids, Ids]:
        every = self._candidates[a].old_ids.ravel()
        return a, c, every, every

    def _join(self, a: int, c: int, of_a: Ids, of_c: Ids) -> None:
        """Give elements of one state the unit numbers of another state.

        States of one set stay as they are if two elements of one state would coincide: two vectors
        of synapses that feed the same populations meet in each of these.
        """
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

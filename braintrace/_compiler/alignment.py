"""Aligned hidden states, and the walks back from them."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .._jax import Var
from .analysis import Analysis, Origin
from .back_through import Ids
from .candidates import Candidate
from .shared_units import SharedUnits
from .walk import Walk, walk_back


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

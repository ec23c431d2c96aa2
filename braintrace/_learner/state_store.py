"""A `LearnerState` that the user gives, as a call reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import brainstate

from .._brainstate import is_in_loop
from .._checks import shown
from .._core.traces import Pairs, pack, unpack
from .._errors import OptionError
from .._graph import Traces
from .._runtime.carried_traces import Zero, is_settled, settled
from .._runtime.program import Changes, Take
from .._typing import PyTree
from .base import BaseLearner
from .learner_state import BY_PATH, FIELDS, LearnerState, Place, Places


class StateStore:
    """The `Store` of a state that the user gives.

    Parameters
    ----------
    learner, places
        The learner of the learner, and the places of all values.
    state
        The given state.
    pairs
        Traces that are packed before the call.
    """

    def __init__(
        self, learner: BaseLearner, places: Places, state: LearnerState, pairs: Pairs
    ) -> None:
        self.places = places
        self._learner, self._pairs = learner, pairs
        self._rule = state.rule
        self._fields: dict[str, Any] = {f: getattr(state, f) for f in FIELDS}

    @property
    def is_zero(self) -> bool:
        """See `Store`."""
        return isinstance(self._fields["traces"], Zero)

    @property
    def defers(self) -> bool:
        """See `Store`."""
        return not is_in_loop()

    def _take(self) -> tuple[Traces, bool]:
        return pack(settled(self._fields["traces"], self._learner.zero_traces), self._pairs), False

    @property
    def state(self) -> LearnerState:
        """The state: the given one, and after a call the new one."""
        return LearnerState(**self._fields, rule=self._rule)

    def values(self, states: Iterable[brainstate.State]) -> list[PyTree]:
        """See `Store`.

        Raises
        ------
        OptionError
            If a value is missing.
        """
        return [self._place(state).value_in(self._fields) for state in states]

    def _place(self, state: brainstate.State) -> Place:
        if id(state) not in self.places:
            raise OptionError(
                f"`step_fn` or `update_fn` uses a State that the state of the learner does not "
                f"have: {shown(state)} of {shown(state.value)}. Pass its holder under a name: "
                "`learner.functional(optimizer=optimizer)`."
            )
        return self.places[id(state)]

    def advance(
        self,
        written: Iterable[brainstate.State],
        run: Callable[[Take, list[Any]], None],
        settle: Callable[[Any], Changes],
        is_checked: bool = False,
    ) -> Any:
        """See `Store`."""
        done: list[Any] = []
        run(self._take, done)
        results, values, after = settle(done[0])
        self.write(written, values)
        if after is not None:
            self._fields["traces"] = unpack(after) if is_settled(after) else after
        return results

    def write(self, states: Iterable[brainstate.State], values: Iterable[PyTree]) -> None:
        """Write values of States, and leave the given state as it is."""
        fields = {f: dict(self._fields[f]) for f in BY_PATH}
        for state, value in zip(states, values, strict=True):
            if id(state) in self.places:
                place = self.places[id(state)]
                fields[place.field].update(place.entries(value))
        self._fields = {**fields, "traces": self._fields["traces"]}

    def initial(self) -> list[PyTree]:
        """Return the initial values of the short-term States; random keys advance."""
        states, function = self._learner.initial_function()
        written, fresh = function(self.values(states))
        new = [(s, v) for s, v in zip(states, written, strict=True) if v is not None]
        self.write([state for state, _ in new], [value for _, value in new])
        return [fresh[path] for path in self._learner.short_term_states]

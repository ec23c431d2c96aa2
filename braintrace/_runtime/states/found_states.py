"""The States of a model, found once.

A walk through a model takes longer than the rest of a call's Python code. It is repeated only if an
attribute holds another State than before, as after ``brainstate.nn.init_all_states``.
"""

from typing import Any

import brainstate

from .model_states import States, all_states


class FoundStates:
    """All States of a model by path; copies of an object that has this cache may share it."""

    def __init__(self) -> None:
        self._model: Any = None
        self._states: dict[Any, brainstate.State] = {}
        self._held: list[tuple[Any, Any, brainstate.State]] = []

    def __call__(self, model: brainstate.nn.Module) -> States:
        """Return the current States."""
        if model is not self._model or any(c.get(k) is not s for c, k, s in self._held):
            self._model, self._states = model, all_states(model)
            self._held = [(*_place(model, path), s) for path, s in self._states.items()]
        return self._states


def _place(model: Any, path: tuple[Any, ...]) -> tuple[dict[Any, Any], Any]:
    """Return the dict that holds a State, and its key there; a State in a list is not followed."""
    holder = vars(model)
    for part in path[:-1]:
        held = holder.get(part) if isinstance(holder, dict) else holder[part]
        holder = held if isinstance(held, (dict, list, tuple)) else vars(held)
    if isinstance(holder, dict):
        return holder, path[-1]
    return {0: holder[path[-1]]}, 0

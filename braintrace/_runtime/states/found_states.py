"""Cached search for the States of a model.

A walk through a model takes longer than the rest of a call's Python code. The walk is repeated only
if the contents of the model changed: the attributes of its modules, and the contents of lists,
tuples, dicts, sets, dataclasses and namespaces among them. They are compared by identity, which
also detects changed plain attributes. Only small NumPy arrays, which can change in place, are
compared by content.
"""

from collections.abc import Collection, Iterable
from operator import is_
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit

from ..environment.attributes import BY_VALUE, contents_of, fields_of
from .model_states import States, all_states

_PLAIN = (type(None), *BY_VALUE, np.ndarray, jax.Array, saiunit.Quantity, saiunit.Unit)
"""Types without States."""


class FoundStates:
    """All States of a model by path; copies of an object that has this cache may share it."""

    def __init__(self) -> None:
        self._last: _Found | None = None

    def __call__(self, model: brainstate.nn.Module) -> States:
        """Return the current States."""
        result = self._last
        if result is None or not result.are_of(model):
            result = self._last = _Found(model)
        return result.states

    @property
    def version(self) -> object:
        """An object that is replaced when the contents of the model change."""
        return None if self._last is None else self._last.version

    @property
    def members(self) -> Collection[int]:
        """Identities of the objects of the model: its modules, States and containers."""
        return () if self._last is None else self._last.members

    def __reduce__(self) -> tuple[type["FoundStates"], tuple[()]]:
        return FoundStates, ()


class _Found:
    """The States of a model, and the model's contents when they were found."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self.states = all_states(model)
        self.version = object()  # outlives this search in copies of an algorithm
        self._model = model
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._lists: list[tuple[list[Any] | set[Any], list[Any]]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        met: dict[int, Any] = {}
        is_understood = self._look_into(model, met)
        self.members = frozenset(met)
        self._is_understood = is_understood and all(id(s) in met for s in self.states.values())

    def are_of(self, model: brainstate.nn.Module) -> bool:
        """Test whether these are the current States of a model."""
        if model is not self._model or not self._is_understood:
            return False
        for named, names, values in self._dicts:
            if list(named) != names or not all(map(is_, named.values(), values)):
                return False
        for items, values in self._lists:
            if len(items) != len(values) or not all(map(is_, items, values)):
                return False
        for array, before in self._arrays:  # noqa: SIM110 (a generator takes longer)
            if contents_of(array) != before:
                return False
        return True

    def _look_into(self, value: Any, met: dict[int, Any]) -> bool:
        """Store the contents of a value; return whether all of them are of known types."""
        if isinstance(value, _PLAIN) or id(value) in met:
            if (contents := contents_of(value)) is not None:
                self._arrays.append((value, contents))
            return True
        met[id(value)] = value
        if isinstance(value, brainstate.State):
            return True
        parts: Iterable[Any]
        named = value if isinstance(value, dict) else fields_of(value)
        if named is not None:
            parts = list(named.values())
            self._dicts.append((named, list(named), parts))
        elif isinstance(value, list | set):
            parts = list(value)
            self._lists.append((value, parts))
        elif isinstance(value, tuple):
            parts = value
        else:  # a leaf, such as a function, or a container of a different type
            leaves = jax.tree.leaves(value, is_leaf=_may_hold_states)
            return not any(map(_may_hold_states, leaves))
        return all(self._look_into(part, met) for part in parts)


def _may_hold_states(value: Any) -> bool:
    return isinstance(value, (brainstate.State, brainstate.graph.Node))

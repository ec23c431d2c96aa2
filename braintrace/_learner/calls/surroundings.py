"""Values of ``brainstate.environ`` that the user's functions read.

The functions are traced once. Values that are no numbers, such as ``fit``, are a part of a
program's key. Numbers, such as a time or the index of a step, may change at every call. When a
number changes for the first time, the functions are traced again with an unusable object in its
place: a number that they read becomes a part of the key, like one that they have closed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from ..._jax import holds_tracers
from ..._runtime.environment.attributes import Part, part_of
from ..._runtime.environment.environ import WHERE_AND_HOW, is_number, is_read

_NOT_SET = object()


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value that is compared by content; contents have no hash."""

    name: Hashable
    part: Part

    def __hash__(self) -> int:
        return hash(self.name)


@dataclasses.dataclass(frozen=True, eq=False)
class Surroundings:
    """The environment of a call.

    Attributes
    ----------
    key
        The part of it that belongs to a program's key.
    numbers
        All other numbers, by name.
    holds_tracers
        Whether the key depends on values of a transformation that is being traced.
    """

    key: frozenset[Hashable]
    numbers: dict[Any, Any]
    holds_tracers: bool = False


NOTHING = Surroundings(frozenset(), {})
"""The environment of a call without user's functions."""


def surroundings(settings: Mapping[str, Any], read: Collection[Any]) -> Surroundings:
    """Return the environment of a call.

    Parameters
    ----------
    settings
        The values of ``brainstate.environ``.
    read
        Names of the numbers that the user's functions are known to read.
    """
    if not read and WHERE_AND_HOW.issuperset(settings):
        return NOTHING
    key: list[Hashable] = []
    numbers = {}
    for name, value in settings.items():
        if name in WHERE_AND_HOW or name in read:
            continue
        if is_number(value):
            numbers[name] = value
        else:
            key.append(_Value(name, part_of(value)))
    known = {name: settings.get(name, _NOT_SET) for name in read}
    if any(map(holds_tracers, known.values())):
        return Surroundings(frozenset(), numbers, holds_tracers=True)
    key += [_Value(name, part_of(value)) for name, value in known.items()]
    return Surroundings(frozenset(key), numbers)


class TracedNumbers:
    """The numbers of the environment for which a program has been traced.

    Parameters
    ----------
    values
        The numbers, none of which it is known to read.
    """

    def __init__(self, values: dict[Any, Any]) -> None:
        held = {name: holds_tracers(value) for name, value in values.items()}
        self._parts = {name: part_of(value) for name, value in values.items() if not held[name]}
        self._unread = {name for name in values if held[name]}  # it was made sure of before

    def read_anew(self, now: dict[Any, Any], trace: Callable[[], Any]) -> list[Any]:
        """Return the names of the numbers that have changed and that the program reads.

        Parameters
        ----------
        now
            The current numbers.
        trace
            Traces the program again; raises if it reads an unusable value.
        """
        if not now and not self._parts:
            return []
        unread = self._unread
        changed = [n for n in {**self._parts, **now} if n not in unread and self._differs(n, now)]
        read = [name for name in changed if is_read(name, trace)]
        unread.update(set(changed).difference(read))
        return read

    def _differs(self, name: Any, now: dict[Any, Any]) -> bool:
        if name not in now or name not in self._parts:
            return True
        return holds_tracers(now[name]) or bool(self._parts[name] != part_of(now[name]))


def read_tracers(numbers: dict[Any, Any], trace: Callable[[], Any]) -> list[Any]:
    """Return the names of the numbers that are tracers and that a program reads."""
    return [n for n, value in numbers.items() if holds_tracers(value) and is_read(n, trace)]

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

import jax
import numpy as np

from ..._jax import is_tracer
from ..._runtime.environment.environ import NUMBERS, WHERE_AND_HOW, is_number, is_read
from .function_key import ByIdentity

_NOT_SET = object()


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
            key.append((name, type(value), _hashable(value)))
    known = {name: settings.get(name, _NOT_SET) for name in read}
    if any(map(_holds_tracers, known.values())):
        return Surroundings(frozenset(), numbers, holds_tracers=True)
    key += [(name, _content(value)) for name, value in known.items()]
    return Surroundings(frozenset(key), numbers)


class TracedNumbers:
    """The numbers of the environment for which a program has been traced.

    Parameters
    ----------
    values
        The numbers, none of which it is known to read.
    """

    def __init__(self, values: dict[Any, Any]) -> None:
        held = {name: _holds_tracers(value) for name, value in values.items()}
        self._values = {name: value for name, value in values.items() if not held[name]}
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
        if not now and not self._values:
            return []
        before, unread = self._values, self._unread
        changed = [
            name
            for name in {**before, **now}
            if name not in unread
            and not _are_same(before.get(name, _NOT_SET), now.get(name, _NOT_SET))
        ]
        read = [name for name in changed if is_read(name, trace)]
        unread.update(set(changed).difference(read))
        return read


def read_tracers(numbers: dict[Any, Any], trace: Callable[[], Any]) -> list[Any]:
    """Return the names of the numbers that are tracers and that a program reads."""
    return [n for n, value in numbers.items() if _holds_tracers(value) and is_read(n, trace)]


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return ByIdentity(value)
    return value  # type: ignore[no-any-return]


def _holds_tracers(value: Any) -> bool:
    return any(map(is_tracer, jax.tree.leaves(value)))


def _are_same(old: Any, new: Any) -> bool:
    return old is new or (not _holds_tracers(new) and _content(old) == _content(new))


def _content(value: Any) -> Hashable:
    """Return a number, or numbers in containers, in a form that is compared by value."""
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple([_of_leaf(leaf) for leaf in leaves])


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array) and not _is_readable(leaf):
        return ByIdentity(leaf)
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array)):
        array = np.asarray(leaf)
        return type(leaf), array.dtype, array.shape, array.tobytes()
    return type(leaf), repr(leaf) if isinstance(leaf, NUMBERS) else _hashable(leaf)


def _is_readable(array: jax.Array) -> bool:
    """Test whether this process can read an array as numbers: no keys, and no remote parts."""
    return array.is_fully_addressable and not jax.dtypes.issubdtype(
        array.dtype, jax.dtypes.extended
    )

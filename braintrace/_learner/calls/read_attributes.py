"""Attributes that code may read from objects, by the names in the code.

An object is looked into with the names in the code that has it, and in the methods and properties
that these names stand for. A function may call an object that it has closed over, so the names in
``__call__`` are added (``Module.__call__`` names ``update``). States are inputs of a program, and
are left out. The learner and its model do not run when a function calls the learner: they count as
far as the function itself names their attributes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import brainstate
import jax
import numpy as np

from ..._algorithms import ETraceAlgorithm
from ..._runtime.environment.attributes import BY_VALUE

MOST_CALLED = 100
"""Size limit of lists, tuples and dicts in which callable objects are searched, as the layers of a
``Sequential`` are. Larger ones contain data, and the search would take as long as a step."""

_NOT_LOOKED_INTO = (
    *(brainstate.State, types.FunctionType, types.ModuleType, type, type(None)),
    *(*BY_VALUE, np.ndarray, jax.Array),
)
"""Types of owners whose attributes are not part of a key."""

_CONTAINERS = (list, tuple, dict)

MOST_FUNCTIONS = 1000
"""Number of functions whose names are known, before they are forgotten."""

_INSTALLED = os.sep + "site-packages" + os.sep

_SEQUENCES = frozenset({"etrace_grad", "etrace_online", "etrace_evolve"})
"""Methods of a learner that call the step function, and that it cannot call."""


Attribute: TypeAlias = tuple[Any, str | int, Any]
"""Owner, name and value of an attribute, or a container, an index and the item."""


class Look(NamedTuple):
    """Objects that were read from a source, which may be others when they are read again."""

    read: Callable[[Any], Sequence[Any]]
    source: Any
    found: Sequence[Any]

    @classmethod
    def at(cls, read: Callable[[Any], Sequence[Any]], source: Any) -> Look:
        """Read a source."""
        return cls(read, source, read(source))


def are_same(objects: Sequence[Any], before: Sequence[Any]) -> bool:
    """Test whether two sequences consist of the same objects."""
    return len(objects) == len(before) and all(map(operator.is_, objects, before))


class Written:
    """Values that functions have left in attributes when they were last traced.

    They are no part of a key. A value that the user assigns afterwards is.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[str | int, Any]] = {}

    def of(self, owner: Any) -> Mapping[str | int, Any]:
        """Return the values that were left in the attributes of an object, by name."""
        return self._left.get(id(owner), {})

    def add(self, before: Iterable[Attribute], after: Iterable[Attribute]) -> None:
        """Add the attributes that are others after a trace."""
        old = {(id(owner), name): value for owner, name, value in before}
        for owner, name, value in after:
            if old.get((id(owner), name), self) is value:
                continue
            if id(owner) not in self._left:
                with contextlib.suppress(TypeError):  # without it, an identity may be used again
                    weakref.finalize(owner, self._left.pop, id(owner), None).atexit = False
                    self._left[id(owner)] = {}
            self._left.get(id(owner), {})[name] = value


WRITTEN = Written()
"""Values left by the functions of all learners, which may share objects."""


def attributes_read(
    function: Any, objects: Sequence[Any], of_model: Collection[int], looks: list[Look]
) -> list[Attribute]:
    """Return the attributes that a function may read from objects.

    Attributes of these attributes, and attributes that methods and other functions read from what
    they are given, are included; values that a trace has left are not.

    Parameters
    ----------
    function, objects
        The function, and the objects that it may read and call.
    of_model
        Identities of the objects of the learner's model.
    looks
        Receives what the result depends on.
    """
    if all(isinstance(each, _NOT_LOOKED_INTO) for each in objects):
        return []
    functions = [each for each in (function, *objects) if isinstance(each, types.FunctionType)]
    if functions and _INSTALLED in functions[0].__code__.co_filename:
        functions = functions[:1]  # a function of a package reads what it names
    every = _names_called(functions[0]) if functions else []
    for each in functions[1:]:
        every = list(dict.fromkeys([*every, *_names_called(each)]))
    result: list[Attribute] = []
    seen: set[tuple[Any, int]] = set()
    looked_at: dict[int, tuple[Any, set[str]]] = {}
    pending = list(itertools.product(objects, every or [_names_in(None)]))
    while pending:
        owner, names = pending.pop()
        kind = owner.__class__
        reads = names.reads[kind]
        if reads is None:
            continue
        if id(owner) in of_model:
            reads = names.without_call[kind] or {}
        if kind in _CONTAINERS:
            looks.append(Look.at(_items_of, owner))
            result += (called := _called_in(owner))
            pending += [(item, names) for _, _, item in called]
            continue
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict or (names, id(owner)) in seen:
            continue
        seen.add((names, id(owner)))
        left = WRITTEN.of(owner)
        named = looked_at.setdefault(id(owner), (owner, set()))[1]
        for name, value in list(attributes.items()):  # other threads may write
            if name not in reads:
                continue
            named.add(name)
            if not isinstance(value, brainstate.State) and left.get(name, left) is not value:
                result.append((owner, name, value))
                pending += [(value, more) for more in (*reads[name], *every)]
    looks += [Look.at(_fields_of, each) for each in looked_at.values()]
    return result


def _fields_of(source: tuple[Any, Iterable[str]]) -> list[Any]:
    """Return the class of an object, the names of its attributes, and the values of some."""
    owner, names = source
    attributes = owner.__dict__
    return [owner.__class__, *attributes, *map(attributes.get, names)]


def _items_of(container: Any) -> Sequence[Any]:
    """Return the items of a container that is searched, and their classes; see `MOST_CALLED`."""
    if len(container) > MOST_CALLED:
        return ()
    items = list(container.values() if isinstance(container, dict) else container)
    return [*items, *(item.__class__ for item in items)]


def _called_in(container: Any) -> list[Attribute]:
    """Return the callable objects in a container."""
    both = _items_of(container)
    size = len(both) // 2
    pairs = enumerate(zip(both[:size], both[size:], strict=True))
    return [(container, index, item) for index, (item, kind) in pairs if _is_called(kind)]


class _Names:
    """Names of attributes and globals in code.

    Attributes
    ----------
    names
        The names.
    reads
        Attributes that the code may read from the objects of a class, with the names of the code
        that reads each; ``None`` for a class whose attributes are not part of a key.
    without_call
        The same for objects that the code does not call.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.reads = _ByKind(lambda kind: _reads(self, kind, _is_called(kind)))
        self.without_call = _ByKind(lambda kind: _reads(self, kind, False))


_Reads: TypeAlias = dict[str, list[_Names]]


class _ByKind(dict[type, "_Reads | None"]):
    """A dict that computes the missing values of classes."""

    def __init__(self, compute: Callable[[type], _Reads | None]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, kind: type) -> _Reads | None:
        result = self[kind] = self._compute(kind)
        return result


def _reads(names: _Names, kind: type, is_called: bool) -> _Reads | None:
    if issubclass(kind, _NOT_LOOKED_INTO):
        return None
    of_learner = issubclass(kind, ETraceAlgorithm) or _SEQUENCES.issubset(dir(kind))
    run = [names]
    if is_called and not of_learner:
        run.append(_CALL)
    result: _Reads = {}
    for code in run:  # which grows
        for name in code.names:
            functions = () if of_learner or name in result else tuple(_functions_of(kind, name))
            result[name] = run  # any of them may be given the value
            if functions:
                run.append(_names_of(*functions))
    return result


@functools.lru_cache(maxsize=1000)
def _is_called(kind: type) -> bool:
    """Test whether a step may call the objects of a class, whose ``__call__`` is a function.

    One that runs a sequence is a loop that trains, which counts epochs: no step can call it.
    """
    if issubclass(kind, _NOT_LOOKED_INTO):
        return False
    functions = list(_functions_of(kind, "__call__"))
    return bool(functions) and _SEQUENCES.isdisjoint(_names_of(*functions).names)


def _functions_of(kind: type, name: str) -> Iterator[types.FunctionType]:
    """Yield the function of a method or property, and those that it overrides and may call."""
    for base in kind.__mro__:
        if name not in vars(base):
            continue
        member = vars(base)[name]
        function = member.fget if isinstance(member, property) else member
        if not isinstance(function, types.FunctionType):
            return
        yield function
        if "super" not in _names_in(function.__code__).names:
            return


@functools.lru_cache(maxsize=1000)
def _names_of(*functions: Any) -> _Names:
    """Return the names in the code of functions, and of the functions that they wrap.

    They are one object for the same functions, by which objects that refer to one another end.
    """
    result: list[str] = []
    for function in functions:
        while isinstance(function, types.FunctionType):
            result += _names_in(function.__code__).names
            function = getattr(function, "__wrapped__", None)
    return _Names(result)


def _names_called(function: types.FunctionType) -> list[_Names]:
    """Return the names in a function, and in the functions of its module that it may call."""
    code, variables = function.__code__, function.__globals__
    known = _CALLED.get(id(code))  # the hash of code takes longer than the rest
    if known is None or known[0] is not code or known[1] is not variables:
        if len(_CALLED) == MOST_FUNCTIONS:
            _CALLED.clear()
        known = _CALLED[id(code)] = code, variables, _names_through(code, variables)
    return known[2]


_CALLED: dict[int, tuple[types.CodeType, dict[str, Any], list[_Names]]] = {}


def _names_through(code: types.CodeType, variables: dict[str, Any]) -> list[_Names]:
    result = [_names_in(code)]
    if _INSTALLED in code.co_filename:  # functions of packages call those of packages
        return result
    for names in result:  # which grows
        called = map(variables.get, names.names)
        own = [each for each in called if isinstance(each, types.FunctionType)]
        result += (each for each in map(_names_of, own) if each not in result)
    return result


@functools.lru_cache(maxsize=1000)
def _names_in(code: types.CodeType | None) -> _Names:
    """Return the names in code and in the functions that it defines."""
    if code is None:
        return _Names(())
    inner = [_names_in(c).names for c in code.co_consts if isinstance(c, types.CodeType)]
    return _Names(itertools.chain(code.co_names, *inner))


_CALL = _Names(["__call__"])

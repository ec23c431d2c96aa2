"""Cache keys of Python functions.

A function that is created at every call, such as a lambda, is another object with the same code.
Its key consists of its code, its defaults, the values that it has closed over and, for a method,
its object, with the attributes of these objects that the code names. Numbers and strings are
compared by value, functions by their own keys, and all other objects by identity. Globals are not
part of a key, as in ``jax.jit``.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import brainstate
import jax

from ..._jax import is_tracer
from ..._runtime.environment.attributes import BY_VALUE

WITH_PARTS = (types.FunctionType, types.MethodType, functools.partial, tuple)
"""Types of values whose keys consist of the keys of their parts."""

_NOT_LOOKED_INTO = (brainstate.State, types.FunctionType, types.ModuleType, type)
"""Types of owners whose attributes are not part of a key."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    """An object that is compared by identity; the reference keeps its `id` unique."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclasses.dataclass(frozen=True)
class FunctionKey:
    """Structural cache key of a function: functions with equal keys are compiled once.

    Attributes
    ----------
    parts
        The values to compare.
    holds_tracers
        Whether the function reads values of a transformation that is being traced.

    Raises
    ------
    TypeError
        If a part cannot be hashed.
    """

    parts: tuple[Hashable, ...]
    holds_tracers: bool
    _hash: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.parts))

    def __hash__(self) -> int:
        return self._hash


class FunctionKeys:
    """Keys of functions; the key of the previous function is reused if nothing has changed."""

    def __init__(self) -> None:
        self._contents: list[Any] = []
        self._key = FunctionKey((), False)

    def __call__(self, function: Callable[..., Any]) -> FunctionKey:
        """Return the key of a function as it is now.

        Raises
        ------
        TypeError
            For a callable object that cannot be hashed.
        """
        contents: list[Any] = []
        _add([function], contents, ())
        before = self._contents
        if len(contents) == len(before) and all(map(operator.is_, contents, before)):
            return self._key
        key = FunctionKey(tuple(map(_part, contents)), any(map(_holds_tracers, contents)))
        if contents[0] is function:  # an object whose class defines which objects equal it
            key = FunctionKey((function,), key.holds_tracers)
        if not key.holds_tracers:  # tracers must not outlive their transformation
            self._key, self._contents = key, contents
        return key


def _add(values: Iterable[Any], contents: list[Any], inside: tuple[int, ...]) -> None:
    """Append values; for a value with parts, append the objects that define it.

    The values are read by functions with the identities ``inside``, the outermost first.
    """
    for value in values:
        if not isinstance(value, WITH_PARTS):
            contents.append(value)
        elif id(value) in inside:  # a function that reads itself
            contents.append(inside.index(id(value)))
        elif isinstance(value, types.FunctionType):
            contents.append(value.__code__)
            parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            if value.__closure__:
                parts += _closed_over(value.__closure__)
            if parts:
                parts += _attributes(value.__code__, parts)
                _add(parts, contents, (*inside, id(value)))
        elif isinstance(value, types.MethodType):
            contents.append(value.__self__)
            read = _attributes(getattr(value.__func__, "__code__", None), [value.__self__])
            _add([value.__func__, *read], contents, inside)
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords, *value.keywords.values()]
            contents += [functools.partial, len(parts)]
            _add(parts, contents, inside)
        else:
            contents += [type(value), len(value)]
            _add(value, contents, inside)


def _attributes(code: types.CodeType | None, objects: Iterable[Any]) -> list[Any]:
    """Return attributes that code may read from objects: their names and values.

    Attributes of these attributes, and attributes that methods read, are included. States are
    inputs, and are not.
    """
    names = _names_in(code)
    result: list[Any] = []
    seen: set[tuple[int, Any]] = set()
    pending = list(zip(objects, itertools.repeat(names)))
    while pending:
        owner, names = pending.pop()
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict or (id(owner), names) in seen:
            continue
        seen.add((id(owner), names))
        methods = _methods(owner.__class__, names)
        if methods is None:
            continue
        for name in names:
            if name in attributes:
                value = attributes[name]
                if not isinstance(value, brainstate.State):
                    result += [name, value]
                    pending.append((value, names))
        for name, read in methods:
            if name not in attributes:
                pending.append((owner, read))
    return result


@functools.lru_cache(maxsize=1000)
def _methods(kind: type, names: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]] | None:
    """Return the methods of a class that have some of the names, and the names in their code.

    The result is ``None`` if the attributes of its objects are not part of a key.
    """
    if issubclass(kind, _NOT_LOOKED_INTO):
        return None
    members = {name: getattr(kind, name, None) for name in names}
    functions = {n: f for n, f in members.items() if isinstance(f, types.FunctionType)}
    return [(name, _names_in(f.__code__)) for name, f in functions.items()]


@functools.lru_cache(maxsize=1000)
def _names_in(code: types.CodeType | None) -> tuple[str, ...]:
    """Return the names of attributes and globals in code and in the functions that it defines."""
    if code is None:
        return ()
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(code.co_names, *inner)))


_CONTENTS = operator.attrgetter("cell_contents")


def _closed_over(cells: Sequence[types.CellType]) -> list[Any]:
    """Return the values of cells; the cell itself if its value is not assigned yet."""
    try:
        return list(map(_CONTENTS, cells))
    except ValueError:
        return [_content(cell) for cell in cells]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _part(value: Any) -> Hashable:
    if isinstance(value, types.CodeType):
        return value
    if isinstance(value, (int, str, bytes)):
        return type(value), value
    if isinstance(value, BY_VALUE):
        return type(value), repr(value)  # 0.0 is not -0.0, and NaN is NaN
    return ByIdentity(value)


def _holds_tracers(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # a dict whose keys have no order
        return any(map(is_tracer, jax.tree.leaves(value)))
    return False


def line_of(function: Any) -> str:
    """Return ``file:line`` of a function's definition, or the class of a callable object."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", getattr(function, "__func__", None))
        if inner is None:
            return f"an object of class {type(function).__name__}"
        function = inner
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"

"""Cache keys of Python functions.

A function is traced once, as by ``jax.jit``. A lambda that is written in a call is another object
every time, with the same code: its key consists of its code and of the values that it holds
(defaults, closed-over values, the object of a method). Numbers and strings are compared by value,
all other objects by identity.
"""

import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ..._jax import holds_tracers

BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


class ByIdentity:
    """An object that is compared by identity; the reference keeps its `id` unique."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def key_of(function: Callable[..., Any]) -> tuple[Hashable, ...] | None:
    """Return the cache key of a function; ``None`` if it holds tracers, which nothing may keep."""
    parts = list(_parts(function, []))
    return None if any(map(holds_tracers, parts)) else tuple(map(_comparable, parts))


def _parts(value: Any, inside: list[Any]) -> Iterator[Any]:
    if not isinstance(value, (types.FunctionType, types.MethodType, functools.partial, tuple)):
        yield value
    elif any(value is outer for outer in inside):  # a function that reads itself
        yield "itself"
    else:
        if isinstance(value, types.FunctionType):
            cells = map(_content, value.__closure__ or ())
            named = (value.__kwdefaults__ or {}).values()
            held = [value.__code__, *(value.__defaults__ or ()), *named, *cells]
        elif isinstance(value, types.MethodType):
            held = [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            held = [value.func, value.args, *value.keywords, *value.keywords.values()]
        else:
            held = [type(value).__name__, len(value), *value]
        for each in held:
            yield from _parts(each, [*inside, value])


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return cell


def _comparable(value: Any) -> Hashable:
    if isinstance(value, BY_VALUE):
        return type(value), repr(value)  # 0.0 is not -0.0, and NaN is NaN
    return value if isinstance(value, types.CodeType) else ByIdentity(value)


def line_of(function: Any) -> str:
    """Return ``file:line`` of a function's definition, or the class of a callable object."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", getattr(function, "__func__", None))
        if inner is None:
            return f"an object of class {type(function).__name__}"
        function = inner
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"

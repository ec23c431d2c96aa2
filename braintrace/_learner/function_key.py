"""Cache keys of Python functions.

A function is traced once, as by ``jax.jit``. A lambda that is written in a call is another object
every time, with the same code: its key consists of its code, of the values that it holds (defaults,
closed-over values, the object of a method), and of the objects that the global names in its code
are bound to, which a notebook cell may bind again. Numbers, strings and flags are compared by
value, tracers of an enclosing transformation by shape and dtype, and all other objects by identity.
A key keeps its objects alive.
"""

import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from .._jax import holds_tracers, is_tracer, leaves_of

BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


class ByIdentity:
    """An object that is compared by identity; the reference keeps its `id` unique."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(function: Callable[..., Any]) -> tuple[tuple[Hashable, ...], bool]:
    """Return the cache key of a function, and whether it reads tracers, which nothing may keep."""
    key: list[Hashable] = []
    reads_tracers = False
    for value, is_global in _parts(function, []):
        if isinstance(value, BY_VALUE):
            key.append((type(value), repr(value)))  # 0.0 is not -0.0, and NaN is NaN
        elif isinstance(value, types.CodeType):
            key.append(value)
        elif is_tracer(value) if is_global else holds_tracers(value):
            reads_tracers = True
            key.append((type(value), *map(_key_of_leaf, leaves_of(value))))
        else:
            key.append(ByIdentity(value))
    return tuple(key), reads_tracers


def _key_of_leaf(leaf: Any) -> Hashable:
    return str(jax.typeof(leaf)) if is_tracer(leaf) else ByIdentity(leaf)


def _parts(value: Any, inside: list[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield what a function reads, and whether a global name of its code is bound to it."""
    if not isinstance(value, (types.FunctionType, types.MethodType, functools.partial, tuple)):
        yield value, False
        return
    if any(value is outer for outer in inside):  # a function that reads itself
        yield "itself", False
        return
    if isinstance(value, types.FunctionType):
        cells = map(_content, value.__closure__ or ())
        named = (value.__kwdefaults__ or {}).values()
        held = [value.__code__, *(value.__defaults__ or ()), *named, *cells]
        for name in global_names(value.__code__):
            yield value.__globals__.get(name), True
    elif isinstance(value, types.MethodType):
        held = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        held = [value.func, value.args, *value.keywords, *value.keywords.values()]
    else:
        held = [type(value).__name__, len(value), *value]
    for each in held:
        yield from _parts(each, [*inside, value])


@functools.lru_cache(maxsize=1000)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that code reads, and the functions written inside it."""
    read = [
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    inner = [global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys([*read, *(name for names in inner for name in names)]))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return cell

"""Cache keys of Python functions.

A function that is created at every call, such as a lambda, is another object with the same code.
Its key consists of its code, its defaults, the values that it has closed over and, for a method or
a callable object, its object, with the attributes of these objects that the code may read (see
`read_attributes`). Numbers and strings are compared by value, functions by their own keys, and all
other objects by identity. Globals are not part of a key, as in ``jax.jit``, and neither are
attributes that the function itself writes while it is traced.
"""

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from ..._jax import holds_tracers
from ..._runtime.environment.attributes import BY_VALUE
from .read_attributes import WRITTEN, Attribute, Look, are_same, attributes_read

WITH_PARTS = (types.FunctionType, types.MethodType, functools.partial, tuple)
"""Types of values whose keys consist of the keys of their parts."""


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
        self._reading: _Reading | None = None
        self._key = FunctionKey((), False)

    def __call__(self, function: Callable[..., Any], of_model: Collection[int] = ()) -> FunctionKey:
        """Return the key of a function as it is now.

        Parameters
        ----------
        function
            The function.
        of_model
            Identities of the objects of the learner's model, which does not run when it is called.

        Raises
        ------
        TypeError
            For a callable object that cannot be hashed.
        """
        before = self._reading
        if before is not None and before.is_up_to_date(function, of_model):
            return self._key
        reading = _Reading(function, of_model)
        contents = reading.contents
        if before is not None and are_same(contents, before.contents):
            self._reading = reading
            return self._key
        key = FunctionKey(tuple(map(_part, contents)), any(map(holds_tracers, contents)))
        if contents[0] is function and _defines_equality(type(function)):
            key = FunctionKey((function,), key.holds_tracers)  # its class says what equals it
        if not key.holds_tracers:  # tracers must not outlive their transformation
            self._key, self._reading = key, reading
        return key


@contextlib.contextmanager
def ignoring_writes(
    functions: Iterable[Callable[..., Any]], of_model: Collection[int] = ()
) -> Iterator[None]:
    """Leave out of keys the values that attributes have after the context, which traces functions.

    A count or a memo that a function writes would otherwise make another function of it.
    """
    before = [_Reading(function, of_model).attributes for function in functions]
    yield
    for function, then in zip(functions, before, strict=True):
        WRITTEN.add(then, _Reading(function, of_model).attributes)


class _Reading:
    """The objects that define a function, and the attributes among them.

    Parameters
    ----------
    function, of_model
        The function, and objects that are not called.

    Attributes
    ----------
    contents, attributes
        The objects, and the attributes with their owners.
    """

    def __init__(self, function: Callable[..., Any], of_model: Collection[int]) -> None:
        self.contents: list[Any] = []
        self.attributes: list[Attribute] = []
        self._looks: list[Look] = []
        self._function, self._of_model = function, of_model
        self._add([function], ())

    def is_up_to_date(self, function: Callable[..., Any], of_model: Collection[int]) -> bool:
        """Test, without another reading, whether a function has the same contents."""
        if function is not self._function or of_model is not self._of_model:
            return False
        for read, source, found in self._looks:  # noqa: SIM110 (a generator takes longer)
            if not are_same(read(source), found):
                return False
        return True

    def _add(self, values: Iterable[Any], inside: tuple[int, ...]) -> None:
        """Append values; for a value with parts, append the objects that define it.

        The values are read by functions with the identities ``inside``, the outermost first.
        """
        contents = self.contents
        for value in values:
            if not isinstance(value, WITH_PARTS):
                contents.append(value)
                if not inside:  # the user's function is a callable object
                    self._add(self._attributes(None, [value]), (id(value),))
            elif id(value) in inside:  # a function that reads itself
                contents.append(inside.index(id(value)))
            elif isinstance(value, types.FunctionType):
                code, *parts = self._look(_code_and_values, value)
                contents.append(code)
                if parts:
                    parts += self._attributes(value, parts)
                    self._add(parts, (*inside, id(value)))
            elif isinstance(value, types.MethodType):
                contents.append(value.__self__)
                read = self._attributes(value.__func__, [value.__self__])
                self._add([value.__func__, *read], (*inside, id(value)))
            elif isinstance(value, functools.partial):
                parts = self._look(_values_of_partial, value)
                contents += [functools.partial, len(parts)]
                parts += self._attributes(value.func, parts)
                self._add(parts, (*inside, id(value)))
            else:
                contents += [type(value), len(value)]
                self._add(value, inside)

    def _look(self, read: Callable[[Any], Sequence[Any]], source: Any) -> list[Any]:
        self._looks.append(look := Look.at(read, source))
        return list(look.found)

    def _attributes(self, function: Any, objects: Sequence[Any]) -> list[Any]:
        """Return the names and values of attributes that a function may read from objects."""
        found = attributes_read(function, objects, self._of_model, self._looks)
        if not found:
            return []
        self.attributes += found
        return [part for _, *named in found for part in named]


def _code_and_values(function: types.FunctionType) -> list[Any]:
    """Return the code of a function, its defaults and the values that it has closed over."""
    result = [function.__code__, *(function.__defaults__ or ())]
    if function.__kwdefaults__:
        result += function.__kwdefaults__.values()
    if function.__closure__:
        result += _closed_over(function.__closure__)
    return result


def _values_of_partial(function: functools.partial[Any]) -> list[Any]:
    named = function.keywords
    return [function.func, *function.args, *named, *named.values()]


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


def _defines_equality(kind: type) -> bool:
    return any("__eq__" in vars(base) for base in kind.__mro__[:-1])


def line_of(function: Any) -> str:
    """Return ``file:line`` of a function's definition, or the class of a callable object."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", getattr(function, "__func__", None))
        if inner is None:
            return f"an object of class {type(function).__name__}"
        function = inner
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"

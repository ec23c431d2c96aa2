"""What a function is: functions that would be traced alike have equal keys.

A function that is made anew at every call, such as a lambda, is another object with the same code.
What it does depends on what this code reads from elsewhere: defaults, closed-over variables, global
variables of its module, and attributes of those. Numbers and strings are compared by value,
functions as here, all else by identity: an object that is changed in place is the same object.
What the code itself assigns to does not count: a function may note there that it was traced.
"""

import contextlib
import dataclasses
import dis
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import numpy as np

from .._jax import is_tracer

BY_VALUE = (bool, int, float, complex, str, bytes, np.generic)
"""Types whose values cannot change, and are small."""

MODULE = "the module"

_MISSING = object()

MOST_CODES = 1000
"""Pieces of code whose variables are remembered."""


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """An object that equals itself alone, and is kept so that no other takes its place."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class FunctionKey:
    """What a function is.

    Parameters
    ----------
    line
        Where it is defined.
    parts
        What it depends on, by the names that a reader knows.

    Attributes
    ----------
    holds_tracers
        Whether it depends on values of a transformation that is at work.
    """

    def __init__(self, line: str, parts: tuple[tuple[str, Hashable], ...]) -> None:
        self.line, self.parts = line, parts
        self._hash = hash(parts)
        self.holds_tracers = any(_holds_tracers(p) for label, p in parts if label != MODULE)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FunctionKey) and self.parts == other.parts)


class FunctionKeys:
    """Keys of functions; that of the function before is found without making it anew."""

    def __init__(self) -> None:
        self._function: Any = None
        self._dependencies = _Dependencies()
        self._key = FunctionKey("", ())

    def __call__(self, function: Callable[..., Any]) -> FunctionKey:
        """Return the key of a function as it is now.

        Raises
        ------
        TypeError
            For an object that is called like a function and cannot be hashed.
        """
        is_known = self._function is function or (
            isinstance(function, types.MethodType) and self._function == function
        )
        if not (is_known and self._dependencies.are_as_before()):
            dependencies = _Dependencies()
            dependencies.add("code", function)
            parts = tuple((label, _part(label, value)) for label, value in dependencies.found)
            key = FunctionKey(line_of(function), parts)
            if key.holds_tracers:  # they are not to outlive their transformation
                return key
            self._key, self._function, self._dependencies = key, function, dependencies
        return self._key


def _part(label: str, value: Any) -> Hashable:
    if isinstance(value, types.CodeType):
        return value
    if label == "code":  # an object that says itself what equals it
        hash(value)
        hashable: Hashable = value
        return hashable
    if type(value) is tuple:
        return tuple(_part(label, item) for item in value)
    if isinstance(value, BY_VALUE):
        return type(value), repr(value)  # 0.0 is not -0.0, and NaN is NaN
    return Same(value)


def _holds_tracers(part: Any) -> bool:
    value = part.value if isinstance(part, Same) else part
    with contextlib.suppress(TypeError, ValueError):  # a dict whose keys have no order
        return any(map(is_tracer, jax.tree.leaves(value)))
    return False


def printed(part: Any) -> str | None:
    """Print a number, a string, or shapes and dtypes; ``None`` for anything else."""
    match part:
        case (type(), str()):
            return str(part[1])
        case None | bool() | int() | float() | str():
            return repr(part)
        case ((tuple(), np.dtype()), *_):
            return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in part)
    return None


def line_of(function: Any) -> str:
    """Return ``file:line`` of a function's definition, or what there is in its place."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", getattr(function, "__func__", None))
        if inner is None:
            return f"an object of class {type(function).__name__}"
        function = inner
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


# --- what a function depends on


class _Dependencies:
    """What a function depends on, by names to print, and where that was found."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._functions: list[tuple[Any, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._attributes: list[tuple[Mapping[str, Any], str, Any]] = []

    def are_as_before(self) -> bool:
        """Tell whether everything is still where it was found."""
        for mapping, name, value in self._attributes:
            if mapping.get(name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            if _content(cell) is not value:
                return False
        for function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        return True

    def add(self, label: str, value: Any) -> None:
        """Add a value, or in its place, for a function, what that depends on."""
        if isinstance(value, types.FunctionType):
            self._add_function(label, value)
        elif isinstance(value, functools.partial):
            self.add(label, value.func)
            for name, part in (*enumerate(value.args), *value.keywords.items()):
                self.add(f"the argument `{name}` of a partial function", part)
        elif isinstance(value, types.MethodType):
            self.found.append((f"the object of the method `{value.__name__}`", value.__self__))
            if isinstance(value.__func__, types.FunctionType):
                self._add_function(label, value.__func__, value.__self__)
        elif isinstance(value, tuple) and any(isinstance(v, types.FunctionType) for v in value):
            for part in value:
                self.add(label, part)
        else:
            self.found.append((label, value))

    def _add_function(
        self, label: str, function: types.FunctionType, owner: Any = _MISSING
    ) -> None:
        if any(function is known for known, *_ in self._functions):
            return
        code, module = function.__code__, function.__globals__
        defaults, named = function.__defaults__, function.__kwdefaults__ or {}
        self._functions.append((function, code, defaults))
        self.found += [(label, code), (MODULE, module)]
        for name, value in (*enumerate(defaults or ()), *named.items()):
            self.add(f"the default `{name}` of `{function.__name__}`", value)
        self._attributes += [(named, *item) for item in named.items()]
        for variable in _variables(code):
            value = self._value_of(variable, function, owner)
            for attribute in variable.attributes:
                value = self._attribute(value, attribute)
            if value is _MISSING:
                continue
            if variable.is_global and _is_elsewhere(value, module):
                self.found.append((variable.label, value))
            else:
                self.add(variable.label, value)

    def _value_of(self, variable: "_Variable", function: types.FunctionType, owner: Any) -> Any:
        if variable.is_global:
            return self._from(function.__globals__, variable.name)
        if variable.cell is None:
            return owner
        cell = (function.__closure__ or ())[variable.cell]
        if variable.is_written:
            return cell
        self._cells.append((cell, value := _content(cell)))
        return value

    def _attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute that an object holds itself; the value of a State is an input."""
        if owner is _MISSING or isinstance(owner, brainstate.State):
            return _MISSING
        held = getattr(owner, "__dict__", None)
        return _MISSING if held is None else self._from(held, name)

    def _from(self, mapping: Mapping[str, Any], name: str) -> Any:
        value = mapping.get(name, _MISSING)
        self._attributes.append((mapping, name, value))
        return value


def _is_elsewhere(value: Any, module: dict[str, Any]) -> bool:
    """Tell whether a function is of another module, into which it is not followed."""
    return isinstance(value, types.FunctionType) and value.__globals__ is not module


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return cell


@dataclasses.dataclass(frozen=True)
class _Variable:
    """A variable that a function reads from elsewhere, or an attribute of one.

    Attributes
    ----------
    label
        What to call it.
    name, attributes
        The variable, and the attributes of attributes that are read.
    cell
        Index among the closed-over variables.
    is_global
        Whether it is one of the module; what is neither is the object of a method.
    is_written
        Whether the function assigns to it.
    """

    label: str
    name: str
    attributes: tuple[str, ...]
    cell: int | None = None
    is_global: bool = False
    is_written: bool = False


_known: dict[int, tuple[types.CodeType, tuple[_Variable, ...]]] = {}
"""What is found for code, by identity: the hash of code is not kept, and takes long."""


def _variables(code: types.CodeType) -> tuple[_Variable, ...]:
    """Return what the code of a function, and of functions inside it, reads from elsewhere."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) > MOST_CODES:
            _known.clear()
        known = _known[id(code)] = code, tuple(_found(code))
    return known[1]


def _found(code: types.CodeType) -> Iterator[_Variable]:
    instructions = [i for part in _codes(code) for i in dis.get_instructions(part)]
    variables = {i.argval for i in instructions if i.opname in ("STORE_DEREF", "STORE_GLOBAL")}
    attributes = {i.argval for i in instructions if i.opname == "STORE_ATTR"}
    for (name, *rest), is_global in _reads(code).items():
        chain, is_written = tuple(rest), name in variables
        if not attributes.isdisjoint(chain) or (is_written and (is_global or chain)):
            continue
        words = f"variable `{'.'.join((name, *chain))}`"
        if is_global:
            yield _Variable(f"the global {words}", name, chain, is_global=True)
        elif name in code.co_freevars:
            cell = code.co_freevars.index(name)
            yield _Variable(f"the closed-over {words}", name, chain, cell, False, is_written)
        elif chain and name in code.co_varnames[:1]:
            yield _Variable(f"the {words}", name, chain)


def _reads(code: types.CodeType) -> dict[tuple[str, ...], bool]:
    """Return chains ``(variable, attribute, ...)``, and whether they begin in the module."""
    read: dict[tuple[str, ...], bool] = {}
    for part in _codes(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(part):
            name, value = instruction.opname, instruction.argval
            # Python 3.13 joins an assignment and the load after it: STORE_FAST_LOAD_FAST.
            is_argument = "LOAD_FAST" in name and part is code
            if name in ("LOAD_DEREF", "LOAD_GLOBAL") or is_argument:
                chain = (value[-1] if isinstance(value, tuple) else value,)
                read[chain] = name == "LOAD_GLOBAL"
            elif chain and name in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, value)
                read[chain] = read[chain[:1]]
            else:
                chain = ()
    return read


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)

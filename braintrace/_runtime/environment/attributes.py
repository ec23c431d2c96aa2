"""Plain attributes of a model's modules, which a compiled step contains as constants.

Numbers, strings, units and arrays are compared by value. Lists, tuples, dicts, sets, dataclasses,
namespaces and modules are compared by content, and all other objects by identity or their ``==``.
The States of a model are inputs of its step. Changes inside a NumPy array are seen if it is small,
and changes inside other objects are not.
"""

import argparse
import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

import brainstate
import jax
import numpy as np
import saiunit

from ..._arguments import shown
from ..._jax import is_tracer

BY_VALUE = (bool, int, float, complex, str, bytes, np.generic)
"""Types whose values cannot change, and are small."""

MOST_BYTES = 65_536
"""Size limit of arrays compared by content before each call; this takes some microseconds."""

Part: TypeAlias = Any
"""The comparable value of an attribute; it supports ``==``."""

_MISSING = object()


@dataclasses.dataclass(frozen=True, eq=False)
class Attributes:
    """The plain attributes of a model at one time.

    Attributes
    ----------
    by_name
        Comparable value by the path of the attribute in the model, ``cell.gain``.
    """

    by_name: Mapping[str, Part]

    def changed(self, now: "Attributes") -> list[str]:
        """Return the names of attributes that differ now."""
        before, after = self.by_name, now.by_name
        return [
            name
            for name in {**before, **after}
            if before.get(name, _MISSING) != after.get(name, _MISSING)
        ]

    def change(self, now: "Attributes", name: str) -> str:
        """Return the old and the new value of an attribute as text."""
        parts = (each.by_name.get(name, _MISSING) for each in (self, now))
        where, was, new = _first_difference(name, *parts)
        return f"`{where}` ({_in_words(was)} then, {_in_words(new)} now)"


def attributes_of(model: brainstate.nn.Module) -> Attributes:
    """Return the current plain attributes of a model's modules."""
    nodes, result = model.nodes(), dict[str, Part]()
    apart = frozenset(map(id, (*nodes.values(), *model.states().values())))
    for path, node in nodes.items():
        where = [str(part) for part in path]
        result[".".join([*where, "__class__"])] = _Held(type(node))
        for name, value in vars(node).items():
            result[".".join([*where, name])] = _part(value, apart)
    return Attributes(result)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass, a namespace or a module; ``None`` for other objects."""
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    with_fields = (types.SimpleNamespace, argparse.Namespace, brainstate.graph.Node)
    if is_record or isinstance(value, with_fields):
        return getattr(value, "__dict__", None)
    return None


def contents_of(value: Any) -> bytes | None:
    """Return the contents of a small writeable array; ``None`` for all other objects."""
    if isinstance(value, saiunit.Quantity):
        value = saiunit.get_mantissa(value)
    if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes <= MOST_BYTES:
        return value.tobytes()
    return None


def part_of(value: Any) -> Part:
    """Return the comparable part of a value outside of a model."""
    return _part(value, frozenset())


def _part(value: Any, apart: frozenset[int]) -> Part:
    """Return the comparable part of a value.

    The model's own States and modules, and the containers of the value, are compared ``apart``.
    """
    if id(value) in apart:
        kind = type(value)  # by name: while States are traced, they have a class like their own
        return brainstate.State, f"a `{kind.__qualname__}`", kind.__module__
    if value is None or isinstance(value, BY_VALUE):
        return type(value), repr(value)  # 0.0 is not -0.0, and NaN is NaN
    apart = apart | {id(value)}
    if isinstance(value, dict):
        return type(value), list(value), [_part(item, apart) for item in value.values()]
    if isinstance(value, (list, tuple)):
        return type(value), list(range(len(value))), [_part(item, apart) for item in value]
    if isinstance(value, saiunit.Quantity):
        return saiunit.get_unit(value), _part(saiunit.get_mantissa(value), apart)
    if (contents := contents_of(value)) is not None:
        return type(value), shown(value), value.dtype, value.shape, contents
    if (fields := fields_of(value)) is not None:
        return type(value), list(fields), [_part(item, apart) for item in fields.values()]
    if isinstance(value, types.MethodType):
        return _Held(value.__func__), _Held(value.__self__)
    if isinstance(value, functools.partial):
        return _part((value.func, value.args, value.keywords), apart)
    return _Held(frozenset(value) if isinstance(value, set) else value)


def _first_difference(where: str, was: Part, new: Part) -> tuple[str, Part, Part]:
    """Return the place of the first difference of two parts, and what is there."""
    match was, new:
        case (kind, list(names), list(parts)), (other, list(same), list(others)) if (
            kind is other and names == same
        ):
            for name, one, another in zip(names, parts, others, strict=True):
                if one != another:
                    return _first_difference(f"{where}[{name!r}]", one, another)
    return where, was, new


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """A reference to an object, which keeps its identity from being reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or _are_equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def _are_equal(one: Any, other: Any) -> bool:
    if is_tracer(one) or is_tracer(other):
        return False
    try:
        if isinstance(one, (np.ndarray, jax.Array)):
            like = one.shape == other.shape and one.dtype == other.dtype
            return like and np.array_equal(one, other)
        return (one == other) is True
    except Exception:  # a user's class may raise anything
        return False


def _in_words(part: Part) -> str:
    match part:
        case _Held(value):
            return shown(value)
        case (type(), str(text), *_):
            return text
    return "not set" if part is _MISSING else "a container"

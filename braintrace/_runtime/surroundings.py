"""What a function of a model may read besides States and arguments, and whether it has changed.

That are the attributes of modules with what is in them, and ``brainstate.environ``.
"""

import types
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import numpy as np

DEEPEST = 3
"""How far what is in an attribute is looked at: lists, dicts, arrays and objects in each other."""


class Surroundings:
    """What the ``init_state`` of a model's modules may read besides States."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self._attributes = [(vars(node), _parts_of(vars(node))) for node in model.nodes().values()]
        self._environment = _parts_of(brainstate.environ.all())
        self._x64 = jax.config.jax_enable_x64

    def are_unchanged(self) -> bool:
        """Tell whether all is as it was."""
        return (
            self._x64 == jax.config.jax_enable_x64
            and _are_as_before(brainstate.environ.all(), self._environment)
            and all(_are_as_before(now, before) for now, before in self._attributes)
        )


_LOOKED_AT_APART = (brainstate.graph.Node, brainstate.State, jax.Array, type, types.ModuleType)

_Held = tuple[Any, Any]
"""An object, and what it holds: a copy of an array, or the objects in it by name."""


def _held(value: Any, depth: int) -> _Held:
    parts = _parts(value) if depth else None
    if isinstance(parts, np.ndarray):
        return value, parts.copy()
    return value, None if parts is None else _parts_of(parts, depth - 1)


def _parts_of(parts: Mapping[Any, Any], depth: int = DEEPEST) -> dict[Any, _Held]:
    return {name: _held(value, depth) for name, value in parts.items()}


def _parts(value: Any) -> Any:
    """Return what may change in an object that stays the same one: an array, or parts by name.

    Modules and States are looked at apart.
    """
    if isinstance(value, np.ndarray | dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, _LOOKED_AT_APART):
        return None
    return getattr(value, "__dict__", None)


def _are_as_before(now: Mapping[Any, Any], before: Mapping[Any, _Held]) -> bool:
    return len(now) == len(before) and all(
        name in before and _is_as_before(value, before[name]) for name, value in now.items()
    )


def _is_as_before(value: Any, before: _Held) -> bool:
    same, held = before
    if value is not same:
        return _starts_anew(value, same)
    if isinstance(held, np.ndarray):
        return np.array_equal(value, held, equal_nan=held.dtype.kind in "fc")
    return held is None or _are_as_before(_parts(value), held)


def _starts_anew(*values: Any) -> bool:
    return all(isinstance(value, brainstate.ShortTermState) for value in values)

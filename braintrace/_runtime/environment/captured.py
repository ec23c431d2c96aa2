"""Captured environment of a function of a model: attributes of modules and ``brainstate.environ``.

The function may read them besides States and arguments. A change makes its compiled form invalid.
"""

import types
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import numpy as np

DEEPEST = 3
"""Depth to which nested lists, dicts, arrays and objects in an attribute are compared."""


class CapturedEnvironment:
    """Values that the ``init_state`` of a model's modules may read besides States."""

    def __init__(self, model: brainstate.nn.Module) -> None:
        self._attributes = [(vars(node), _parts_of(vars(node))) for node in model.nodes().values()]
        self._environment = _parts_of(brainstate.environ.all())
        self._x64 = jax.config.jax_enable_x64

    def are_unchanged(self) -> bool:
        """Test whether all values are unchanged."""
        return (
            self._x64 == jax.config.jax_enable_x64
            and _are_as_before(brainstate.environ.all(), self._environment)
            and all(_are_as_before(now, before) for now, before in self._attributes)
        )


_LOOKED_AT_APART = (brainstate.graph.Node, brainstate.State, jax.Array, type, types.ModuleType)

_Held = tuple[Any, Any]
"""An object, and its contents: a copy of an array, or the objects in it by name."""


def _held(value: Any, depth: int) -> _Held:
    parts = _parts(value) if depth else None
    if isinstance(parts, np.ndarray):
        return value, parts.copy()
    return value, None if parts is None else _parts_of(parts, depth - 1)


def _parts_of(parts: Mapping[Any, Any], depth: int = DEEPEST) -> dict[Any, _Held]:
    return {name: _held(value, depth) for name, value in parts.items()}


def _parts(value: Any) -> Any:
    """Return the mutable contents of an object: an array, or parts by name.

    Modules and States are compared separately.
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
        return isinstance(value, brainstate.ShortTermState) and isinstance(
            same, brainstate.ShortTermState
        )
    if isinstance(held, np.ndarray):
        return np.array_equal(value, held, equal_nan=held.dtype.kind in "fc")
    return held is None or _are_as_before(_parts(value), held)

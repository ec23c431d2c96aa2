"""Descriptions of values for errors, without their numbers."""

from typing import Any

import brainstate
import jax
import numpy as np
import saiunit

from ._jax import is_there, is_tracer

LONGEST, MOST_LEAVES = 60, 4
"""Characters of a printed value, and leaves of a printed container."""


CONTAINERS = (list, tuple, dict)

DEEPEST = 100
"""Levels of lists, tuples and dicts that may be nested."""


def is_endless(value: Any, level: int = 0) -> bool:
    """Test whether containers contain themselves, or are nested deeper than `DEEPEST` levels.

    JAX must not process them: it raises `SystemError`, or exhausts the interpreter's stack.
    """
    if not isinstance(value, CONTAINERS):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return level == DEEPEST or any(is_endless(part, level + 1) for part in parts)


def is_state(value: Any) -> bool:
    """Test whether a value is a State; often its ``.value`` is meant."""
    return isinstance(value, brainstate.State)


def is_quantity(value: Any) -> bool:
    """Test whether a value has a physical unit."""
    return isinstance(value, saiunit.Quantity)


def shown(value: Any) -> str:
    """Describe a value for an error, without its numbers."""
    if is_quantity(value):
        return f"{shown(saiunit.get_mantissa(value))} in {saiunit.get_unit(value)}"
    if is_state(value):
        return f"a {type(value).__name__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"the {type(value).__name__} `{value.__qualname__}`"
    if is_endless(value):
        return (
            f"a {type(value).__name__} that contains itself, or is deeper than {DEEPEST} levels of "
            "lists, tuples and dicts"
        )
    leaves = leaves_of(value)
    is_container = isinstance(value, CONTAINERS)
    if is_container and not all(isinstance(leaf, (bool, int, float, str)) for leaf in leaves):
        rest = ", …" if len(leaves) > MOST_LEAVES else ""
        return f"a {type(value).__name__} of {', '.join(map(shown, leaves[:MOST_LEAVES]))}{rest}"
    plain = (bool, int, float, complex, str, np.generic)
    if value is None or is_container or isinstance(value, plain):
        try:
            text = repr(value)
        except ValueError:  # Python does not print integers of thousands of digits
            return f"a {type(value).__name__} of thousands of digits"
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{_kind_of_array(value)} of dtype {dtype} and shape {tuple(shape)}"
    return f"a {type(value).__name__}"


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value, also if keys of dicts have no order."""
    try:
        return list(jax.tree.leaves(value, is_leaf=is_quantity))
    except ValueError:
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in leaves_of(part)]


def _kind_of_array(value: Any) -> str:
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    if not isinstance(value, jax.Array) or is_there(value):
        return "an array"
    return "a leaked tracer" if is_tracer(value) else "a deleted array"

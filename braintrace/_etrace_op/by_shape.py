"""A cache of facts about an operation that follow from its declaration and from shapes alone.

To trace a derived rule takes a millisecond, and a compiler asks for the same shapes often.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .._jax import struct_of

Fact = TypeVar("Fact")

MOST_KEPT = 1024
"""How many facts of each kind are kept."""


class _Identity:
    """An object that is compared by identity, and kept alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def cached_by_shape(function: Callable[..., Fact]) -> Callable[..., Fact]:
    """Cache a function of ``(owners, params, x, y, weights)`` that looks at shapes and dtypes only.

    The ``owners`` are compared by identity. ``x`` (or ``None``), ``y`` and each of the ``weights``
    are abstract values. Errors are not cached, and neither are parameters that cannot be hashed.
    """

    @functools.lru_cache(MOST_KEPT)
    def known(owners: Any, params: Any, x: Any, y: Any, weights: Any) -> Fact:
        return function(tuple(o.value for o in owners), dict(params), x, y, dict(weights))

    @functools.wraps(function)
    def found(
        owners: tuple[Any, ...], params: Mapping[str, Any], x: Any, y: Any, weights: Any
    ) -> Fact:
        x, y = None if x is None else struct_of(x), struct_of(y)
        weights = {name: struct_of(weight) for name, weight in weights.items()}
        key = tuple(map(_Identity, owners)), tuple(params.items()), x, y, tuple(weights.items())
        try:
            hash(key)
        except TypeError:
            return function(owners, params, x, y, weights)
        return known(*key)

    return found

"""Lazy registration of primitives, at the first use of their operation.

The registries initially contain the operations that their documentation lists.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import TypeAlias

from ..primitive import ETPPrimitive, register_primitive_spec
from ..spec import ETPPrimitiveSpec

Primitives: TypeAlias = Callable[[], tuple[ETPPrimitive, ETPPrimitive]]
"""Return the primitives of an operation, for one sample and for a batch; register them first."""

_later: list[Primitives] = []
_lock = threading.Lock()


def on_demand(*, vector: ETPPrimitiveSpec, batch: ETPPrimitiveSpec) -> Primitives:
    """Return a function that registers two primitives when it is first called.

    Parameters
    ----------
    vector, batch
        Declarations for one sample and for a batch; the ``batched_form`` of the first becomes the
        other.
    """

    @functools.cache
    def registered() -> tuple[ETPPrimitive, ETPPrimitive]:
        of_batch = register_primitive_spec(batch)
        of_sample = dataclasses.replace(vector, batched_form=of_batch)
        return register_primitive_spec(of_sample), of_batch

    def primitives() -> tuple[ETPPrimitive, ETPPrimitive]:
        with _lock:
            return registered()

    _later.append(primitives)
    return primitives


def register_every_operation() -> None:
    """Register all operations that are otherwise registered at their first use."""
    for primitives in _later:
        primitives()

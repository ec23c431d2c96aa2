"""Operations whose primitives are registered where they are first used.

The registries begin with the operations that they are documented with.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import TypeAlias

from ..primitive import ETPPrimitive, register_primitive_spec
from ..spec import ETPPrimitiveSpec

Primitives: TypeAlias = Callable[[], tuple[ETPPrimitive, ETPPrimitive]]
"""Returns the primitives of an operation, of one sample and of a batch; registers them first."""

_later: list[Primitives] = []
_lock = threading.Lock()


def on_demand(*, vector: ETPPrimitiveSpec, batch: ETPPrimitiveSpec) -> Primitives:
    """Return what registers two primitives when it is first called.

    Parameters
    ----------
    vector, batch
        Of one sample, whose ``batched_form`` becomes the other, and of a batch.
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
    """Register all that would be registered when it is first used."""
    for primitives in _later:
        primitives()

"""Cache of a learner's compiled drivers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from .._graph import ETraceGraph, SequenceRow
from .._typing import PyTree
from .chunks import checkpointed_bytes
from .function_key import key_of
from .options import Chosen

MOST_KEPT = 32
"""Maximum number of drivers that a learner keeps. A driver belongs to a step function with shapes
and options. Programs use a few of them. Each contains executables of several megabytes and the
captured values of the function."""


class DriverKey(NamedTuple):
    """Cache key of a driver besides the user's functions.

    Attributes
    ----------
    method, options, weights
        The method, its options, and the parameters that it differentiates.
    graph
        The analysed model.
    placement
        Placement of the arrays on the learner's mesh; ``None``: no mesh.
    has_mask, reset_axes
        Whether there is a mask, and the number of axes of ``reset``.
    structure, slices
        Structure of the sequences, and shape and dtype of one step of each.
    states
        Identities of the model's States.
    mesh
        Mesh of a ``shard_map`` around the call; ``None``: there is none.
    """

    method: str
    options: tuple[object, ...]
    weights: Chosen | None
    graph: ETraceGraph
    placement: object = None
    has_mask: bool = False
    reset_axes: int | None = None
    structure: PyTree = None
    slices: tuple[object, ...] = ()
    states: tuple[int, ...] = ()
    mesh: object = None


class Compilations:
    """The drivers that one learner has compiled; a clone starts with an empty cache."""

    def __init__(self, owner: object = None) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._kept: dict[tuple[Any, ...], Any] = {}

    def is_of(self, learner: object) -> bool:
        """Test whether this cache belongs to a learner."""
        return self._owner() is learner

    def find(
        self,
        functions: Iterable[Callable[..., PyTree]],
        features: DriverKey,
        make: Callable[[Hashable], Any],
    ) -> Any:
        """Return the cached driver for functions and features, or compile it with its key.

        Drivers of functions that read tracers of an enclosing transformation are not cached.
        """
        keys, reads_tracers = list(zip(*map(key_of, functions), strict=True)) or ((), ())
        key = (*keys, features)
        if any(reads_tracers):
            return make((self, key))  # the enclosing transformation compiles it
        driver = self._kept.pop(key) if key in self._kept else make((self, key))
        self._kept[key] = driver  # the last key is the one used last
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return driver

    def sequences(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield the chunks that the methods have used for an analysed model."""
        for (*_, features), driver in list(self._kept.items()):
            if features.graph is graph:
                for (_, from_zero), cut in driver.body.chunks_by_length.items():
                    yield SequenceRow(
                        method=features.method,
                        steps=cut.steps,
                        from_zero=from_zero,
                        chunk_size=cut.length,
                        chunks=cut.count,
                        record_bytes=cut.record_bytes,
                        budget=cut.budget,
                        checkpointed_bytes=checkpointed_bytes(graph, cut.steps),
                    )

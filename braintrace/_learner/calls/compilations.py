"""Cache of a learner's compiled drivers, bounded and counted."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..._arguments import level_of_user
from ..._errors import FOURTH, RecompilationWarning
from ..._graph import ETraceGraph, SequenceRow
from ..._runtime.states.lru_cache import LRUCache
from ..._typing import PyTree
from .arguments import Chosen
from .chunks import ChunksByLength
from .function_key import key_of, line_of

MOST_KEPT = 32
"""Maximum number of drivers that a learner keeps. A driver belongs to a step function with shapes
and options. Programs use a few of them. Each contains executables of several megabytes and the
captured values of the function."""


class HasChunks(Protocol):
    """A sequence program, as far as a report reads it."""

    @property
    def chunks_by_length(self) -> ChunksByLength:
        """Chunks of the sequences so far."""
        ...


Driver = TypeVar("Driver", bound=HasChunks)


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
    forecasts
        Structure of the forecasts that wait for a label; ``None``: not read.
    environment
        Values of ``brainstate.environ`` that the user's functions may read; see `surroundings`.
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
    forecasts: object = None
    environment: object = None


@dataclasses.dataclass(eq=False)
class _Compiled(Generic[Driver]):
    features: DriverKey
    driver: Driver
    lengths: set[int] = dataclasses.field(default_factory=set)


class Compilations(Generic[Driver]):
    """The drivers that one learner has compiled.

    A clone or copy of a learner shares its attributes, but starts with an empty cache.

    Parameters
    ----------
    owner
        The learner.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._kept: LRUCache[object, _Compiled[Driver]] = LRUCache(MOST_KEPT)
        self._count_of_line: LRUCache[str, int] = LRUCache(MOST_KEPT)

    def is_of(self, learner: object) -> bool:
        """Test whether this cache belongs to a learner."""
        return self._owner() is learner

    def __reduce__(self) -> tuple[type[Compilations[Any]], tuple[()]]:
        return Compilations, ()

    def find(
        self,
        functions: Mapping[str, Callable[..., PyTree]],
        features: DriverKey,
        length: int,
        make: Callable[[], Driver],
    ) -> Driver:
        """Return the cached driver for functions and features, or compile it.

        Drivers of functions that read tracers of an enclosing transformation are not cached.
        """
        keys = [key_of(function) for function in functions.values()]
        if None in keys:
            return make()  # the enclosing transformation compiles it
        key = (*keys, features)
        entry = self._kept.get(key)
        if entry is None:
            entry = _Compiled(features, make())
        self._kept[key] = entry
        if functions and length not in entry.lengths:
            self._count(line_of(functions["step_fn"]))
        entry.lengths.add(length)
        return entry.driver

    def sequences(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield the chunks that the methods have used for an analysed model."""
        for compiled in list(self._kept.values()):
            if compiled.features.graph is graph:
                for (_, from_zero), cut in compiled.driver.chunks_by_length.items():
                    yield SequenceRow(
                        method=compiled.features.method,
                        steps=cut.steps,
                        from_zero=from_zero,
                        chunk_size=cut.length,
                        chunks=cut.count,
                        record_bytes=cut.record_bytes,
                        budget=cut.budget,
                    )

    def _count(self, line: str) -> None:
        """Warn if one line of the user's code has been compiled often."""
        self._count_of_line[line] = count = self._count_of_line.get(line, 0) + 1
        if count == FOURTH:
            warnings.warn(
                f"`step_fn` of {line} is compiled for the fourth time, and each time takes as long "
                "as the first. A call compiles again if the code, the defaults or the closed-over "
                "values of `step_fn` or `update_fn` differ, attributes or values of "
                "`brainstate.environ` that they read, or the length, shapes, dtypes or options. "
                "Define functions once, keep values that change in a State or pass them "
                "as a sequence, and pad sequences to a common length with `mask`.",
                RecompilationWarning,
                stacklevel=level_of_user(),
            )

"""Bodies: the pure functions that a driver runs, one for each of a learner's methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import brainstate
import jax

from .._graph import Traces
from .._runtime.model_states import States
from .._runtime.program import Take
from .._typing import PyTree
from .chunks import ChunksByLength
from .options import Options

Initial: TypeAlias = list[PyTree]
"""Values of the short-term States at the start of a sequence, in the order of the States."""

Resets: TypeAlias = tuple[jax.Array | None, Initial]
"""Flags of every step, ``(T,)`` or ``(T, batch)``, and the initial values of States."""

Arguments: TypeAlias = tuple[PyTree, jax.Array | None, Resets]
"""``(sequences, mask, resets)``: the arguments of every body."""


@dataclasses.dataclass(frozen=True)
class DeferredTraces:
    """Deferred traces after a sequence, which are computed at the next read.

    Attributes
    ----------
    sources
        The values that they are computed from.
    before
        The traces before these steps; ``None``: the traces before the sequence.
    """

    sources: PyTree
    before: Traces | None


jax.tree_util.register_dataclass(DeferredTraces)

BodyResult: TypeAlias = tuple[PyTree, list[PyTree], "Traces | DeferredTraces | None"]
"""Result of a body: results, new values of States, and traces, or None if it has none."""

LentTraces: TypeAlias = tuple[Traces | None, bool]
"""Traces for a body, and whether their buffers may be donated."""


class HasZero(Protocol):
    """Traces that may be known to be zero."""

    @property
    def is_zero(self) -> bool: ...


def taken(held: HasZero, take: Take) -> LentTraces:
    """Return the traces, and whether their buffers may be donated."""
    return take()


def taken_unless_zero(held: HasZero, take: Take) -> LentTraces:
    """Return the same, and ``None`` for traces that are known to be zero."""
    return (None, True) if held.is_zero else take()


def not_taken(held: HasZero, take: Take) -> LentTraces:
    """Return no traces, for a body that does not use them."""
    return None, False


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A pure function of values of States, and the States of these values.

    Attributes
    ----------
    run
        ``(values, traces, sequences, mask, resets) -> (results, written values, traces)``. Traces
        may be `DeferredTraces`, or None if there are none.
    states
        Returns the States whose values it takes, given the States of the model by path.
    written
        Selects the items of written States from one item per State.
    results
        Converts results and options to the user's results.
    take
        Takes the traces; see `taken`.
    replaces
        Tests for sequences whether the new traces can overwrite the old ones.
    finish
        ``(sources, before) -> traces`` of `DeferredTraces` traces.
    chunks_by_length
        Chunks of each sequence length so far, with zero initial traces or not.
    check
        Refuses results before anything is stored; ``None``: no check.
    notice
        Reports results, and the index of the first step, after they are stored.
    """

    run: Callable[..., BodyResult]
    states: Callable[[States], Sequence[brainstate.State]]
    written: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    results: Callable[[PyTree, Options], PyTree] = lambda found, options: found
    take: Callable[[HasZero, Take], LentTraces] = taken
    replaces: Callable[[PyTree, Traces | None], bool] = lambda sequences, traces: True
    finish: Callable[[PyTree, Traces | None], Traces] | None = None
    chunks_by_length: ChunksByLength = dataclasses.field(default_factory=dict)
    check: Callable[[PyTree], None] | None = None
    notice: Callable[[PyTree, int], None] | None = None


def run_to_the_end(
    body: Body, values: list[PyTree], traces: Traces | None, *arguments: PyTree
) -> tuple[PyTree, list[PyTree], Traces | None]:
    """Run a body, and compute its deferred traces."""
    results, written, after = body.run(values, traces, *arguments)
    if isinstance(after, DeferredTraces):
        assert body.finish is not None
        after = body.finish(after.sources, traces if after.before is None else after.before)
    return results, written, after

"""Body: the pure function of a method, with the States of its values and its arguments.

    (values of States, traces, arguments) -> (results, new values of written States, new traces)

A body takes traces that are known to be zero as ``None``, and may return `Deferred` traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import brainstate
import jax

from .._graph import Traces
from .._typing import Path, PyTree
from .chunks import Chunks, ChunksByLength
from .traces import Deferred

Initial: TypeAlias = list[PyTree]
"""Values of the short-term States at the start of a sequence, in the order of the States."""


class Arguments(NamedTuple):
    """Arguments of the method of a sequence.

    Attributes
    ----------
    sequences
        The user's, time first.
    mask
        The weight of every step, or None.
    flags
        The samples that are reset before every step, ``(T,)`` or ``(T, batch)``, or None.
    initial
        With flags, the initial values of States.
    """

    sequences: PyTree
    mask: jax.Array | None = None
    flags: jax.Array | None = None
    initial: Initial = []  # noqa: RUF012 - never changed


BodyResult: TypeAlias = tuple[PyTree, list[PyTree], Traces | Deferred | None]
"""Result of a body: results and verdicts, new values of States, and traces, if it has any."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The pure function of a method, and the States of its values.

    Attributes
    ----------
    run
        ``(values, traces, arguments) -> ((results, verdicts), written values, traces)``.
    states, is_written
        The States whose values it takes, and whether it writes each.
    reads
        The traces that it takes: ``"zero"``, those known to be zero as ``None``.
    batch_axis
        The axis of the samples in the sequences.
    finish
        ``(sources, before) -> traces`` of `Deferred` traces.
    parameters
        Paths of the parameters whose gradients are the first result.
    cut
        Cuts a sequence of some steps, from zero traces or not, into chunks; only their loop
        overwrites the old traces. ``None``: every call does.
    chunks_by_length
        Chunks of each sequence length so far, with zero initial traces or not.
    check
        Refuses verdicts before anything is stored; ``None``: no check.
    notice
        Reports verdicts, and the index of the first step, after they are stored.
    """

    run: Callable[..., BodyResult]
    states: Sequence[brainstate.State]
    is_written: Sequence[bool]
    reads: Literal["zero", "arrays", "nothing"] = "arrays"
    batch_axis: int = 1
    finish: Callable[[PyTree, Traces | None], Traces] | None = None
    parameters: tuple[Path, ...] = ()
    cut: Callable[[int, bool], Chunks] | None = None
    chunks_by_length: ChunksByLength = dataclasses.field(default_factory=dict)
    check: Callable[[PyTree], None] | None = None
    notice: Callable[[PyTree, int], None] | None = None

    def finished(self, after: Any, traces: Traces | None) -> Any:
        """Return the traces after a call as arrays, given those before it."""
        if not isinstance(after, Deferred):
            return after
        assert self.finish is not None
        before: Any = traces if after.before is None else after.before
        return self.finish(after.sources, before)

"""Programs: the pure function of a method, compiled, with the States of its values.

    (values of States, traces, arguments) -> (results, new values of written States, new traces)

A program takes traces that are known to be zero as ``None``, and may return `DeferredTraces`; JAX
compiles one program for each form. The learner and the user's `LearnerState` run the same programs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import brainstate
import jax

from .._graph import ETraceGraph, SequenceRow, Traces
from .._jax import for_devices
from .._typing import Path, PyTree
from .chunks import Chunks, ChunksByLength, checkpointed_bytes
from .compiled import CompiledStep
from .options import key_of
from .traces import Deferred, Jitted, Zero

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


@jax.tree_util.register_dataclass
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


BodyResult: TypeAlias = tuple[PyTree, list[PyTree], "Traces | DeferredTraces | None"]
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
        ``(sources, before) -> traces`` of `DeferredTraces`.
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
        if not isinstance(after, DeferredTraces):
            return after
        assert self.finish is not None
        return self.finish(after.sources, traces if after.before is None else after.before)


class Program:
    """A compiled body.

    Parameters
    ----------
    body, step, states
        The body, the compiled step, and the States of the model by path.
    key
        What programs with the same deferred traces have in common.
    """

    def __init__(
        self,
        body: Body,
        step: CompiledStep,
        states: Mapping[Path, brainstate.State],
        key: Hashable = None,
    ) -> None:
        self.body, self._placement = body, step.placement
        self.written = list(itertools.compress(body.states, body.is_written))
        self.followed = [states[path] for path in step.followed]
        self.followed_paths = step.followed
        paths = {id(state): path for path, state in states.items()}
        self._paths = [paths.get(id(state)) for state in body.states]
        self._whole = self._named(functools.partial(self._run, defers=False))
        if body.finish is not None:
            self._deferring = self._named(functools.partial(self._run, defers=True))
            self._finish = Jitted(self._finished, key)

    def _named(self, function: Callable[..., PyTree]) -> Jitted:
        """Return a program that is named after the body, as profilers and dumps of XLA show it."""
        return Jitted(functools.update_wrapper(function, self.body.run))

    def __call__(
        self,
        values: list[PyTree],
        traces: Traces | None,
        arguments: Arguments,
        steps: int,
        *,
        is_owned: bool,
        defers: bool,
        done: list[Any],
    ) -> None:
        """Run it, and append its results, new values, and traces (``None``: they stay).

        ``is_owned`` allows it to donate the buffers of the traces, and ``defers`` to leave
        `DeferredTraces`. A single step that continues a sequence is followed by a next one, which
        reads the traces: two programs would take longer than one.
        """
        if self._placement is not None:
            values, traces, arguments = self._on_mesh(values, traces, arguments)
        if self.body.finish is None or not defers or not (traces is None or steps > 1):
            self._whole(values, traces, arguments, in_place=is_owned, done=done)
            return
        is_owned = is_owned and traces is not None and self._overwrites(steps)
        self._deferring(values, traces, arguments, in_place=is_owned, done=done)

    def _overwrites(self, steps: int) -> bool:
        if self.body.cut is None:
            return False
        cut = self.body.chunks_by_length.get((steps, False)) or self.body.cut(steps, False)
        return cut.length < steps

    def changes(self, done: BodyResult, traces: Traces | None) -> tuple[PyTree, list[PyTree], Any]:
        """Return results, new values, and the new traces in their form."""
        results, written, after = done
        if isinstance(after, DeferredTraces):
            before: Any = traces if after.before is None else after.before
            before = Zero() if before is None else before
            return results, written, Deferred(after.sources, before, self._finish)
        return results, written, after

    def _run(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments, defers: bool
    ) -> BodyResult:
        """Run the body; the states before a call are constants in a user's own gradient."""
        body, mesh = self.body, self._placement
        if body.reads != "nothing":
            pairs = zip(body.states, values, strict=True)
            values = [jax.lax.stop_gradient(v) if _is_short(s) else v for s, v in pairs]
        with for_devices(None if mesh is None else mesh.devices):
            results, written, after = body.run(values, traces, arguments)
            after = after if defers else body.finished(after, traces)
        if mesh is None:
            return results, written, after
        paths = itertools.compress(self._paths, body.is_written)
        written = list(map(mesh.value, paths, written))
        if isinstance(after, DeferredTraces):
            placed = None if after.before is None else mesh.traces(after.before)
            return results, written, DeferredTraces(after.sources, placed)
        return results, written, None if after is None else mesh.traces(after)

    def _finished(self, sources: PyTree, before: Traces | Zero) -> Traces:
        assert self.body.finish is not None
        mesh, before_or_none = self._placement, None if isinstance(before, Zero) else before
        with for_devices(None if mesh is None else mesh.devices):
            after = self.body.finish(sources, before_or_none)
        return after if mesh is None else mesh.traces(after)

    def _on_mesh(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments
    ) -> tuple[list[PyTree], Traces | None, Arguments]:
        mesh = self._placement
        assert mesh is not None
        *given, initial = arguments
        sequences, mask, flags = mesh.by_sample(given, self.body.batch_axis)
        values = list(map(mesh.value, self._paths, values))
        traces = None if traces is None else mesh.traces(traces)
        return values, traces, Arguments(sequences, mask, flags, initial)


def _is_short(state: brainstate.State) -> bool:
    return isinstance(state, brainstate.ShortTermState)


# --- the programs of a learner


MOST_KEPT = 32
"""Maximum number of programs that a learner keeps. A program belongs to a step function with shapes
and options. Users call a few of them. Each contains executables of several megabytes and the
captured values of the function."""


class Programs:
    """The programs that a learner has compiled."""

    def __init__(self) -> None:
        self._update: Callable[..., PyTree] | None = None
        self._key_of_update: tuple[Hashable, ...] = ()
        self._kept: dict[tuple[Any, ...], Program] = {}

    def find(
        self,
        functions: Iterable[Callable[..., PyTree]],
        update: Callable[..., PyTree] | None,
        key: tuple[Any, ...],
        make: Callable[[Hashable], Program],
    ) -> Program:
        """Return the cached program for functions and a key, or make it with the whole key.

        A key begins with the method and the analysed model, and ends with the ids of the States.
        Programs of functions that read tracers of an enclosing transformation are not cached.
        """
        if (
            update is not None and update is not self._update
        ):  # the key of an optimizer is computed once
            self._update, self._key_of_update = update, key_of(update)[0]
        own: list[Hashable] = [() if update is None else self._key_of_update]
        reads_tracers = False
        for function in functions:
            key_of_function, reads = key_of(function)
            own.append(key_of_function)
            reads_tracers = reads_tracers or reads
        whole = (*own, key)
        if reads_tracers:
            return make(whole)  # the enclosing transformation compiles it
        program = self._kept.pop(whole, None) or make(whole)
        self._kept[whole] = program  # the last key is the one used last
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return program

    def rows(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield the chunks that the methods have used for an analysed model."""
        for (*_, key), program in list(self._kept.items()):
            for (_, from_zero), cut in program.body.chunks_by_length.items():
                if key[1] is graph:
                    yield SequenceRow(
                        method=key[0],
                        steps=cut.steps,
                        from_zero=from_zero,
                        chunk_size=cut.length,
                        chunks=cut.count,
                        record_bytes=cut.record_bytes,
                        budget=cut.budget,
                        checkpointed_bytes=checkpointed_bytes(graph, cut.steps),
                    )

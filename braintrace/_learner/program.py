"""Programs: the pure function of a method, compiled, with the States of its values.

    (values of States, traces, *arguments) -> (results, new values of written States, new traces)

A program takes traces that are known to be zero as ``None``, and may return `DeferredTraces`; JAX
compiles one program for each form. The learner and the user's `LearnerState` run the same programs.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import brainstate
import jax

from .._core.traces import Pairs, pack, unpack
from .._graph import ETraceGraph, SequenceRow, Traces
from .._jax import for_devices
from .._typing import Path, PyTree
from ..sharding import Placement
from .chunks import Chunks, ChunksByLength, checkpointed_bytes
from .options import key_of
from .traces import Deferred, Zero

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
"""Result of a body: results, new values of States, and traces, or None if it has none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """The pure function of a method, and the States of its values.

    Attributes
    ----------
    run
        ``(values, traces, *arguments) -> ((results, verdicts), written values, traces)``.
    states
        The States whose values it takes.
    written
        Selects the items of written States from one item per State.
    reads
        The traces that it takes: ``"zero"``, those known to be zero as ``None``.
    batch_axis
        The axis of the samples in the sequences.
    finish
        ``(sources, before) -> traces`` of `DeferredTraces`.
    parameters
        Paths of the parameters whose gradients are the first result.
    as_params
        Converts gradients by path to the user's form; ``None``: it is that one.
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
    written: Callable[[Sequence[Any]], Sequence[Any]]
    reads: Literal["zero", "arrays", "nothing"] = "arrays"
    batch_axis: int = 1
    finish: Callable[[PyTree, Traces | None], Traces] | None = None
    parameters: tuple[Path, ...] = ()
    as_params: Callable[[dict[Path, Any]], PyTree] | None = None
    cut: Callable[[int, bool], Chunks] | None = None
    chunks_by_length: ChunksByLength = dataclasses.field(default_factory=dict)
    check: Callable[[PyTree], None] | None = None
    notice: Callable[[PyTree, int], None] | None = None

    def run_to_the_end(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        """Run it, and compute deferred traces."""
        results, written, after = self.run(values, traces, arguments)
        if isinstance(after, DeferredTraces):
            assert self.finish is not None
            after = self.finish(after.sources, traces if after.before is None else after.before)
        return results, written, after


class Jitted:
    """A compiled function of values, traces and arguments.

    Functions with the same key are equal. In the transformations of brainstate, the function of
    deferred traces is part of the type of a State, and a change of it means a new compilation.
    """

    def __init__(self, function: Callable[..., Any], key: Hashable | None = None) -> None:
        self._key = id(self) if key is None else key
        self._hash = hash(self._key)
        self._run = jax.jit(function)
        self._run_in_place = jax.jit(function, donate_argnums=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Jitted) and other._key == self._key

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *arguments: Any, in_place: bool, done: list[Any]) -> None:
        """Run the function and append its results; ``in_place`` donates the buffers of the traces.

        `map` and `extend` are C code: no signal handler runs between the function and its results.
        """
        run = self._run_in_place if in_place else self._run
        done.extend(map(run, *zip(arguments)))


class Program:
    """A compiled body; ``key`` is what programs with the same deferred traces have in common.

    Without ``placement`` there is no mesh; ``paths`` are those of the model's States by identity,
    and ``followed`` those of the States that the traces follow.
    """

    def __init__(
        self,
        body: Body,
        pairs: Pairs,
        placement: Placement | None,
        paths: Mapping[int, Path],
        followed: Sequence[Path],
        key: Hashable = None,
    ) -> None:
        self.body, self.written, self.followed = body, body.written(body.states), followed
        self._pairs, self._placement = pairs, placement
        self._paths = [paths.get(id(state)) for state in body.states]
        self._whole, self._deferring = self._named(self._to_the_end), None
        if body.finish is not None:
            self._deferring = self._named(self._run)
            self._finish = Jitted(self._finished, key)

    def _named(self, function: Callable[..., PyTree]) -> Jitted:
        """Return a program that is named after the body, as profilers and dumps of XLA show it."""
        return Jitted(functools.update_wrapper(functools.partial(function), self.body.run))

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
        """Run it, and append what `changes` takes.

        ``is_owned`` allows it to donate the buffers of the traces, and ``defers`` to leave
        `DeferredTraces`. A single step that continues a sequence is followed by a next one, which
        reads the traces: two programs would take longer than one.
        """
        if self._placement is not None:
            values, traces, arguments = self._on_mesh(values, traces, arguments)
        run = self._whole
        if self._deferring is not None and defers and (traces is None or steps > 1):
            run = self._deferring
            is_owned = is_owned and traces is not None and self._overwrites(steps)
        run(values, traces, arguments, in_place=is_owned, done=done)

    def _overwrites(self, steps: int) -> bool:
        if self.body.cut is None:
            return False
        cut = self.body.chunks_by_length.get((steps, False)) or self.body.cut(steps, False)
        return cut.length < steps

    def changes(self, done: BodyResult, traces: Traces | None) -> tuple[PyTree, list[PyTree], Any]:
        """Return results, new values, and the new traces; ``None``: they stay."""
        results, written, after = done
        if isinstance(after, DeferredTraces):
            before: Any = traces if after.before is None else after.before
            is_double = bool(jax.config.jax_enable_x64)
            before = Zero() if before is None else before
            return results, written, Deferred(after.sources, before, self._finish, is_double)
        return results, written, after

    def _run(self, values: list[PyTree], traces: Traces | None, arguments: Arguments) -> BodyResult:
        """Run the body; the states before a call are constants in a user's own gradient."""
        body, mesh, traces = self.body, self._placement, self._packed(traces)
        if body.reads != "nothing":
            pairs = zip(body.states, values, strict=True)
            values = [jax.lax.stop_gradient(v) if _is_short(s) else v for s, v in pairs]
        if mesh is None:
            return body.run(values, traces, arguments)
        values, traces, placed = self._on_mesh(values, traces, arguments)
        with for_devices(mesh.devices):
            results, written, after = body.run(values, traces, placed)
        written = list(map(mesh.value, body.written(self._paths), written))
        if isinstance(after, DeferredTraces):
            return results, written, dataclasses.replace(after, before=self._placed(after.before))
        return results, written, self._placed(after)

    def _to_the_end(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments
    ) -> BodyResult:
        """Run the body and compute deferred traces, in the form in which the traces are given."""
        before = self._packed(traces)
        results, written, after = self._run(values, before, arguments)
        if isinstance(after, DeferredTraces):
            after = self._finished(after.sources, before if after.before is None else after.before)
        return results, written, after if before is traces or after is None else unpack(after)

    def _finished(self, sources: PyTree, before: Traces | Zero | None) -> Traces:
        before = None if isinstance(before, Zero) else self._packed(before)
        assert self.body.finish is not None
        if self._placement is None:
            return self.body.finish(sources, before)
        with for_devices(self._placement.devices):
            return self._placement.traces(self.body.finish(sources, self._placed(before)))

    def _packed(self, traces: Traces | None) -> Traces | None:
        return pack(traces, self._pairs) if isinstance(traces, dict) else traces

    def _placed(self, traces: Traces | None) -> Traces | None:
        return None if traces is None or self._placement is None else self._placement.traces(traces)

    def _on_mesh(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments
    ) -> tuple[list[PyTree], Traces | None, Arguments]:
        mesh = self._placement
        assert mesh is not None
        *given, initial = arguments
        sequences, mask, flags = mesh.by_sample(given, self.body.batch_axis)
        values = list(map(mesh.value, self._paths, values))
        return values, self._placed(traces), Arguments(sequences, mask, flags, initial)


def _is_short(state: brainstate.State) -> bool:
    return isinstance(state, brainstate.ShortTermState)


# --- the programs of a learner


MOST_KEPT = 32
"""Maximum number of programs that a learner keeps. A program belongs to a step function with shapes
and options. Users call a few of them. Each contains executables of several megabytes and the
captured values of the function."""


class Programs:
    """The programs that one learner has compiled; a clone starts with an empty cache."""

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)
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

        A key begins with the method and the analysed model.
        Programs of functions that read tracers of an enclosing transformation are not cached.
        """
        if update is not self._update:  # the key of an optimizer is computed once
            self._update, self._key_of_update = update, () if update is None else key_of(update)[0]
        own, reads_tracers = [self._key_of_update], False
        for function in functions:
            key_of_function, reads = key_of(function)
            own.append(key_of_function)
            reads_tracers = reads_tracers or reads
        whole = (*own, key)
        if reads_tracers:
            return make((self, whole))  # the enclosing transformation compiles it
        program = self._kept.pop(whole, None) or make((self, whole))
        self._kept[whole] = program  # the last key is the one used last
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return program

    def rows(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield the chunks that the methods have used for an analysed model."""
        for (*_, key), program in list(self._kept.items()):
            if key[1] is graph:
                for (_, from_zero), cut in program.body.chunks_by_length.items():
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

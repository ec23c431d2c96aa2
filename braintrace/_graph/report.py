"""Report of a compiled model: which weights learn online, what is cut, and the memory."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from .._tables import Printed, Table

Level = Literal["info", "warning"]

DiagnosticKind = Literal[
    "truncated", "no-trace", "not-marked", "untraced-state", "nonlinear-gradient"
]
"""Kinds of diagnostics. ``docs/compiler.md`` has an example and the remedy of each."""


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One diagnostic of the compiler.

    Attributes
    ----------
    level
        ``'warning'`` for a loss of accuracy, ``'info'`` for anything else.
    kind
        The kind, such as ``'truncated'``; the page *What the compiler tells you* has all five.
    message
        The approximation, its place, its cause and its remedy, in full sentences.
    paths
        Printed paths of the parameters and states concerned.
    source
        ``file:line (function)`` of the operation, if there is one.
    """

    level: Level
    kind: DiagnosticKind
    message: str
    paths: tuple[str, ...] = ()
    source: str | None = None

    def __str__(self) -> str:
        return self.message + (f" [{self.source}]" if self.source else "")


class ApproximationWarning(UserWarning):
    """Warn that a part of the gradient is approximated more coarsely than expected."""


@dataclasses.dataclass(frozen=True)
class RelationRow:
    """One weight that learns online.

    Attributes
    ----------
    key
        Name of the relation and of its traces; for a full-Jacobian rule, name of the parameter.
    operation, source
        The primitive, and the line of the user's call; ``'any'`` and empty for a parameter.
    parameters
        Printed paths of the parameters that its weights depend on.
    x_shape, y_shape
        Shape of the operation's input (``None``: no input) and output (``None``: no single output).
    states
        The states of every hidden group that it reaches.
    traces
        ``(state, array, shape)`` of the stored traces; the state is empty for a trace that follows
        no single state.
    stored_bytes
        Size of those traces.
    rule
        The algorithm that carries it, in a model with several.
    """

    key: str
    operation: str
    source: str
    parameters: tuple[str, ...]
    x_shape: tuple[int, ...] | None
    y_shape: tuple[int, ...] | None
    states: tuple[tuple[str, ...], ...]
    traces: tuple[tuple[str, str, tuple[int, ...]], ...]
    stored_bytes: int
    rule: str | None = None

    @property
    def cells(self) -> list[str]:
        """The cells of the row."""
        traces = (f"{state} ({array}): {shape}".lstrip() for state, array, shape in self.traces)
        listed = (f"{self.rule}: " if self.rule else "") + (", ".join(traces) or "none needed")
        shapes = ("-" if shape is None else str(shape) for shape in (self.x_shape, self.y_shape))
        states = "; ".join(map(", ".join, self.states))
        return [self.key, *shapes, states, listed, f"{self.stored_bytes:,}"]


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """One hidden group.

    Attributes
    ----------
    index, states, shape
        Number of the group, its states, and the shape of its units.
    transition
        ``(from, to)``: the old states that each state reads elementwise in the next step.
    downstream
        States that no later step reads, computed from the new values of the others.
    """

    index: int
    states: tuple[str, ...]
    shape: tuple[int, ...]
    transition: tuple[tuple[str, str], ...]
    downstream: tuple[str, ...]

    @property
    def cells(self) -> list[str]:
        """The cells of the row."""
        arrows = ", ".join(f"{old}→{new}" for old, new in self.transition) or "none"
        after = f"; downstream: {', '.join(self.downstream)}" if self.downstream else ""
        return [str(self.index), ", ".join(self.states), str(self.shape), arrows + after]


@dataclasses.dataclass(frozen=True)
class DelayRow:
    """How a trace follows a delay, or another State with several values for each unit.

    Attributes
    ----------
    states, form
        Names of the States, and the traces that they have.
    stored_bytes
        Size of these traces.
    """

    states: str
    form: str
    stored_bytes: int


@dataclasses.dataclass(frozen=True)
class PlainRow:
    """One parameter without a trace, and the reason."""

    parameter: str
    reason: str


@dataclasses.dataclass(frozen=True)
class SequenceRow:
    """Chunks that one of a learner's methods uses for sequences of one length.

    Attributes
    ----------
    method
        Name of the method.
    steps
        Length of the sequence.
    from_zero
        Whether the traces before it are known to be zero.
    chunk_size, chunks
        Number of steps of a chunk, and number of chunks.
    record_bytes
        Size of the residuals of one chunk.
    checkpointed_bytes
        About how much backpropagation through time in ``sqrt(steps)`` checkpoints holds: the rival
        of a claim about memory.
    """

    method: str
    steps: int
    from_zero: bool
    chunk_size: int
    chunks: int
    record_bytes: int
    checkpointed_bytes: int

    @property
    def cells(self) -> list[str]:
        """The cells of the row."""
        method, steps, from_zero, *of_chunk = dataclasses.astuple(self)
        numbers = (f"{n:,}" for n in (steps, *of_chunk))
        return [method, "zero" if from_zero else "any", *numbers]


@dataclasses.dataclass(frozen=True)
class Report(Printed):
    """The weights of a compiled model that learn online, and their memory.

    ``print`` shows it as tables.

    Attributes
    ----------
    relations, groups, without_trace, diagnostics
        Weights with a trace, hidden groups, parameters without a trace, and what is cut.
    stored_bytes
        Size of the traces at the compiled batch size.
    readouts, filter_bytes
        Names of the leaky readouts with filters, and the size of these filters.
    carried_bytes
        Size of the arrays that a learner's own algorithm carries, in its dtype; ``None`` for a
        graph.
    sequences
        Chunks of the learner's sequences, for every method and length so far.
    delays
        The form and the size of the traces of delays.
    skipped_updates
        Number of updates that were skipped because a value was not finite.
    mesh
        The mesh of a sharded learner.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> learner = braintrace.compile(Leaky(), "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> report = learner.report()
    >>> report.relations[0].parameters, report.stored_bytes
    (('w',), 24)
    """

    relations: tuple[RelationRow, ...]
    groups: tuple[GroupRow, ...]
    without_trace: tuple[PlainRow, ...]
    diagnostics: tuple[Diagnostic, ...]
    stored_bytes: int
    carried_bytes: int | None = None
    sequences: tuple[SequenceRow, ...] = ()
    readouts: tuple[str, ...] = ()
    filter_bytes: int = 0
    delays: tuple[DelayRow, ...] = ()
    skipped_updates: int = 0
    mesh: str | None = None

    def _parts(self) -> Iterator[Table | str]:
        heads = ["relation", "x", "y", "hidden states", "traces", "bytes"]
        rows = [row.cells for row in self.relations]
        yield Table("Weights with an eligibility trace", heads, rows, numbers=[5])
        heads = ["group", "states", "shape", "transition"]
        yield Table("Hidden groups", heads, [row.cells for row in self.groups])
        if self.delays:
            rows = [[row.states, row.form, f"{row.stored_bytes:,}"] for row in self.delays]
            yield Table("Delays", ["states", "form", "bytes"], rows, numbers=[2])
        plain = [(row.parameter, row.reason) for row in self.without_trace]
        if plain:
            title = "Parameters without a trace (gradient of the current step)"
            yield Table(title, ["parameter", "why"], plain)
        yield from (f"{d.level}, {d.kind}: {d}" for d in self.diagnostics)
        yield f"Traces: {self.stored_bytes:,} bytes"
        if self.readouts:
            yield f"Filters of readouts {', '.join(self.readouts)}: {self.filter_bytes:,} bytes"
        if self.carried_bytes is not None:
            yield f"Carried by this learner: {self.carried_bytes:,} bytes"
        if self.skipped_updates:
            yield f"Skipped updates, not finite: {self.skipped_updates:,}"
        if self.mesh is not None:
            yield f"Sharded over {self.mesh}"
        if self.sequences:
            heads = ["call", "traces before", "steps", "of a chunk", "chunks", "bytes"]
            heads.append("BPTT in checkpoints")
            rows = [row.cells for row in self.sequences]
            yield Table("Sequences so far", heads, rows, numbers=range(2, 7))

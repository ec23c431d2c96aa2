"""Rows of a report, one class for each of its tables."""

import dataclasses

from ..diagnostics import DiagnosticKind, Level


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
    maps
        How the elements of the output map to the units of each group.
    traces
        ``(state, array, shape)`` of the stored traces; the state is empty for a trace that follows
        no single state.
    stored_bytes, possible_bytes
        Size of those traces, and of the traces that all states would have.
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
    maps: tuple[str, ...]
    traces: tuple[tuple[str, str, tuple[int, ...]], ...]
    stored_bytes: int
    possible_bytes: int
    rule: str | None = None


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


@dataclasses.dataclass(frozen=True)
class ReadoutRow:
    """One linear readout with its filters.

    Attributes
    ----------
    readout
        The hidden state.
    filters, shapes
        The states that are added for it, and their shapes.
    stored_bytes
        Size of these states.
    trace_bytes
        Size of the traces that weights have for them.
    """

    readout: str
    filters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    stored_bytes: int
    trace_bytes: int


@dataclasses.dataclass(frozen=True)
class PlainRow:
    """One parameter without a trace, and the reason."""

    parameter: str
    reason: str


@dataclasses.dataclass(frozen=True)
class DiagnosticRow:
    """One diagnostic of the compiler; see `Diagnostic`."""

    level: Level
    kind: DiagnosticKind
    message: str
    source: str | None


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
    budget
        Largest size allowed for them; ``None`` with a given ``chunk_size``, or for a window.
    """

    method: str
    steps: int
    from_zero: bool
    chunk_size: int
    chunks: int
    record_bytes: int
    budget: int | None

"""What a report says of each relation, group, readout, parameter, diagnostic and sequence."""

import dataclasses

from ..diagnostics import DiagnosticKind, Level


@dataclasses.dataclass(frozen=True)
class RelationRow:
    """One weight that learns online.

    Attributes
    ----------
    key
        Name of the relation, and of its traces; of the parameter, for a rule that carries those.
    operation, source
        The primitive, and the user's line that called it; ``'any'`` and empty for a parameter.
    parameters
        Printed paths of the parameters behind its weights.
    x_shape, y_shape
        Of the operation's input (``None`` where it has none) and output (``None``: no single one).
    states
        The states of every hidden group that it reaches.
    maps
        How the output's elements are laid over the positions of each group.
    traces
        ``(state, array, shape)`` of the traces that are stored; the state is empty for a trace that
        follows no single one.
    stored_bytes, possible_bytes
        Size of those traces, and of all that the states would have.
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
        Number of the group, its states, and the shape of its positions.
    transition
        ``(from, to)``: which states read which, position by position, in the next step.
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
    """One linear readout, whose derivative goes through filters; several may share one.

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
    """One parameter without a trace, and why it has none."""

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
    """How one of a learner's methods cuts sequences of one length into chunks.

    Attributes
    ----------
    method
        Name of the method.
    steps
        Length of the sequence.
    from_zero
        Whether the traces before it are known to be zero.
    chunk_size, chunks
        Number of steps of a chunk, and how many chunks there are.
    record_bytes
        What the steps of one chunk record.
    budget
        How many bytes that may be; ``None`` where ``chunk_size`` is given, or a window's.
    """

    method: str
    steps: int
    from_zero: bool
    chunk_size: int
    chunks: int
    record_bytes: int
    budget: int | None

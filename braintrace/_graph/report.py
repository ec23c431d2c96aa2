"""The compiled model as a table: printed, as plain data, and for notebooks."""

import dataclasses
import html
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._typing import path_name
from .diagnostics import DiagnosticKind, Level
from .hidden_group import HiddenGroup
from .method import TraceSpec, specs_of
from .relation import HiddenParamOpRelation
from .short_names import short_names, shortened
from .whole_state_report import whole_state_rows

if TYPE_CHECKING:
    from .graph import ETraceGraph

_HEADS = {
    "relations": ["relation", "x", "y", "hidden states", "map", "traces", "bytes"],
    "groups": ["group", "states", "shape", "transition"],
    "readouts": ["readout", "filters", "shapes", "bytes", "traces of filters"],
    "without_trace": ["parameter", "why"],
    "diagnostics": ["level", "kind", "message", "where"],
    "sequences": ["call", "steps", "traces before", "chunks", "bytes recorded", "budget"],
}
_TITLES = {
    "relations": "Relations (weights with an eligibility trace)",
    "groups": "Hidden groups",
    "readouts": "Linear readouts (exact through filters, which are further states)",
    "without_trace": "Parameters without a trace (gradient of the current step)",
    "diagnostics": "Diagnostics",
    "sequences": "Sequences (as calls so far have cut them)",
}


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


@dataclasses.dataclass(frozen=True)
class Report:
    """What learns online in a compiled model, how, and at what memory.

    ``print`` it for a table; a notebook shows it as HTML. There, but not in the attributes, names
    that are too long for a column are shortened.

    Attributes
    ----------
    relations, groups, readouts, without_trace, diagnostics
        The rows of the table.
    stored_bytes, possible_bytes
        Size of the traces at the compiled batch size, and the size they would have if structural
        zeros were stored.
    filter_bytes
        Size of the filters of linear readouts.
    carried_bytes
        Size of what a learner's own algorithm carries, in its dtype; ``None`` for a graph.
    sequences
        How a learner has cut sequences, for every method and length that it was called with.
    skipped_updates
        How many updates a learner has left out because something was not finite.

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
    diagnostics: tuple[DiagnosticRow, ...]
    stored_bytes: int
    possible_bytes: int
    carried_bytes: int | None = None
    sequences: tuple[SequenceRow, ...] = ()
    readouts: tuple[ReadoutRow, ...] = ()
    filter_bytes: int = 0
    skipped_updates: int = 0

    def __str__(self) -> str:
        def table(name: str, rows: list[list[str]]) -> list[str]:
            return [_TITLES[name], *_columns(_HEADS[name], rows)]

        lines = [line for name, rows in self._tables() for line in table(name, rows)]
        lines.append(self._total())
        if self.sequences:
            lines += table("sequences", list(map(_sequence_cells, self.sequences)))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, ready for JSON."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def _repr_html_(self) -> str:
        def table(name: str, rows: list[list[str]]) -> str:
            return f"<h4>{html.escape(_TITLES[name])}</h4>" + html_table(_HEADS[name], rows)

        parts = [table(name, rows) for name, rows in self._tables()]
        parts.append(f"<p>{html.escape(self._total())}</p>")
        if self.sequences:
            parts.append(table("sequences", list(map(_sequence_cells, self.sequences))))
        return "".join(parts)

    def _tables(self) -> list[tuple[str, list[list[str]]]]:
        rows = {
            "relations": [_relation_cells(row) for row in self.relations],
            "groups": [_group_cells(row) for row in self.groups],
            "readouts": [_readout_cells(row) for row in self.readouts],
            "without_trace": [[row.parameter, row.reason] for row in self.without_trace],
            "diagnostics": [[d.level, d.kind, d.message, d.source or ""] for d in self.diagnostics],
        }
        short = short_names(self._names())
        return [
            (name, [[shortened(cell, short) for cell in row] for row in cells])
            for name, cells in rows.items()
            if cells
        ]

    def _names(self) -> Iterator[str]:
        """Yield the names of parameters and states."""
        for relation in self.relations:
            yield from (*relation.parameters, *itertools.chain(*relation.states))
        for group in self.groups:
            yield from group.states
        for readout in self.readouts:
            yield from (readout.readout, *readout.filters)
        yield from (row.parameter for row in self.without_trace)

    def _total(self) -> str:
        stored = f"Traces: {self.stored_bytes:,} bytes stored of {self.possible_bytes:,} possible"
        if self.readouts:
            stored += f"\nFilters of readouts: {self.filter_bytes:,} bytes"
        if self.carried_bytes is None:
            return stored
        stored += f"\nCarried by this learner: {self.carried_bytes:,} bytes"
        if self.skipped_updates:
            stored += f"\nUpdates left out, not finite: {self.skipped_updates:,}"
        return stored


def report_of(graph: "ETraceGraph") -> Report:
    """Return the report of a compiled model."""
    specs = specs_of(graph.trace_specs)
    of_relations = (
        _relation_row(relation, [spec for spec in specs if spec.relation == relation.key])
        for relation in graph.hidden_param_op_relations
    )
    return Report(
        relations=(*of_relations, *(RelationRow(**row) for row in whole_state_rows(graph, specs))),
        groups=tuple(_group_row(group) for group in graph.hidden_groups),
        without_trace=tuple(_plain_rows(graph)),
        diagnostics=tuple(
            DiagnosticRow(d.level, d.kind, d.message, d.source) for d in graph.diagnostics
        ),
        stored_bytes=sum(spec.nbytes for spec in specs if spec.is_stored),
        possible_bytes=sum(spec.full_nbytes for spec in specs),
        readouts=tuple(_readout_rows(graph)),
        filter_bytes=sum(leaf.nbytes for leaf in graph.traced.filters),
    )


def _readout_rows(graph: "ETraceGraph") -> Iterator[ReadoutRow]:
    leaves = {leaf.path: leaf for leaf in graph.traced.filters}
    for readout in graph.traced.readouts:
        own = [leaves[path] for path in readout.filters]
        names = tuple(leaf.name for leaf in own)
        traces = [s for s in specs_of(graph.trace_specs) if s.is_stored and s.state in names]
        yield ReadoutRow(
            readout=readout.state,
            filters=names,
            shapes=tuple(leaf.shape for leaf in own),
            stored_bytes=sum(leaf.nbytes for leaf in own),
            trace_bytes=sum(spec.nbytes for spec in traces),
        )


def _relation_row(relation: HiddenParamOpRelation, specs: Sequence[TraceSpec]) -> RelationRow:
    stored = [spec for spec in specs if spec.is_stored]
    x_var = relation.x_var
    return RelationRow(
        key=relation.key,
        operation=relation.primitive.name,
        source=relation.source,
        parameters=tuple(path_name(path) for path in relation.parameter_paths),
        x_shape=None if x_var is None else tuple(x_var.aval.shape),
        y_shape=tuple(relation.y_var.aval.shape),
        states=tuple(
            tuple(state.name for state in group.states) for group in relation.hidden_groups
        ),
        maps=tuple(influence.kind for influence in relation.influences),
        traces=tuple((spec.state or "", spec.operand, spec.shape) for spec in stored),
        stored_bytes=sum(spec.nbytes for spec in stored),
        possible_bytes=sum(spec.full_nbytes for spec in specs),
        rule=next((spec.rule for spec in specs), None),
    )


def _group_row(group: HiddenGroup) -> GroupRow:
    names = tuple(state.name for state in group.states)
    transition = tuple((names[c], names[a]) for a, c in group.transition)
    downstream = tuple(names[a] for a in group.downstream)
    return GroupRow(group.index, names, group.shape, transition, downstream)


def _plain_rows(graph: "ETraceGraph") -> list[PlainRow]:
    related = {p for r in graph.hidden_param_op_relations for p in r.parameter_paths}
    otherwise = "used by ordinary operations only"
    if graph.whole is not None:
        leaves, otherwise = graph.traced.leaves, "reaches no hidden state"
        related |= {leaf.path for leaf in leaves if leaf.name in graph.whole.reached}
    rows = []
    for path in graph.traced.parameter_paths:
        if path in related:
            continue
        name = path_name(path)
        kinds = dict.fromkeys(d.kind for d in graph.diagnostics if name in d.paths)
        rows.append(PlainRow(name, ", ".join(kinds) or otherwise))
    return rows


def _relation_cells(row: RelationRow) -> list[str]:
    traces = [
        f"{state} ({array}): {shape}" if state else f"{array}: {shape}"
        for state, array, shape in row.traces
    ]
    listed = ", ".join(traces) or "none needed"
    return [
        row.key,
        "-" if row.x_shape is None else str(row.x_shape),
        "-" if row.y_shape is None else str(row.y_shape),
        "; ".join(", ".join(states) for states in row.states),
        "; ".join(row.maps),
        f"{row.rule}: {listed}" if row.rule else listed,
        f"{row.stored_bytes:,}",
    ]


def _readout_cells(row: ReadoutRow) -> list[str]:
    shapes = ", ".join(map(str, row.shapes))
    return [
        row.readout,
        ", ".join(row.filters),
        shapes,
        f"{row.stored_bytes:,}",
        f"{row.trace_bytes:,}",
    ]


def _group_cells(row: GroupRow) -> list[str]:
    arrows = ", ".join(f"{old}→{new}" for old, new in row.transition) or "none"
    after = f"; downstream: {', '.join(row.downstream)}" if row.downstream else ""
    return [str(row.index), ", ".join(row.states), str(row.shape), arrows + after]


def _sequence_cells(row: SequenceRow) -> list[str]:
    return [
        row.method,
        f"{row.steps:,}",
        "zero" if row.from_zero else "any",
        f"{row.chunks:,} of {row.chunk_size:,}",
        f"{row.record_bytes:,}",
        "-" if row.budget is None else f"{row.budget:,}",
    ]


def _columns(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Set cells in columns; the last column is as long as it is."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    widths[-1] = len(heads[-1])
    ruled = [heads, ["-" * width for width in widths], *rows]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ruled
    ]


def html_table(heads: Sequence[str], rows: list[list[str]]) -> str:
    """Write a table."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", heads) + "".join(line("td", row) for row in rows) + "</table>"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, type(None))) else int(value)

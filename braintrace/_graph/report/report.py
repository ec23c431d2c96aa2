"""Report of a compiled model as tables: printed, as plain data, and as HTML."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ..._tables import Part, Table, as_html, as_text
from ..short_names import short_names, shortened
from .cells import group_cells, readout_cells, relation_cells, sequence_cells
from .rows import DiagnosticRow, GroupRow, PlainRow, ReadoutRow, RelationRow, SequenceRow

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
    "sequences": "Sequences (chunks of the calls so far)",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """The weights of a compiled model that learn online, and their memory.

    ``print`` shows it as a table, and a notebook as HTML. The tables, but not the attributes,
    shorten names that are too long for a column.

    Attributes
    ----------
    relations, groups, readouts, without_trace, diagnostics
        The rows of the table.
    stored_bytes, possible_bytes
        Size of the traces at the compiled batch size, and their size if structural zeros were
        stored.
    filter_bytes
        Size of the filters of linear readouts.
    carried_bytes
        Size of the arrays that a learner's own algorithm carries, in its dtype; ``None`` for a
        graph.
    sequences
        Chunks of the learner's sequences, for every method and length so far.
    skipped_updates
        Number of updates that were skipped because a value was not finite.
    mesh, replicated
        The mesh of a sharded learner, and the names of hidden states and parameters with replicated
        outputs although the mesh has an axis for them.

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
    mesh: str | None = None
    replicated: tuple[str, ...] = ()

    def __str__(self) -> str:
        return as_text(self._parts())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, ready for JSON."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Part]:
        """Yield the tables that have rows, and the totals."""
        rows = {
            "relations": [relation_cells(row) for row in self.relations],
            "groups": [group_cells(row) for row in self.groups],
            "readouts": [readout_cells(row) for row in self.readouts],
            "without_trace": [[row.parameter, row.reason] for row in self.without_trace],
            "diagnostics": [[d.level, d.kind, d.message, d.source or ""] for d in self.diagnostics],
        }
        short = short_names(self._names())
        for name, cells in rows.items():
            if cells:
                yield _table(name, [[shortened(cell, short) for cell in row] for row in cells])
        yield self._total()
        if self.sequences:
            yield _table("sequences", [sequence_cells(row) for row in self.sequences])

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
            stored += f"\nSkipped updates, not finite: {self.skipped_updates:,}"
        if self.mesh is not None:
            stored += f"\nSharded over {self.mesh}"
        if self.replicated:
            stored += f"\nReplicated outputs: {', '.join(self.replicated)}"
        return stored


def _table(name: str, rows: list[list[str]]) -> Table:
    return Table(_TITLES[name], _HEADS[name], rows, is_ruled=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, type(None))) else int(value)

"""Cells of tables for the rows of a report."""

from .rows import GroupRow, ReadoutRow, RelationRow, SequenceRow


def relation_cells(row: RelationRow) -> list[str]:
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


def readout_cells(row: ReadoutRow) -> list[str]:
    shapes = ", ".join(map(str, row.shapes))
    return [
        row.readout,
        ", ".join(row.filters),
        shapes,
        f"{row.stored_bytes:,}",
        f"{row.trace_bytes:,}",
    ]


def group_cells(row: GroupRow) -> list[str]:
    arrows = ", ".join(f"{old}→{new}" for old, new in row.transition) or "none"
    after = f"; downstream: {', '.join(row.downstream)}" if row.downstream else ""
    return [str(row.index), ", ".join(row.states), str(row.shape), arrows + after]


def sequence_cells(row: SequenceRow) -> list[str]:
    return [
        row.method,
        f"{row.steps:,}",
        "zero" if row.from_zero else "any",
        f"{row.chunks:,} of {row.chunk_size:,}",
        f"{row.record_bytes:,}",
        "-" if row.budget is None else f"{row.budget:,}",
    ]

"""The printed form of a compiled model."""

from collections.abc import Sequence
from typing import Any

from .._typing import path_name
from .traces import TraceShape, trace_shapes


def table(graph: Any) -> str:
    """Return a readable table of relations, plain parameters, groups and diagnostics."""
    shapes = trace_shapes(graph)
    lines = ["Relations (weights with an eligibility trace)"]
    lines += _columns(
        ["relation", "x", "y", "hidden states", "map", "traces", "bytes"],
        [
            _relation_row(r, [s for s in shapes if s.key == r.key])
            for r in graph.hidden_param_op_relations
        ],
    )
    lines.append("Hidden groups")
    lines += _columns(
        ["group", "states", "shape", "transition"],
        [
            [
                str(group.index),
                ", ".join(state.name for state in group.states),
                str(group.shape),
                _transition(group),
            ]
            for group in graph.hidden_groups
        ],
    )
    related = {p for r in graph.hidden_param_op_relations for p in r.parameter_paths}
    plain = [path_name(p) for p in graph.traced.parameter_paths if p not in related]
    if plain:
        lines.append("Parameters without a trace (gradient of the current step)")
        lines += [f"  {name}" for name in plain]
    if graph.diagnostics:
        lines.append("Diagnostics")
        lines += [f"  {d.level}: {d}" for d in graph.diagnostics]
    stored = sum(shape.nbytes for shape in shapes if shape.stored)
    possible = sum(shape.nbytes for shape in shapes)
    lines.append(f"Parameter-dimension traces: {stored:,} bytes stored of {possible:,} possible")
    return "\n".join(lines)


def _relation_row(relation: Any, shapes: Sequence[TraceShape]) -> list[str]:
    stored = [shape for shape in shapes if shape.stored]
    return [
        relation.key,
        "-" if relation.x_var is None else str(tuple(relation.x_var.aval.shape)),
        str(tuple(relation.y_var.aval.shape)),
        ", ".join(s.name for group in relation.hidden_groups for s in group.states),
        ", ".join(reach.kind for reach in relation.reaches),
        ", ".join(f"{s.state}: {s.shape}" for s in stored) or "none needed",
        f"{sum(shape.nbytes for shape in stored):,}",
    ]


def _transition(group: Any) -> str:
    names = [state.name for state in group.states]
    return ", ".join(f"{names[c]}→{names[a]}" for a, c in group.transition) or "none"


def _columns(heads: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    ruled = [heads, ["-" * width for width in widths], *rows]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ruled
    ]

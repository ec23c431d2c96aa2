"""Construction of a report from a compiled model."""

from collections.abc import Iterator, Sequence

from ..._typing import path_name
from ..graph_data import GraphData
from ..hidden_group import HiddenGroup
from ..relation import HiddenParamOpRelation
from ..trace_spec import TraceSpec, specs_of
from .flat_state_rows import flat_state_rows
from .report import Report
from .rows import DiagnosticRow, GroupRow, PlainRow, ReadoutRow, RelationRow


def report_of(graph: GraphData) -> Report:
    """Return the report of a compiled model."""
    specs = specs_of(graph.trace_specs)
    of_relations = (
        _relation_row(relation, [spec for spec in specs if spec.relation == relation.key])
        for relation in graph.hidden_param_op_relations
    )
    return Report(
        relations=(*of_relations, *flat_state_rows(graph, specs)),
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


def _readout_rows(graph: GraphData) -> Iterator[ReadoutRow]:
    leaves = {leaf.path: leaf for leaf in graph.traced.filters}
    for readout in graph.traced.readouts:
        filters = [leaves[path] for path in readout.filters]
        names = tuple(leaf.name for leaf in filters)
        traces = [s for s in specs_of(graph.trace_specs) if s.is_stored and s.state in names]
        yield ReadoutRow(
            readout=readout.state,
            filters=names,
            shapes=tuple(leaf.shape for leaf in filters),
            stored_bytes=sum(leaf.nbytes for leaf in filters),
            trace_bytes=sum(spec.nbytes for spec in traces),
        )


def _relation_row(relation: HiddenParamOpRelation, specs: Sequence[TraceSpec]) -> RelationRow:
    stored = [spec for spec in specs if spec.is_stored]
    x_var = relation.x_var
    return RelationRow(
        key=relation.key,
        operation=relation.primitive.name,
        source=relation.source,
        parameters=relation.printed_paths,
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


def _plain_rows(graph: GraphData) -> list[PlainRow]:
    related = {p for r in graph.hidden_param_op_relations for p in r.parameter_paths}
    otherwise = "used by ordinary operations only"
    if graph.flat_state is not None:
        leaves, otherwise = graph.traced.leaves, "reaches no hidden state"
        related |= {leaf.path for leaf in leaves if leaf.name in graph.flat_state.reached}
    rows = []
    for path in graph.traced.parameter_paths:
        if path in related:
            continue
        name = path_name(path)
        kinds = dict.fromkeys(d.kind for d in graph.diagnostics if name in d.paths)
        rows.append(PlainRow(name, ", ".join(kinds) or otherwise))
    return rows

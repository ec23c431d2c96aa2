"""Rows of a report for full-Jacobian rules."""

from collections.abc import Iterator, Sequence

from ..._jax import Atom, source_line
from ..flat_state import FlatState
from ..graph_data import GraphData
from ..trace_spec import TraceSpec
from .rows import RelationRow


def flat_state_rows(graph: GraphData, specs: Sequence[TraceSpec]) -> Iterator[RelationRow]:
    """Yield a row for each product and each parameter that has traces."""
    if graph.flat_state is None:
        return
    inside = set[str]()
    for use in graph.flat_state.uses:
        own_specs = [spec for spec in specs if spec.relation == use.key]
        if own_specs and use.equation is not None:
            equation = graph.traced.program.equations[use.equation]
            names = _parameters_behind(graph, [equation.invars[place] for place in use.operands])
            inside.update(names)
            atoms = equation.invars[use.x or 0], equation.outvars[0]
            x_shape, y_shape = (tuple(atom.aval.shape) for atom in atoms)
            every = tuple(range(len(graph.flat_state.leaves)))
            operation = use.key, equation.primitive.name, source_line(equation)
            yield _flat_state_row(
                graph.flat_state, operation, names, x_shape, y_shape, every, own_specs
            )
    for name, reached in graph.flat_state.reached.items():
        own_specs = [spec for spec in specs if spec.relation is None and spec.operand == name]
        if own_specs or name not in inside:
            operation = name, "any", ""
            yield _flat_state_row(
                graph.flat_state, operation, (name,), None, None, reached, own_specs
            )


def _flat_state_row(
    flat: FlatState,
    operation: tuple[str, str, str],
    parameters: tuple[str, ...],
    x_shape: tuple[int, ...] | None,
    y_shape: tuple[int, ...] | None,
    reached: Sequence[int],
    specs: Sequence[TraceSpec],
) -> RelationRow:
    key, primitive, source = operation
    return RelationRow(
        key=key,
        operation=primitive,
        source=source,
        parameters=parameters,
        x_shape=x_shape,
        y_shape=y_shape,
        states=(tuple(flat.leaves[index].name for index in reached),),
        maps=("flattened state",),
        traces=tuple((spec.state or "", spec.operand, spec.shape) for spec in specs),
        stored_bytes=sum(spec.nbytes for spec in specs),
        possible_bytes=sum(spec.full_nbytes for spec in specs),
    )


def _parameters_behind(graph: GraphData, atoms: Sequence[Atom]) -> tuple[str, ...]:
    behind = graph.traced.program.depends_on(atoms)
    return tuple(leaf.name for leaf in graph.traced.parameters if leaf.in_var in behind)

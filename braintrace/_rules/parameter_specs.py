"""Specifications of traces of the size of a weight, for every hidden state that it reaches."""

import functools

import jax

from .._core.layout import TraceSite
from .._core.products import ActiveOutputs, trace_shapes, which_entries
from .._core.signals import at_elements
from .._core.traces import coupled_states
from .._etrace_op import get_primitive_spec
from .._graph import ETraceGraph, Role, TraceSpec


def specs_of_site(
    graph: ETraceGraph, site: TraceSite, stored: tuple[int, ...], active: ActiveOutputs
) -> dict[str, dict[str, TraceSpec]]:
    """Return the specifications of the traces of one site, for all states of its group.

    ``active`` are the outputs that the traces of the ``stored`` states contain.
    """
    relation, lead = site.relation, (site.influence.fan_out,) if site.has_fan_out else ()
    full, stored_shapes = trace_shapes(relation), trace_shapes(relation, active)
    shapes = {
        name: jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype)
        for name, array in stored_shapes.items()
    }
    pairs = dict(coupled_states(site, stored))
    return {
        site.key(a): {
            name: TraceSpec(
                shapes[name].shape,
                shapes[name].dtype,
                _axes(site, name, len(array.shape)),
                relation=relation.key,
                state=state.name,
                operand=name,
                is_stored=a in stored,
                full_shape=(*lead, *array.shape),
                samples=functools.partial(_entries_of_samples, graph, site, active, shapes, name),
                packed_with=site.key(pairs[a]) if a in pairs else None,
            )
            for name, array in full.items()
        }
        for a, state in enumerate(site.group.states)
    }


def _axes(site: TraceSite, name: str, ndim: int) -> tuple[Role, ...]:
    """Return the roles of the axes of a trace array, from the operation's specification."""
    spec = get_primitive_spec(site.relation.primitive)
    lead: list[Role] = ["fan_out"] if site.has_fan_out else []
    batch: list[Role] = ["batch"] if spec.batched else []
    named = () if spec.trace_axes is None else spec.trace_axes.get(name, ())
    rest: Role = "spatial" if named else "entry"
    between: list[Role] = [rest] * (ndim - len(batch) - len(named))
    return (*lead, *batch, *between, *named)


def _entries_of_samples(
    graph: ETraceGraph,
    site: TraceSite,
    active: ActiveOutputs,
    shapes: dict[str, jax.ShapeDtypeStruct],
    name: str,
    flags: jax.Array,
) -> jax.Array:
    """Return the entries of one array that belong to samples whose flag is set."""
    positions = at_elements(graph, site.group, flags)
    result: jax.Array = which_entries(site, active, positions, shapes)[name]
    return result

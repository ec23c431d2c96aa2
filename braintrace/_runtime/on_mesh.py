"""Compiled steps, States and traces on a mesh."""

import jax

from .._core.products.complex_packing import pack, pairs_of
from .._core.traces import starting_traces
from .._core.zero import as_arrays
from .._graph import Traces
from .._sharding import Division, Placement, placement_of
from .compiled_step import CompiledStep
from .states.model_states import States, values_by_path, write_by_path
from .traces import EligibilityTraces


def sharded(step: CompiledStep, division: Division | None) -> CompiledStep:
    """Return a compiled step whose arrays are placed on a mesh, if there is one.

    Parameters
    ----------
    step, division
        The step, and the mesh.

    Raises
    ------
    ShapeError, OptionError
        If the batch size is not a multiple of the number of parts, or there is no batch axis.
    """
    if division is None:
        return step
    step = step.fused.with_split_gates(division.model_parts, division.automatic)
    return step.placed(placement_of(step.full_graph, step.trace_specs, division))


def moved_traces(
    before: CompiledStep, after: CompiledStep, traces: EligibilityTraces
) -> EligibilityTraces:
    """Convert the traces of a step to another mesh, whose gates may be split differently."""
    specs, pairs = after.trace_specs, pairs_of(after.trace_specs)
    if jax.tree.structure(specs) == jax.tree.structure(before.trace_specs):
        return traces
    if not traces.carried.is_zero:
        return EligibilityTraces(after.as_carried(before.as_fused(traces.value)), pairs)
    moved = EligibilityTraces({}, pairs)
    start = pack(starting_traces(specs), pairs)
    moved.carried.store_deferred(lambda: arrays_on(after.placement, start), zero=True)
    return moved


def place_states(placement: Placement | None, states: States) -> None:
    """Move the States of a model to their placement on a mesh, if there is one."""
    if placement is not None:
        write_by_path(states, placement.values(values_by_path(states)))


def arrays_on(placement: Placement | None, traces: Traces) -> Traces:
    """Return traces with zeros instead of shapes, placed on a mesh."""
    result: Traces = as_arrays(traces) if placement is None else placement.traces(traces)
    return result

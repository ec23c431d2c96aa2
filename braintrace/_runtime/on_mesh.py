"""A model whose arrays a mesh divides: its compiled step, its States and its traces."""

from .._executor import as_arrays
from .._graph import Traces
from .._sharding import Division, Placement, placement_of
from .compiled_step import CompiledStep
from .model_states import States, values_by_path, write_by_path


def divided(step: CompiledStep, division: Division | None, samples: int | None) -> CompiledStep:
    """Return a compiled step whose arrays lie on a mesh, if there is one.

    Parameters
    ----------
    step, division
        The step, and the mesh.
    samples
        Size of the batch, as far as somebody has said so.

    Raises
    ------
    ShapeError, OptionError
        If the batch is no multiple of the number of its parts, or there is none to divide.
    """
    if division is None:
        return step
    return step.placed(placement_of(step.graph, step.trace_specs, division, samples))


def place_states(placement: Placement | None, states: States) -> None:
    """Put the States of a model where they lie on a mesh, if there is one."""
    if placement is not None:
        write_by_path(states, placement.values(values_by_path(states)))


def arrays_on(placement: Placement | None, traces: Traces) -> Traces:
    """Return traces with arrays of zeros in place of shapes, where they lie on a mesh."""
    found: Traces = as_arrays(traces) if placement is None else placement.traces(traces)
    return found

"""Shapes of the parameter-dimension traces of a compiled model."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .active_outputs import ActiveOutputs, active_outputs_of, zero_trace


@dataclasses.dataclass(frozen=True)
class TraceShape:
    """One array of one trace; D_RTRL may keep two of them as one complex array.

    Attributes
    ----------
    key
        Key of the relation.
    state
        Name of the hidden state.
    operand
        Name of the array within the trace.
    shape, dtype
        Of the array; a fan-out comes first. Outputs that never enter the trace are left out.
    full_shape
        The shape with all outputs.
    stored
        Whether a later step reads it, so that it is carried.
    """

    key: str
    state: str
    operand: str
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    dtype: Any
    stored: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def full_nbytes(self) -> int:
        """Size in bytes if structural zeros were stored as well."""
        return int(np.prod(self.full_shape)) * np.dtype(self.dtype).itemsize


def operation_trace(
    relation: Any, columns: ActiveOutputs | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays that an operation's own rule makes for one hidden state."""
    return jax.eval_shape(lambda: zero_trace(relation, columns))


def trace_shapes(graph: Any) -> list[TraceShape]:
    """Return every trace array that the model could carry, and which of them it does."""
    shapes = []
    for relation in graph.hidden_param_op_relations:
        arrays = operation_trace(relation)
        for influence, group in zip(relation.influences, relation.hidden_groups, strict=True):
            lead = (influence.fan_out,) if influence.fan_out > 1 else ()
            narrow = operation_trace(
                relation, active_outputs_of(relation, influence, influence.stored)
            )
            for a, state in enumerate(group.states):
                shapes += [
                    TraceShape(
                        relation.key,
                        state.name,
                        name,
                        (*lead, *(narrow if a in influence.stored else arrays)[name].shape),
                        (*lead, *array.shape),
                        array.dtype,
                        a in influence.stored,
                    )
                    for name, array in arrays.items()
                ]
    return shapes

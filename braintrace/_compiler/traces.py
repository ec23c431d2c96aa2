"""Shapes of the parameter-dimension traces of a compiled model."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .._etrace_op import init_trace


@dataclasses.dataclass(frozen=True)
class TraceShape:
    """One array of one trace.

    Attributes
    ----------
    key
        Key of the relation.
    state
        Name of the hidden state.
    operand
        Name of the array within the trace.
    shape, dtype
        Of the array; a fan-out comes first.
    stored
        Whether a later step reads it, so that it is carried.
    """

    key: str
    state: str
    operand: str
    shape: tuple[int, ...]
    dtype: Any
    stored: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def operation_trace(relation: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays that an operation's own rule makes for one hidden state."""
    return jax.eval_shape(
        lambda: init_trace(
            relation.primitive,
            dict(relation.params),
            relation.x_var,
            relation.y_var,
            dict(relation.trainable_vars),
        )
    )


def trace_shapes(graph: Any) -> list[TraceShape]:
    """Return every trace array that the model could carry, and which of them it does."""
    shapes = []
    for relation in graph.hidden_param_op_relations:
        arrays = operation_trace(relation)
        for reach, group in zip(relation.reaches, relation.hidden_groups, strict=True):
            lead = (reach.fan_out,) if reach.fan_out > 1 else ()
            for a, state in enumerate(group.states):
                shapes += [
                    TraceShape(
                        relation.key,
                        state.name,
                        name,
                        (*lead, *array.shape),
                        array.dtype,
                        a in reach.stored,
                    )
                    for name, array in arrays.items()
                ]
    return shapes

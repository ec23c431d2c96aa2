"""Outputs of an operation whose traces a later step reads.

A gate that does not reach a traced state needs no trace. If one operation computes several gates as
one array, its trace contains the other outputs only: the same operation with fewer outputs.

The selection pays: without it, a stream of 16 samples through an LSTM of 256 units takes 1.4 times
as long and 3.4 times the temporary memory (CPU, 2026-11-25). For one sample nothing is selected:
XLA would fuse the padding of the gradient into the update of the weights and compute each element
behind a branch, so a stream through an LSTM of 128 units would take 2.6 times as long.
"""

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._etrace_op import Arrays, get_primitive_spec, init_trace, select_outputs
from ..._graph import (
    HiddenParamOpRelation,
    InfluenceMap,
)
from ..._jax import struct_of

MOST_RUNS = 16


@dataclasses.dataclass(frozen=True)
class ActiveOutputs:
    """Some entries of the last axis of an operation's output.

    Attributes
    ----------
    runs
        ``(start, stop)`` of the selected ranges, in order; ``None``: all entries.
    """

    runs: tuple[tuple[int, int], ...] | None = None

    def pick(self, value: jax.Array) -> jax.Array:
        """Return the selected entries of the last axis of an array."""
        if self.runs is None:
            return value
        parts = [value[..., start:stop] for start, stop in self.runs]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def operands(self, relation: HiddenParamOpRelation, weights: Arrays) -> Arrays:
        """Return the operands of the operation that computes only these outputs."""
        if self.runs is None:
            return weights
        result = select_outputs(relation.primitive, dict(relation.params), weights, self.pick)
        assert result is not None  # `active_outputs_of` has checked that
        return result


EVERY_OUTPUT = ActiveOutputs()


def active_outputs_of(
    relation: HiddenParamOpRelation, influence: InfluenceMap, states: Sequence[int]
) -> ActiveOutputs:
    """Return the outputs that reach one of some states within a step.

    Other outputs never enter the traces of these states, since the entries of a carried trace have
    entered through the same outputs.
    """
    is_batched = get_primitive_spec(relation.primitive).batched
    if is_batched and relation.y_var.aval.shape[0] == 1:
        return EVERY_OUTPUT
    result = _used(influence, states)
    if result is None or result.all() or not result.any():
        return EVERY_OUTPUT
    edges = np.flatnonzero(np.diff(np.concatenate([[0], result.astype(np.int8), [0]])))
    runs = tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
    active = ActiveOutputs(runs)
    select = functools.partial(select_outputs, relation.primitive, dict(relation.params))
    shapes = jax.eval_shape(lambda operands: select(operands, active.pick), _operands(relation))
    return EVERY_OUTPUT if shapes is None or len(runs) > MOST_RUNS else active


def _used(influence: InfluenceMap, states: Sequence[int]) -> np.ndarray | None:
    if influence.positions.ndim < 2:
        return None
    width = influence.positions.shape[-1]
    used = np.zeros(width, bool)
    for point in influence.taps:
        if point.state in states:
            if point.outputs is None:
                return None
            used[point.outputs[point.outputs >= 0] % width] = True
    return used


def _operands(relation: HiddenParamOpRelation) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: struct_of(var.aval) for name, var in relation.trainable_vars.items()}


def trace_shapes(
    relation: HiddenParamOpRelation, active: ActiveOutputs = EVERY_OUTPUT
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a trace of one hidden state, for all outputs or for some."""
    primitive, params, y = relation.primitive, dict(relation.params), relation.y_var
    weights: dict[str, Any] = dict(relation.trainable_vars)
    if active.runs is not None:
        y = types.SimpleNamespace(aval=jax.eval_shape(active.pick, struct_of(y.aval)))
        operands = functools.partial(active.operands, relation)
        shapes = jax.eval_shape(operands, _operands(relation))
        weights = {name: types.SimpleNamespace(aval=shape) for name, shape in shapes.items()}
    result: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(
        lambda: init_trace(primitive, params, relation.x_var, y, weights)
    )
    return result

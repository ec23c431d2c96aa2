"""Rows of a parametric table that data choose, as the marked operation that looks them up."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.lax import GatherScatterMode

from .. import _etrace_op
from .._jax import Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """``gather`` or ``dynamic_slice`` of entries along one axis of a table.

    Attributes
    ----------
    axis
        That axis.
    entry
        Where its index stands among those of a gather; ``None``: there is one index.
    mode
        What indices that no entry has give.
    kept
        Whether the axis is kept, with one entry.
    places
        Axes of the result at which those of the table stand.
    """

    axis: int
    entry: int | None
    mode: Any
    kept: bool
    places: tuple[int, ...]
    weight: int = 0
    outputs: tuple[int, ...] = ()

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the entries at the indices; there is no bias."""
        weight, x = operands[:2]
        index, count = x if self.entry is None else x[..., self.entry], weight.shape[self.axis]
        if self.mode == GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, count - 1)
        elif self.mode == GatherScatterMode.FILL_OR_DROP:
            index = jnp.where(index < 0, count, index)  # a negative one is none
        y = _etrace_op.embedding(index, jnp.moveaxis(weight, self.axis, 0))
        if self.kept:
            y = jnp.expand_dims(y, index.ndim + self.axis)
        of_index = iter(range(index.ndim))
        of_table = dict(zip(self.places, range(index.ndim, y.ndim), strict=True))
        order = [of_table[k] if k in of_table else next(of_index) for k in range(y.ndim)]
        return y if order == list(range(y.ndim)) else jnp.transpose(y, order)


def lookup_of(equation: Equation) -> Lookup | None:
    """Return what looks entries up in the first operand; ``None``: it does something else."""
    name, params, shape = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    if name not in ("gather", "dynamic_slice"):
        return None
    chosen = [i for i, n in enumerate(params["slice_sizes"]) if n != shape[i]]
    if len(chosen) != 1 or params["slice_sizes"][chosen[0]] != 1:
        return None
    (axis,) = chosen
    if name == "dynamic_slice":  # along other axes, it begins at the beginning
        places = tuple(range(len(shape)))
        found = Lookup(axis, None, GatherScatterMode.CLIP, True, places)
        return found if axis == 0 else None
    numbers, mode = params["dimension_numbers"], params["mode"]
    indexed, collapsed = numbers.start_index_map, numbers.collapsed_slice_dims
    if numbers.operand_batching_dims or axis not in indexed or collapsed not in ((), (axis,)):
        return None
    fills, fill = mode == GatherScatterMode.FILL_OR_DROP, params["fill_value"]
    if fills and not (len(indexed) == 1 and (fill is None or math.isnan(fill))):
        return None
    return Lookup(axis, indexed.index(axis), mode, not collapsed, tuple(numbers.offset_dims))

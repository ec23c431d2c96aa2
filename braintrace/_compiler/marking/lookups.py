r"""Lookups: data-dependent gathers from a parameter table, as ETP operations.

A gather along one axis of a table, or along several, reads rows of a reshaped table:
:math:`w_{ij\cdot} = w'_{(i N + j)\cdot}`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from ... import _etrace_op
from ..._jax import Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """A ``gather`` or ``dynamic_slice`` from a table.

    Attributes
    ----------
    shape, sizes
        The shape of the table, and the size of the slice at each index, axis by axis.
    indexed
        Axes of the table that have an index, in the order of the indices.
    kept, places
        Axes of the table that the result has, and their places in the result.
    mode, fill
        The treatment of indices out of range: the mode of the gather, and its fill value.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    indexed: tuple[int, ...]
    kept: tuple[int, ...]
    places: tuple[int, ...]
    mode: Any
    fill: float
    weight: int = 0
    outputs: None = None

    @property
    def _chosen(self) -> list[int]:
        """Axes along which the index chooses the entries."""
        return [k for k, size in enumerate(self.shape) if self.sizes[k] != size]

    @property
    def _windows(self) -> list[int]:
        return [axis for axis in self._chosen if self.sizes[axis] > 1]

    @property
    def _whole(self) -> list[int]:
        return [axis for axis in range(len(self.shape)) if axis not in self._chosen]

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the entries at the indices; a bias is not supported."""
        starts = self._starts(operands)
        there, is_filled = self._are_there(starts), self.mode == GatherScatterMode.FILL_OR_DROP
        rows = self._rows(starts, there if is_filled else None)
        y = _etrace_op.embedding(rows, self._table(operands[0]))
        y = self._in_order(y, starts[0].ndim)
        if there is None or (is_filled and np.isnan(self.fill)):
            return y
        others = [axis for axis in range(y.ndim) if axis not in self.places]
        there = jax.lax.broadcast_in_dim(there, y.shape, others)
        # An index promised to be in range reads the nearest entry, without a derivative.
        other = jnp.asarray(self.fill, y.dtype) if is_filled else jax.lax.stop_gradient(y)
        return jnp.where(there, y, other)

    def _starts(self, operands: Sequence[Any]) -> list[Any]:
        """Return the first index of each slice, for each indexed axis."""
        if self.mode is None:
            starts = list(map(jnp.asarray, operands[1:]))
        else:
            starts = [operands[1][..., entry] for entry in range(len(self.indexed))]
        # Small integers cannot count all rows.
        return [s.astype(jnp.int32) if s.dtype.itemsize < 4 else s for s in starts]

    def _are_there(self, starts: Sequence[Any]) -> Any:
        """Return which indices are in range; ``None``: all of them, after clipping."""
        if self.mode in (None, GatherScatterMode.CLIP):
            return None
        there = jnp.ones((), bool)
        for axis, start in zip(self.indexed, starts, strict=True):
            there &= (start >= 0) & (start <= self.shape[axis] - self.sizes[axis])
        return there

    def _rows(self, starts: Sequence[Any], there: Any) -> Any:
        """Return the rows to read, along the axes of the indices and of windows."""
        lead, windows = starts[0].shape, self._windows
        shape = (*lead, *[1] * len(windows))
        rows, count = jnp.zeros(shape, jnp.int32), 1
        for axis in self._chosen:
            n, size = self.shape[axis], self.sizes[axis]
            start = jnp.clip(starts[self.indexed.index(axis)], 0, n - size)
            start = start.astype(jnp.int32).reshape(shape)
            if size > 1:
                along_axis = [-1 if other == axis else 1 for other in windows]
                start = start + jnp.arange(size, dtype=jnp.int32).reshape(along_axis)
            rows, count = rows * n + start, count * n
        return rows if there is None else jnp.where(there.reshape(shape), rows, count)

    def _table(self, weight: Any) -> Any:
        """Return the table as a matrix of rows."""
        chosen, whole = self._chosen, self._whole
        rows = math.prod(weight.shape[axis] for axis in chosen)
        shape = rows, *(weight.shape[axis] for axis in whole)
        return jnp.transpose(weight, [*chosen, *whole]).reshape(shape)

    def _in_order(self, y: Any, lead: int) -> Any:
        """Transpose ``(*indices, *windows, *other axes)`` to the axes of the result."""
        axes = [*self._windows, *self._whole]
        result_axes = [axis for axis in self.kept if axis in axes]
        # Axes that the result does not have have size one.
        order = [*result_axes, *(axis for axis in axes if axis not in result_axes)]
        y = jnp.transpose(y, [*range(lead), *(lead + axes.index(axis) for axis in order)])
        y = y.reshape(*y.shape[:lead], *(self.sizes[axis] for axis in self.kept))
        of_index = iter(range(lead))
        of_table = dict(zip(self.places, range(lead, y.ndim), strict=True))
        return jnp.transpose(
            y, [of_table[k] if k in of_table else next(of_index) for k in range(y.ndim)]
        )


PAIRED = (
    "each row of the table has its own index. Call `braintrace.embedding` with the table as "
    "rows of entries and the index of each entry"
)


def lookup_of(equation: Equation) -> Lookup | str | None:
    """Return the lookup of entries in the first operand.

    ``None``: the equation is not a lookup. A string: the reason why it cannot be marked.
    """
    name, params, shape = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    if name not in ("gather", "dynamic_slice"):
        return None
    sizes, every = tuple(map(int, params["slice_sizes"])), tuple(range(len(shape)))
    if name == "dynamic_slice":
        return Lookup(shape, sizes, every, every, every, None, math.nan)
    numbers, mode = params["dimension_numbers"], params["mode"]
    if numbers.operand_batching_dims:
        return PAIRED
    result_axes = tuple(axis for axis in every if axis not in numbers.collapsed_slice_dims)
    indexed, places = tuple(numbers.start_index_map), tuple(numbers.offset_dims)
    fill = math.nan if params["fill_value"] is None else params["fill_value"]
    return Lookup(shape, sizes, indexed, result_axes, places, mode, fill)

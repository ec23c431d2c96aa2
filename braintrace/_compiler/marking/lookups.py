r"""Lookups: data-dependent gathers from a parameter table, as ETP operations.

A gather along one axis of a table, or along several, reads rows of a reshaped table:
:math:`w_{ij\cdot} = w'_{(i N + j)\cdot}`. The same gather from an array of row numbers finds these
rows, in every mode of indexing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from ... import _etrace_op
from ..._jax import Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """A ``gather`` or ``dynamic_slice`` from a table."""

    equation: Equation
    weight: int = 0
    outputs: None = None

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the entries at the indices; a bias is not supported."""
        (table, *indices), (result,) = operands, self.equation.outvars
        mode, fill = self._params.get("mode"), self._params.get("fill_value")
        sizes = list(zip(table.shape, self._params["slice_sizes"], strict=True))
        chosen = [axis for axis, (size, width) in enumerate(sizes) if width != size]
        others = [axis for axis in range(table.ndim) if axis not in chosen]
        counted = [size if axis in chosen else 1 for axis, size in enumerate(table.shape)]
        numbers = jnp.arange(math.prod(counted), dtype=jnp.int32).reshape(counted)
        rows = self._read(numbers, indices, mode)
        # Axes of the result that come from whole axes of the table, and those of size one.
        whole = [place for axis, place in self._places.items() if axis in others]
        ones = [place for axis, place in self._places.items() if sizes[axis][1] == 1]
        ones = [place for place in ones if place not in whole]
        kept = [result.aval.shape[place] for place in whole]
        matrix = jnp.transpose(table, [*chosen, *others]).reshape(numbers.size, *kept)
        y = _etrace_op.embedding(jnp.squeeze(rows, [*whole, *ones]), matrix)
        whole = [place - sum(one < place for one in ones) for place in whole]
        y = jnp.moveaxis(y, range(y.ndim - len(kept), y.ndim), whole).reshape(result.aval.shape)
        is_filled = mode == GatherScatterMode.FILL_OR_DROP
        gives_nan = is_filled and (fill is None or np.isnan(fill))
        if mode in (None, GatherScatterMode.CLIP) or gives_nan:
            return y
        has_row = self._read(numbers, indices, GatherScatterMode.FILL_OR_DROP) < numbers.size
        # An index promised to be in range reads the nearest entry, without a derivative.
        return jnp.where(has_row, y, fill if is_filled else jax.lax.stop_gradient(y))

    @property
    def _params(self) -> Mapping[str, Any]:
        params: Mapping[str, Any] = self.equation.params
        return params

    @property
    def _places(self) -> dict[int, int]:
        """The axes of the table that the result has, with their places in the result."""
        axes = range(self.equation.invars[0].aval.ndim)
        if "mode" not in self._params:
            return {axis: axis for axis in axes}
        numbers = self._params["dimension_numbers"]
        kept = (axis for axis in axes if axis not in numbers.collapsed_slice_dims)
        return dict(zip(kept, numbers.offset_dims, strict=True))

    def _read(self, numbers: jax.Array, indices: Sequence[Any], mode: Any) -> jax.Array:
        """Return the row numbers at the indices; one past the last: no row."""
        sizes = tuple(map(min, self._params["slice_sizes"], numbers.shape))
        if mode is None:
            # `jax.lax.dynamic_slice` would count from the end again if an index is negative.
            found: jax.Array = self.equation.primitive.bind(numbers, *indices, slice_sizes=sizes)
            return found
        layout, fill = self._params["dimension_numbers"], numbers.size
        return jax.lax.gather(numbers, indices[0], layout, sizes, mode=mode, fill_value=fill)


PAIRED = (
    "each row of the table has a separate index. Call `braintrace.embedding` with the table as "
    "rows of entries and the index of each entry"
)


def lookup_of(equation: Equation) -> Lookup | str | None:
    """Return the lookup of entries in the first operand.

    ``None``: the equation is not a lookup. A string: the reason why it cannot be marked.
    """
    name, params = equation.primitive.name, equation.params
    if name not in ("gather", "dynamic_slice"):
        return None
    if name == "gather" and params["dimension_numbers"].operand_batching_dims:
        return PAIRED
    return Lookup(equation)

r"""Products with a matrix whose few entries are put in place first, as the marked operation.

.. math:: W_{r(e)\,c(e)} \mathrel{+}= w_e, \qquad y = x W

Its traces are those of the entries, where those of the matrix would be of all places.
"""

import dataclasses
from typing import Any

import numpy as np

from ... import _etrace_op
from ..._etrace_op.sparse_pattern import SparsePattern, make_pattern
from ..._jax import Equation, is_var
from ..._jaxpr.dataflow import Constants
from .axes import moved
from .parametric_uses import ParametricUses
from .products import Dense
from .sparse_products import are_inside

FEWEST_CELLS_PER_ENTRY = 4
"""A matrix with more entries is multiplied as it is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """Such a product.

    Attributes
    ----------
    dense
        The product with the matrix.
    pattern
        Where its entries stand.
    """

    dense: Dense
    pattern: SparsePattern

    @property
    def weight(self) -> int:
        """The operand that the matrix is; in its place stand those of the ``scatter``."""
        return self.dense.weight

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axis that the matrix brings."""
        return self.dense.outputs

    def __call__(self, operands: Any, bias: Any) -> Any:
        """Return the product; see `Product`."""
        x, (_, _, entries) = operands[1 - self.weight], operands[self.weight].operands
        x = moved(x, [*self.dense.free[0], *self.dense.summed[0]]).astype(self.dense.dtype)
        entries = entries.astype(self.dense.dtype)
        y = _etrace_op.sparse_matmul(x, entries, sparse_mat=self.pattern, bias=bias)
        return self.dense.in_order(y)


def placed_of(
    uses: ParametricUses, constants: Constants, equation: Equation, dense: Dense
) -> tuple[int, Placed] | None:
    """Return what puts the entries in place, and the product; ``None``: it is one of a matrix."""
    matrix = equation.invars[dense.weight]
    index = uses.program.producer.get(matrix) if is_var(matrix) else None
    if index is None or uses.only_reader(matrix) is None or len(matrix.aval.shape) != 2:
        return None
    places = _places_of(uses, constants, uses.program.equations[index])
    sides = dense.summed[1], dense.free[1]
    if places is None or [*map(len, sides)] != [1, 1]:
        return None
    (inputs,), (outputs,) = sides
    shape = matrix.aval.shape
    if len(places) * FEWEST_CELLS_PER_ENTRY > matrix.aval.size or not are_inside(places, shape):
        return None
    found = places[:, inputs], places[:, outputs], (shape[inputs], shape[outputs])
    return index, Placed(dense, make_pattern(*found))


def _places_of(uses: ParametricUses, constants: Constants, equation: Equation) -> np.ndarray | None:
    """Return rows and columns of parametric entries that are put into a matrix of zeros."""
    if equation.primitive.name not in ("scatter", "scatter-add"):
        return None
    zeros, indices, entries = equation.invars
    numbers = equation.params["dimension_numbers"]
    if numbers.update_window_dims or numbers.operand_batching_dims or len(indices.aval.shape) != 2:
        return None
    places = constants.value(indices)
    if places is None or not uses.is_parametric(entries) or not uses.is_zero(zeros, constants):
        return None
    axes = list(numbers.scatter_dims_to_operand_dims)
    places = places[:, [axes.index(axis) for axis in range(2)]].astype(np.int64)
    is_sum = equation.primitive.name == "scatter-add"
    return places if is_sum or len(np.unique(places, axis=0)) == len(places) else None

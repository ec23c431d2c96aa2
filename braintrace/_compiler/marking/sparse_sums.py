r"""Sparse products in several equations, recognised as the ETP operation.

.. math:: y_{b\,c(e)} \mathrel{+}= x_{b\,r(e)} w_e

Data are gathered at the row of each entry, multiplied by the parameter-derived entries, and added
to zeros at their columns. Rows and columns are constants.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import _etrace_op
from ..._etrace_op.sparse.pattern import SparsePattern
from ..._jax import Var, is_var
from .parametric_uses import ParametricUses
from .sparse_indices import Scattered, gathered_of, pattern_of, scattered_of


@dataclasses.dataclass(frozen=True, eq=False)
class SparseSum:
    """A product with a sparse matrix in several equations.

    Attributes
    ----------
    pattern
        Rows and columns of the entries.
    axis
        The axis of the data that is summed over.
    order
        The axes of the result among those of a marked product.
    weight
        Index of the entries among the operands of the multiplication.
    gather, moves, total
        Indices of the equations that gather the data, transpose the terms, and add them up.
    var, axes
        The entries, and the axes of the terms that their own axes correspond to.
    place
        The axis of the terms that runs over the entries.
    """

    pattern: SparsePattern
    axis: int
    order: tuple[int, ...]
    weight: int
    gather: int
    moves: tuple[int, ...]
    total: int
    var: Var
    axes: tuple[int, ...]
    place: int

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axis of the columns."""
        return (self.order.index(len(self.order) - 1),)

    def __call__(self, operands: Any, bias: Any) -> Any:
        """Return the product; see `Product`. The terms are data and entries."""
        x, weight = operands[2].operands
        x = jnp.moveaxis(x, self.axis, -1)
        y = _etrace_op.sparse_matmul(x, weight, sparse_mat=self.pattern, bias=bias)
        return jnp.transpose(y, self.order)


def sparse_sum(uses: ParametricUses, index: int, operands: Sequence[int]) -> SparseSum | None:
    """Return the product that a multiplication is a part of; ``None``: there is none.

    Parameters
    ----------
    uses
        The program.
    index, operands
        The multiplication, and its parameter-derived operands.
    """
    program, constants = uses.program, uses.analysis.constants
    equation = program.equations[index]
    if equation.primitive.name != "mul" or len(operands) != 1:
        return None
    (weight,) = operands
    x, (terms,) = equation.invars[1 - weight], equation.outvars
    first = program.producer.get(x) if is_var(x) else None
    if first is None or program.equations[first].primitive.name != "gather":
        return None
    gathered = gathered_of(program.equations[first], constants)
    end = _added_up(uses, index)
    if gathered is None or end is None or x.aval.shape != terms.aval.shape:
        return None
    moves, total = end
    scattered = scattered_of(program.equations[total], constants)
    entries = uses.along(equation.invars[weight], (gathered.entries,))
    if scattered is None or entries is None or uses.only_reader(x) is None:
        return None
    data, (summed,) = program.equations[first].invars[0], program.equations[total].outvars
    base = constants.value(program.equations[total].invars[0])
    if base is None or np.any(base):
        return None
    order = _order(uses, gathered.entries, terms.aval.ndim, moves, scattered)
    if order is None:
        return None
    shape = data.aval.shape[gathered.axis], summed.aval.shape[scattered.axis]
    pattern = pattern_of(gathered, scattered, shape)
    if pattern is None:
        return None
    return SparseSum(
        pattern=pattern,
        axis=gathered.axis,
        order=order,
        weight=weight,
        gather=first,
        moves=moves,
        total=total,
        var=entries[0],
        axes=entries[1],
        place=gathered.entries,
    )


def _added_up(uses: ParametricUses, index: int) -> tuple[tuple[int, ...], int] | None:
    """Return the transposes of an equation's result, and its ``scatter-add``."""
    moves: list[int] = []
    while True:
        reader = uses.only_reader(uses.program.equations[index].outvars[0])
        if reader is None:
            return None
        index, operand = reader
        name = uses.program.equations[index].primitive.name
        if name != "transpose":
            return (tuple(moves), index) if name == "scatter-add" and operand == 2 else None
        moves.append(index)


def _order(
    uses: ParametricUses, entries: int, ndim: int, moves: Sequence[int], scattered: Scattered
) -> tuple[int, ...] | None:
    """Return the axes of a result among the axes of a marked product.

    The last axis of a marked product are its columns.

    ``None``: the sum is not over the axis of the entries.
    """
    last = ndim - 1
    others = [k for k in range(ndim) if k != entries]
    order = [last if k == entries else others.index(k) for k in range(ndim)]
    for move in moves:
        order = [order[k] for k in uses.program.equations[move].params["permutation"]]
    if order.pop(scattered.entries) != last:
        return None
    order.insert(scattered.axis, last)
    return tuple(order)

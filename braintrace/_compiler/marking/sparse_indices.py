"""Sparsity patterns from the constant indices of a gather and a scatter-add."""

import dataclasses

import numpy as np
from jax.lax import GatherScatterMode

from ..._etrace_op.sparse.pattern import SparsePattern, make_pattern
from ..._jax import Atom, Equation
from ..._jaxpr.dataflow import Constants


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The axes of a ``gather`` that reads one constant row per entry.

    Attributes
    ----------
    rows, axis
        The rows, and the axis of the data that they index.
    entries
        The axis of the result that runs over the entries.
    """

    rows: np.ndarray
    axis: int
    entries: int


def gathered_of(equation: Equation, constants: Constants) -> Gathered | None:
    """Return the rows that a ``gather`` reads; ``None``: it has another form."""
    data, indices = equation.invars
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if numbers.operand_batching_dims or len(numbers.start_index_map) != 1:
        return None
    (axis,) = map(int, numbers.start_index_map)
    whole = [1 if k == axis else size for k, size in enumerate(data.aval.shape)]
    if tuple(numbers.collapsed_slice_dims) != (axis,) or list(sizes) != whole:
        return None
    rows = _one_index_per_entry(indices, constants)
    if rows is None:
        return None
    (entries,) = set(range(data.aval.ndim)) - set(numbers.offset_dims)
    return Gathered(rows, axis, entries)


@dataclasses.dataclass(frozen=True)
class Scattered:
    """The axes of a ``scatter-add`` that adds one entry per constant column.

    Attributes
    ----------
    columns, axis
        The columns, and the axis of the result that they index.
    entries
        The axis of the summands that runs over the entries.
    drops
        Whether columns outside of the result are left out.
    """

    columns: np.ndarray
    axis: int
    entries: int
    drops: bool


def scattered_of(equation: Equation, constants: Constants) -> Scattered | None:
    """Return the columns of a ``scatter-add``; ``None``: it has another form."""
    operand, indices, updates = equation.invars
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    if numbers.operand_batching_dims or len(numbers.inserted_window_dims) != 1:
        return None
    (axis,) = map(int, numbers.inserted_window_dims)
    if tuple(numbers.scatter_dims_to_operand_dims) != (axis,):
        return None
    window = [updates.aval.shape[k] for k in numbers.update_window_dims]
    if window != [size for k, size in enumerate(operand.aval.shape) if k != axis]:
        return None
    columns = _one_index_per_entry(indices, constants)
    if columns is None:
        return None
    (entries,) = set(range(updates.aval.ndim)) - set(numbers.update_window_dims)
    return Scattered(columns, axis, entries, mode == GatherScatterMode.FILL_OR_DROP)


def _one_index_per_entry(indices: Atom, constants: Constants) -> np.ndarray | None:
    if len(indices.aval.shape) != 2 or indices.aval.shape[1] != 1:
        return None
    value = constants.value(indices)
    return None if value is None else value[:, 0].astype(np.int64)


def pattern_of(
    gathered: Gathered, scattered: Scattered, shape: tuple[int, int]
) -> SparsePattern | None:
    """Return the pattern of the matrix; ``None``: some entries are out of range.

    Entries that the ``scatter-add`` drops are padding.
    """
    rows, columns = gathered.rows, scattered.columns
    padding = scattered.drops & ((columns < 0) | (columns >= shape[1]))
    rows, columns = np.where(padding, shape[0], rows), np.where(padding, shape[1], columns)
    reads, adds = (rows >= 0) & (rows < shape[0]), (columns >= 0) & (columns < shape[1])
    return make_pattern(rows, columns, shape) if np.all(padding | (reads & adds)) else None

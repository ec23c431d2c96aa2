r"""Sparse products sharded by output: entries are on the device of their column.

Suppose that equal parts of the outputs have equal numbers of entries, in order. Each of several
devices can then store one part of the outputs, of the entries, and of their traces. Every form here
has two separate axes, ``(part, entry of the part)``. XLA then gives each device its parts of all
arrays except the inputs, which are gathered forward and summed backward. In the order of entries
alone, the sums of an output may be anywhere: every device would add up all outputs, and receive the
outputs of all other devices.

If every output has the same number of entries, there are as many parts as outputs, and no scatter
is needed. Parts must be equal: entries beyond both ends of the matrix (padding) fill them up.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .pattern import SparsePattern
from .sddmm import joined, over_blocks, sum_dtype

MOST_TERMS = 2**20
"""Products of all devices at a time: each is materialised before the sum."""


def product(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    """Return ``x @ sparse(weight)`` for inputs ``(..., in)``."""
    rows, columns = _apart(sparse_mat)
    lead = x.shape[:-1]
    weights = jnp.broadcast_to(weight.reshape(rows.shape), (*lead, *rows.shape))
    terms = _at(x, (..., rows), sparse_mat) * weights
    if _is_one_each(sparse_mat):
        return terms.sum(-1)
    add_up = functools.partial(
        jax.ops.segment_sum,
        num_segments=sparse_mat.shape[1] // sparse_mat.parts,
        indices_are_sorted=sparse_mat.columns_are_sorted,
        mode="drop" if sparse_mat.has_padding else "promise_in_bounds",
    )
    sums = jax.vmap(add_up)(jnp.moveaxis(terms, (-2, -1), (0, 1)), columns)
    return jnp.moveaxis(sums, (0, 1), (-2, -1)).reshape(*lead, sparse_mat.shape[1])


def of_entries(values: Any, sparse_mat: SparsePattern) -> Any:
    """Return for every entry the value of its output, from values ``(..., out)``."""
    lead, nnz = values.shape[:-1], sparse_mat.nnz
    if _is_one_each(sparse_mat):
        shape = (*values.shape, nnz // sparse_mat.parts)
        return jnp.broadcast_to(values[..., None], shape).reshape(*lead, nnz)
    by_part = _of_parts(jnp.moveaxis(values, -1, 0), _apart(sparse_mat)[1].T, sparse_mat)
    return jnp.moveaxis(by_part, (1, 0), (-2, -1)).reshape(*lead, nnz)


def sddmm(x: Any, factor: Any, sparse_mat: SparsePattern) -> Any:
    """Return the sums of products over the first axis, for every entry; see `sddmm`."""
    x, factor = (jnp.moveaxis(array, (0, -1), (-1, 0)) for array in (x, factor))
    rows, columns = _apart(sparse_mat)

    def of_block(at_rows: Any, at_columns: Any) -> Any:
        products = _at(x, at_rows, sparse_mat) * _of_parts(factor, at_columns, sparse_mat)
        return jnp.moveaxis(products.sum(-1, dtype=sum_dtype(products)), 0, -1)

    size = MOST_TERMS // (sparse_mat.parts * math.prod(x.shape[1:]))
    sums = joined(over_blocks(of_block, rows.T, columns.T, size), rows.shape[1])
    return jnp.moveaxis(sums, 0, -2).reshape(*x.shape[1:-1], sparse_mat.nnz)


def _apart(sparse_mat: SparsePattern) -> tuple[Any, Any]:
    """Return rows of entries, and columns within their part: ``(part, entry)``."""
    width = sparse_mat.shape[1] // sparse_mat.parts
    rows = sparse_mat.rows.reshape(sparse_mat.parts, -1)
    columns = sparse_mat.columns.reshape(rows.shape)
    is_padding = rows == sparse_mat.shape[0]
    return rows, np.where(is_padding, width, columns % width)


def _of_parts(of_outputs: Any, columns: Any, sparse_mat: SparsePattern) -> Any:
    """Return the values of the entries' outputs: ``(entry, part, ...)``."""
    apart = of_outputs.reshape(sparse_mat.parts, -1, *of_outputs.shape[1:])
    if _is_one_each(sparse_mat):
        return jnp.broadcast_to(apart[:, 0][None], (*columns.shape, *of_outputs.shape[1:]))
    pick = functools.partial(_at, sparse_mat=sparse_mat)
    return jax.vmap(pick, in_axes=(0, 1), out_axes=1)(apart, columns)


def _is_one_each(sparse_mat: SparsePattern) -> bool:
    """Test whether the entries of a part all reach its one output."""
    return sparse_mat.parts == sparse_mat.shape[1] and not sparse_mat.has_padding


def _at(array: Any, indices: Any, sparse_mat: SparsePattern) -> Any:
    """Gather along the first axis; padding entries (beyond the end) give zero."""
    if sparse_mat.has_padding:
        return array.at[indices].get(mode="fill", fill_value=0)
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)

"""Forms of the sparse product and of its gradients, chosen by size.

Products over many rows go through dense blocks of some columns each, if the blocks are not much
larger than their entries: segment sums are a hundred times slower. For larger matrices, gradients
and traces are sums over gathered rows (`sddmm`), and a kernel multiplies several samples
(`csr_kernel`). The form depends on sizes alone.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import sharding_dependent
from ..sums import sum_over_samples
from . import csr_kernel
from .pattern import SparsePattern
from .sddmm import is_large, sddmm

BLOCK_CELLS = 2**22
"""Largest dense block, in cells."""

CELLS_PER_ENTRY_FORWARD, CELLS_PER_ENTRY_BACKWARD, CELLS_PER_SAMPLED_ENTRY = 32, 128, 16
"""Cells per entry up to which dense blocks pay, measured with 32 to 2048 rows on two cores.
Backward, an entry's gradient is a sum over all rows, and blocks pay for sparser matrices. They
pay for fewer matrices if there are enough entries to take sums block by block (`sddmm`)."""

FEWEST_ROWS = 16

MOST_ROWS, ROWS_AT_ONCE, MOST_TERMS = 32, 8, 2**24
"""Largest number of rows that the sparse form takes at once. A CPU takes blocks of a few rows, so
that their terms stay in its cache. Other devices take blocks of rows whose terms fit into
memory."""


def product(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    """Return ``x @ sparse(weight)`` of inputs ``(..., in)``."""
    form = _product_dense if _is_dense_enough(x, sparse_mat) else product_of_entries
    return form(x, weight, sparse_mat)


def product_on_one_cpu(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    """Return the same product on a CPU, by a kernel if that is faster."""
    if _is_dense_enough(x, sparse_mat) or not csr_kernel.suits(x, weight, sparse_mat):
        return product(x, weight, sparse_mat)
    return csr_kernel.product(x, weight, sparse_mat)


def _is_dense_enough(x: Any, sparse_mat: SparsePattern) -> bool:
    return _pays(sparse_mat, x, CELLS_PER_ENTRY_FORWARD)


def entry_gradients(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    """Return the sums over samples of input times cotangent, for every entry."""
    return _summed(x.astype(hidden_dim.dtype), hidden_dim, sparse_mat)


def terms_of_steps(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    """Return the sums over steps of input times factor, for every sample and entry."""
    terms = _accumulated(x.astype(hidden_dim.dtype), hidden_dim, sparse_mat)
    return terms.astype(hidden_dim.dtype)


def of_entries(of_outputs: Any, sparse_mat: SparsePattern) -> Any:
    """Return for every entry the value of its output."""
    return _at(of_outputs, sparse_mat.columns, sparse_mat)


# --- choice of the form


def _pays(sparse_mat: SparsePattern, x: Any, cells_per_entry: int) -> bool:
    """Test whether a product over the rows of ``x`` is faster through dense blocks."""
    is_dense = math.prod(sparse_mat.shape) <= cells_per_entry * sparse_mat.nnz
    return is_dense and math.prod(x.shape[:-1]) >= FEWEST_ROWS


# --- the product


def _product_dense(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    products = []
    for columns, entries, places in _blocks(sparse_mat):
        zero = jnp.zeros((sparse_mat.shape[0], columns.stop - columns.start), weight.dtype)
        products.append(x @ zero.at[places].add(weight[entries]))
    return jnp.concatenate(products, axis=-1)


def product_of_entries(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    if x.ndim < 2 or x.shape[0] <= MOST_ROWS:
        return _at_once(x, weight, sparse_mat)

    def at_once(x: Any, weight: Any) -> Any:
        return _at_once(x, weight, sparse_mat)

    def in_blocks(rows: int, x: Any, weight: Any) -> Any:
        return jax.lax.map(lambda row: _at_once(row, weight, sparse_mat), x, batch_size=rows)

    most = max(ROWS_AT_ONCE, MOST_TERMS // max(1, sparse_mat.nnz))
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=functools.partial(
            sharding_dependent,
            sharded=at_once,
            unsharded=functools.partial(in_blocks, ROWS_AT_ONCE),
        ),
        default=functools.partial(in_blocks, most),
    )


def _at_once(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    contributions = _at(x, sparse_mat.rows, sparse_mat) * jnp.broadcast_to(
        weight, (*x.shape[:-1], *weight.shape)
    )
    sums = jax.ops.segment_sum(
        jnp.moveaxis(contributions, -1, 0),
        sparse_mat.columns,
        num_segments=sparse_mat.shape[1],
        indices_are_sorted=sparse_mat.columns_are_sorted,
        mode="drop" if sparse_mat.has_padding else "promise_in_bounds",
    )
    return jnp.moveaxis(sums, 0, -1)


# --- gradients and terms of the entries


def _summed(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    in_blocks = hidden_dim.ndim == 2 and is_large(sparse_mat, len(hidden_dim))
    sparsest = CELLS_PER_SAMPLED_ENTRY if in_blocks else CELLS_PER_ENTRY_BACKWARD
    if _pays(sparse_mat, hidden_dim, sparsest):
        return _gradients_in_blocks(x, hidden_dim, sparse_mat)
    if in_blocks:
        return sddmm(x, hidden_dim, sparse_mat)
    return _sum_of_terms(x, hidden_dim, sparse_mat)


def _sum_of_terms(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    terms = functools.partial(_terms, sparse_mat=sparse_mat)
    return sum_over_samples(lambda rows: terms(*rows), (x, hidden_dim), hidden_dim.ndim - 1)


def _terms(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    inputs = _at(x.astype(hidden_dim.dtype), sparse_mat.rows, sparse_mat)
    return inputs * of_entries(hidden_dim, sparse_mat)


def _gradients_in_blocks(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    leading = tuple(range(hidden_dim.ndim - 1))
    gradient = jnp.zeros(sparse_mat.nnz, hidden_dim.dtype)
    for columns, entries, places in _blocks(sparse_mat):
        block = jnp.tensordot(x, hidden_dim[..., columns], (leading, leading))
        gradient = gradient.at[entries].set(block[places])
    return gradient


def _accumulated(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    if is_large(sparse_mat, len(hidden_dim)):
        return sddmm(x, hidden_dim, sparse_mat)
    return _terms(x, hidden_dim, sparse_mat).sum(0)


# --- dense blocks, and entries of an array


def _blocks(
    sparse_mat: SparsePattern,
) -> Iterator[tuple[slice, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yield the columns of every dense block, its entries, and their places in it."""
    outputs = sparse_mat.shape[1]
    count = min(outputs, max(2, math.ceil(math.prod(sparse_mat.shape) / BLOCK_CELLS)))
    edges = np.linspace(0, outputs, count + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        inside = (sparse_mat.columns >= start) & (sparse_mat.columns < stop)
        (entries,) = np.nonzero(inside)
        places = sparse_mat.rows[entries], sparse_mat.columns[entries] - start
        yield slice(int(start), int(stop)), entries, places


def _at(array: Any, indices: Any, sparse_mat: SparsePattern) -> Any:
    """Gather along the last axis; padding entries (beyond the end) give zero."""
    array = jnp.asarray(array)  # a user's constant may still be a NumPy array
    if sparse_mat.has_padding:
        return array.at[..., indices].get(mode="fill", fill_value=0)
    # Without bounds checks, XLA compiles in half the time for 10^7 entries.
    return array.at[..., indices].get(mode="promise_in_bounds", wrap_negative_indices=False)

"""Forms of the sparse product and of its gradients, chosen by size.

Products over many rows go through dense blocks of some columns each, if the blocks are not much
larger than their entries: segment sums are a hundred times slower. For larger matrices, gradients
and traces are sums over gathered rows (`sddmm`), and a kernel multiplies several samples
(`product_by_kernel`). The form depends on sizes alone.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import csr_kernel, has_csr_kernel, sharding_dependent
from .sparse_pattern import SparsePattern
from .sums import sum_over_samples

SDDMM_FEWEST_ROWS, SDDMM_FEWEST_ENTRIES = 8, 2**12
"""Below these sizes, gathering the factors at once is faster: a row costs as much as 10 numbers."""

SDDMM_ROWS_AT_ONCE, PIECE, TERMS_AT_ONCE = 64, 16, 2**18
"""On a CPU: size of a part of the ``k``, of a piece of it, and products of a block of entries."""

WIDE, MANY_ROWS = 2**15, 2**8
"""Entries are sorted for a matrix with this many rows or columns, or for this many ``k``. With 10^4
columns and 1024 rows this takes 1.6 ms instead of 2.0 for 16 rows."""

SDDMM_MOST_TERMS = 2**26
"""On other devices, and with several devices: the products of a block of entries."""


def is_large(sparse_mat: SparsePattern, rows: int) -> bool:
    """Test whether sums over this number of rows are to be taken block by block."""
    return rows >= SDDMM_FEWEST_ROWS and sparse_mat.nnz >= SDDMM_FEWEST_ENTRIES


def sddmm(x: Any, factor: Any, sparse_mat: SparsePattern) -> Any:
    """Return the sums over the first axis, for every entry.

    Parameters
    ----------
    x, factor : array ``(k, in)`` and ``(k, out)``, or ``(k, batch, in)`` and ``(k, batch, out)``
        Factors of one dtype.
    sparse_mat : SparsePattern
        Rows and columns of the entries.

    Returns
    -------
    array ``(nnz,)`` or ``(batch, nnz)``
        Sums in at least single precision.
    """
    if sparse_mat.has_padding:
        x, factor = (jnp.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, 1)]) for a in (x, factor))
    is_ordered = max(sparse_mat.shape) >= WIDE or (x.ndim == 2 and len(x) >= MANY_ROWS)
    ordered = sparse_mat.by_block if is_ordered else ()
    operands = x, factor, sparse_mat.rows, sparse_mat.columns, *ordered
    on_cpu = functools.partial(sharding_dependent, sharded=_sddmm_at_once, unsharded=_sddmm_on_cpu)
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=_sddmm_at_once)


def _sddmm_at_once(x: Any, factor: Any, rows: Any, columns: Any, *_: Any) -> Any:
    x, factor = (jnp.moveaxis(array, (0, -1), (-1, 0)) for array in (x, factor))

    def of_block(at_rows: Any, at_columns: Any) -> Any:
        products = picked(x, at_rows) * picked(factor, at_columns)
        return jnp.moveaxis(products.sum(-1, dtype=sum_dtype(products)), 0, -1)

    size = SDDMM_MOST_TERMS // math.prod(x.shape[1:])
    return joined(over_blocks(of_block, rows, columns, size), len(rows))


def _sddmm_on_cpu(x: Any, factor: Any, rows: Any, columns: Any, *ordered: Any) -> Any:
    """Take samples one by one and steps part by part, so that they stay in a cache."""

    def of_sample(pair: tuple[Any, Any]) -> Any:
        if not ordered:
            return _of_parts(*pair, rows, columns)
        by_block = _of_parts(*pair, *ordered[:2])
        return picked(by_block, ordered[2])

    if x.ndim == 2:
        return of_sample((x, factor))
    return jax.lax.map(of_sample, (jnp.swapaxes(x, 0, 1), jnp.swapaxes(factor, 0, 1)))


def _of_parts(x: Any, factor: Any, rows: Any, columns: Any) -> Any:
    piece = min(PIECE, 8 * math.ceil(x.shape[0] / 8))
    parts = math.ceil(x.shape[0] / SDDMM_ROWS_AT_ONCE)
    pieces = math.ceil(x.shape[0] / parts / piece)
    missing = [(0, parts * pieces * piece - x.shape[0]), (0, 0)]
    cut = tuple(jnp.pad(array, missing).reshape(parts, pieces, piece, -1) for array in (x, factor))

    def of_part(part: tuple[Any, Any]) -> Any:
        # Each piece is a separate array: XLA would compute the place of every element of a slice.
        pairs = [(of_x.T, of_factor.T) for of_x, of_factor in zip(*part, strict=True)]

        def of_block(at_rows: Any, at_columns: Any) -> Any:
            products = [picked(x, at_rows) * picked(factor, at_columns) for x, factor in pairs]
            return _multiplied_by_ones(sum(p.astype(sum_dtype(p)) for p in products))

        return over_blocks(of_block, rows, columns, TERMS_AT_ONCE // piece)

    sums = of_part((cut[0][0], cut[1][0]))
    if parts > 1:  # blocks are concatenated once: XLA would do so element by element in the sum
        rest = cut[0][1:], cut[1][1:]
        sums, _ = jax.lax.scan(lambda sums, part: (sums + of_part(part), None), sums, rest)
    return joined(sums, len(rows))


def over_blocks(of_block: Callable[[Any, Any], Any], rows: Any, columns: Any, size: int) -> Any:
    """Return the sums of blocks of entries: ``(blocks, ..., entries)``.

    The last block starts early enough to end with the last entry.
    """
    size = min(len(rows), max(1, size))

    def of_places(first: Any) -> Any:
        places = (jax.lax.dynamic_slice_in_dim(array, first, size) for array in (rows, columns))
        return of_block(*places)

    return jax.lax.map(of_places, jnp.arange(0, len(rows), size))


def joined(blocks: Any, entries: int) -> Any:
    blocks = jnp.moveaxis(blocks, 0, -2)
    *lead, count, size = blocks.shape
    full = blocks[..., :-1, :].reshape(*lead, (count - 1) * size)
    return jnp.concatenate([full, blocks[..., -1, count * size - entries :]], axis=-1)


def picked(array: Any, indices: Any) -> Any:
    """Return elements of the first axis; all indices are in range."""
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def sum_dtype(products: Any) -> Any:
    # Sums in half precision would stop growing.
    return jnp.promote_types(products.dtype, jnp.float32)


def _multiplied_by_ones(products: Any) -> Any:
    """Return sums over the last axis; XLA on a CPU would add the elements one by one."""
    return jnp.dot(products, jnp.ones(products.shape[-1], products.dtype))


FEWEST_SAMPLES, KERNEL_FEWEST_ENTRIES = 6, 2**14
"""Below these sizes, the kernel takes longer for 8 samples than segment sums."""

SAMPLES_AT_ONCE, SIDE_BY_SIDE = 64, 8

DTYPES = frozenset(map(jnp.dtype, ("float32", "float64", "complex64", "complex128")))


def suits_kernel(x: Any, weight: Any, sparse_mat: SparsePattern) -> bool:
    """Test whether the kernel supports these operands, and is faster."""
    is_large = len(x) >= FEWEST_SAMPLES and sparse_mat.nnz >= KERNEL_FEWEST_ENTRIES
    return is_large and x.dtype == weight.dtype and x.dtype in DTYPES and has_csr_kernel()


def product_by_kernel(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    """Return ``x @ sparse(weight)`` of samples ``(batch, in)``."""
    order, pointers, rows = sparse_mat.by_column
    data = picked(weight, order)

    def of_part(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((sparse_mat.shape[1], len(x)), x.dtype)
        return csr_kernel(shape)(data, pointers, rows, x.T).T

    samples = len(x)
    parts = math.ceil(samples / SAMPLES_AT_ONCE)
    length = math.ceil(samples / parts / SIDE_BY_SIDE) * SIDE_BY_SIDE
    x = jnp.pad(x, [(0, parts * length - samples), (0, 0)])
    if parts == 1:
        return of_part(x)[:samples]
    results = jax.lax.map(of_part, x.reshape(parts, length, -1))
    return results.reshape(parts * length, -1)[:samples]


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
    if _is_dense_enough(x, sparse_mat) or not suits_kernel(x, weight, sparse_mat):
        return product(x, weight, sparse_mat)
    return product_by_kernel(x, weight, sparse_mat)


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

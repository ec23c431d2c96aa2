r"""SDDMM: the sums :math:`\sum_k x_{k\,r(e)} f_{k\,c(e)}` for every entry ``e``.

They are the elements of the dense product :math:`x^\top f` at the entries of a sparse matrix: the
gradient of the entries over steps and samples, and the terms that a chunk of steps adds to their
traces. With ``k`` as their last axis, the two factors of an entry are two rows of contiguous
numbers. Rows are gathered for a block of entries and for a part of the ``k`` at a time. Both then
stay in the caches, and no array with the size of all entries times all ``k`` is built.

A CPU adds up pieces of a row in one register before it adds up the numbers of that register; the
second sum takes as long as some 60 products. If rows do not fit the caches, or for many ``k``, the
entries of a block are sorted by the index that their order scatters, and put back afterwards.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import sharding_dependent
from .pattern import SparsePattern

FEWEST_ROWS, FEWEST_ENTRIES = 8, 2**12
"""Below these sizes, gathering the factors at once is faster: a row costs as much as 10 numbers."""

ROWS_AT_ONCE, PIECE, TERMS_AT_ONCE = 64, 16, 2**18
"""On a CPU: size of a part of the ``k``, of a piece of it, and products of a block of entries."""

WIDE, MANY_ROWS = 2**15, 2**8
"""Entries are sorted for a matrix with this many rows or columns, or for this many ``k``. With 10^4
columns and 1024 rows this takes 1.6 ms instead of 2.0 for 16 rows."""

MOST_TERMS = 2**26
"""On other devices, and with several devices: the products of a block of entries."""


def is_large(sparse_mat: SparsePattern, rows: int) -> bool:
    """Test whether sums over this number of rows are to be taken block by block."""
    return rows >= FEWEST_ROWS and sparse_mat.nnz >= FEWEST_ENTRIES


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
    on_cpu = functools.partial(sharding_dependent, sharded=_at_once, unsharded=_on_processor)
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=_at_once)


def _at_once(x: Any, factor: Any, rows: Any, columns: Any, *_: Any) -> Any:
    x, factor = (jnp.moveaxis(array, (0, -1), (-1, 0)) for array in (x, factor))

    def of_block(at_rows: Any, at_columns: Any) -> Any:
        products = picked(x, at_rows) * picked(factor, at_columns)
        return jnp.moveaxis(products.sum(-1, dtype=sum_dtype(products)), 0, -1)

    size = MOST_TERMS // math.prod(x.shape[1:])
    return joined(over_blocks(of_block, rows, columns, size), len(rows))


def _on_processor(x: Any, factor: Any, rows: Any, columns: Any, *ordered: Any) -> Any:
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
    parts = math.ceil(x.shape[0] / ROWS_AT_ONCE)
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

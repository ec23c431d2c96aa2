r"""The sums :math:`\sum_k x_{k\,r(e)} f_{k\,c(e)}` for every entry ``e`` of a sparse matrix.

They are some elements of the dense product :math:`x^\top f`: the gradient of the entries over
steps and samples, and what a chunk of steps adds to their traces. With ``k`` as their last axis,
the two factors of an entry are two rows of contiguous numbers. Rows are gathered for a block of
entries and for a part of the ``k`` at a time, so that both stay in the caches and nothing of the
size of all entries times all ``k`` is ever held.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import divided_dependent
from .sparse_pattern import SparsePattern

FEWEST_ROWS, FEWEST_ENTRIES = 8, 2**12
"""Below, to gather the factors at once is faster: a row costs as much as some 10 numbers."""

ROWS_AT_ONCE, TERMS_AT_ONCE = 64, 2**18
"""On a processor: a part of the ``k``, and the products of a block of entries."""

MOST_TERMS = 2**26
"""Elsewhere, and where several devices share the work: the products of a block of entries."""


def is_large(sparse_mat: SparsePattern, rows: int) -> bool:
    """Tell whether sums over some rows are to be taken block by block."""
    return rows >= FEWEST_ROWS and sparse_mat.nnz >= FEWEST_ENTRIES


def sampled_product(x: Any, factor: Any, sparse_mat: SparsePattern) -> Any:
    """Return the sums over the first axis, for every entry.

    Parameters
    ----------
    x, factor : array ``(k, in)`` and ``(k, out)``, or ``(k, batch, in)`` and ``(k, batch, out)``
        Of one dtype.
    sparse_mat : SparsePattern
        Where the entries stand.

    Returns
    -------
    array ``(nnz,)`` or ``(batch, nnz)``
        Of at least single precision.
    """
    if sparse_mat.has_padding:
        x, factor = (jnp.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, 1)]) for a in (x, factor))
    operands = x, factor, sparse_mat.rows, sparse_mat.columns
    on_cpu = functools.partial(divided_dependent, divided=_at_once, whole=_of_samples)
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=_at_once)


def _at_once(x: Any, factor: Any, rows: Any, columns: Any) -> Any:
    blocks = _blocks(x, factor, rows, columns, terms=MOST_TERMS, total=_reduced)
    return _joined(blocks, len(rows))


def _of_samples(x: Any, factor: Any, rows: Any, columns: Any) -> Any:
    """Take samples one by one and steps part by part: what is gathered from stays in a cache."""
    if x.ndim > 2:
        pairs = jnp.swapaxes(x, 0, 1), jnp.swapaxes(factor, 0, 1)
        return jax.lax.map(lambda pair: _of_samples(pair[0], pair[1], rows, columns), pairs)
    parts = math.ceil(x.shape[0] / ROWS_AT_ONCE)
    length = math.ceil(x.shape[0] / parts)
    missing = [(0, parts * length - x.shape[0]), (0, 0)]
    cut = tuple(jnp.pad(array, missing).reshape(parts, length, -1) for array in (x, factor))

    def of_part(part: tuple[Any, Any]) -> Any:
        terms, total = TERMS_AT_ONCE, _multiplied_by_ones
        return _blocks(*part, rows, columns, terms=terms, total=total)

    sums = of_part((cut[0][0], cut[1][0]))
    if parts > 1:  # blocks are joined once: XLA would join and add them up number by number
        rest = cut[0][1:], cut[1][1:]
        sums, _ = jax.lax.scan(lambda sums, part: (sums + of_part(part), None), sums, rest)
    return _joined(sums, len(rows))


def _blocks(
    x: Any,
    factor: Any,
    rows: Any,
    columns: Any,
    *,
    terms: int,
    total: Callable[[Any], Any],
) -> Any:
    """Return the sums of blocks of entries ``(blocks, ..., entries)``, the last one shifted.

    It begins so early that it ends with the last entry.
    """
    x, factor = (jnp.moveaxis(array, (0, -1), (-1, 0)) for array in (x, factor))
    size = min(len(rows), max(1, terms // math.prod(x.shape[1:])))

    def of_block(first: Any) -> Any:
        at_rows, at_columns = (
            jax.lax.dynamic_slice_in_dim(places, first, size) for places in (rows, columns)
        )
        return jnp.moveaxis(total(picked(x, at_rows) * picked(factor, at_columns)), 0, -1)

    return jax.lax.map(of_block, jnp.arange(0, len(rows), size))


def _joined(blocks: Any, entries: int) -> Any:
    blocks = jnp.moveaxis(blocks, 0, -2)
    *lead, count, size = blocks.shape
    full = blocks[..., :-1, :].reshape(*lead, (count - 1) * size)
    return jnp.concatenate([full, blocks[..., -1, count * size - entries :]], axis=-1)


def picked(array: Any, indices: Any) -> Any:
    """Return elements of the first axis; no index lies outside."""
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _sum_dtype(products: Any) -> Any:
    # Sums in half precision would stop growing.
    return jnp.promote_types(products.dtype, jnp.float32)


def _multiplied_by_ones(products: Any) -> Any:
    """Return sums over the last axis, which XLA on a processor adds up one by one otherwise."""
    ones = jnp.ones(products.shape[-1], products.dtype)
    return jnp.dot(products, ones, preferred_element_type=_sum_dtype(products))


def _reduced(products: Any) -> Any:
    return products.sum(-1, dtype=_sum_dtype(products))

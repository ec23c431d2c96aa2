r"""The product with a sparse matrix of many entries by JAX's own kernel for a processor.

The kernel, Eigen's, multiplies a matrix stored row by row with a dense one from the left,
:math:`y^\top = W^\top x^\top`, on all cores. With 10^6 entries and 16 samples it takes 4.5 ms, sums
of scattered numbers take 12 to 28, brainevent's kernels (numba) 29 to 52, and SciPy 3.4 on one
core. It is fast for a multiple of 8 samples only, and 10 times slower for others: missing ones are
zero. For one sample scattered sums (1.4 ms) are as fast as SciPy (1.0) and brainevent (1.6).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import csr_kernel, has_csr_kernel
from .pattern import SparsePattern
from .sddmm import picked

FEWEST_SAMPLES, FEWEST_ENTRIES = 6, 2**14
"""Below, what the kernel takes for 8 samples is more than scattered sums take."""

SAMPLES_AT_ONCE, SIDE_BY_SIDE = 64, 8

DTYPES = frozenset(map(jnp.dtype, ("float32", "float64", "complex64", "complex128")))


def suits(x: Any, weight: Any, sparse_mat: SparsePattern) -> bool:
    """Tell whether the kernel can multiply these, and is faster."""
    is_large = len(x) >= FEWEST_SAMPLES and sparse_mat.nnz >= FEWEST_ENTRIES
    return is_large and x.dtype == weight.dtype and x.dtype in DTYPES and has_csr_kernel()


def product(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
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
    found = jax.lax.map(of_part, x.reshape(parts, length, -1))
    return found.reshape(parts * length, -1)[:samples]

r"""CSR kernel: products with a large sparse matrix on a CPU, by JAX's own kernel.

The kernel, from Eigen, multiplies a matrix stored row by row with a dense one from the left,
:math:`y^\top = W^\top x^\top`, on all cores. It is fast only for a multiple of 8 samples, and 10
times slower otherwise, so missing samples are filled with zeros.

================== ==================== =====================
10^6 entries       16 samples (ms)      1 sample (ms)
================== ==================== =====================
this kernel        4.5
segment sums       12 to 28             1.4
brainevent (numba) 29 to 52             1.6
SciPy, one core    3.4                  1.0
================== ==================== =====================
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import csr_kernel, has_csr_kernel
from .pattern import SparsePattern
from .sddmm import picked

FEWEST_SAMPLES, FEWEST_ENTRIES = 6, 2**14
"""Below these sizes, the kernel takes longer for 8 samples than segment sums."""

SAMPLES_AT_ONCE, SIDE_BY_SIDE = 64, 8

DTYPES = frozenset(map(jnp.dtype, ("float32", "float64", "complex64", "complex128")))


def suits(x: Any, weight: Any, sparse_mat: SparsePattern) -> bool:
    """Test whether the kernel supports these operands, and is faster."""
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
    results = jax.lax.map(of_part, x.reshape(parts, length, -1))
    return results.reshape(parts * length, -1)[:samples]

"""Arrays and sparse matrices that NumPy makes: JAX compiles a program for each."""

import jax
import numpy as np
import saiunit


def csr(dense):
    """Return what `saiunit.sparse.CSR.fromdense` does."""
    dense = np.asarray(dense)
    rows, columns = np.nonzero(dense)
    starts = np.searchsorted(rows, np.arange(len(dense) + 1))
    parts = (dense[rows, columns], columns.astype(np.int32), starts.astype(np.int32))
    return saiunit.sparse.CSR(tuple(map(jax.device_put, parts)), shape=dense.shape)


def normal(seed, *shape):
    """Numbers of single precision."""
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))

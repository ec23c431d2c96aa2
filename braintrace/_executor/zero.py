"""Traces that are known to be zero, or that are kept in a narrower dtype.

At the start of a sequence every trace is zero. Wherever that is known, it is given by its
shapes alone (``jax.ShapeDtypeStruct``): XLA does not drop a product with zeros, since zero
times infinity is not zero, but a term that is never written costs nothing.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._typing import PyTree


def is_zero(trace: PyTree) -> bool:
    """Tell whether a trace is given by its shapes alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trace))


def as_arrays(traces: PyTree) -> PyTree:
    """Return traces with arrays of zeros in place of shapes."""

    def as_array(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf

    return jax.tree.map(as_array, traces)


def widened(trace: PyTree, dtype: DTypeLike) -> PyTree:
    """Return a trace in a dtype that holds both its own values and those of ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, dtype)), trace)

"""Traces that are known to be zero, or stored in a narrower dtype.

At the start of a sequence every trace is zero. If this is known, a trace is represented by its
shapes alone (``jax.ShapeDtypeStruct``). XLA does not remove a product with zeros, since zero times
infinity is not zero, but a term that is never written has no cost.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._typing import PyTree
from .products.in_place import ordered_after


def is_zero(trace: PyTree) -> bool:
    """Test whether a trace is represented by its shapes alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trace))


def as_arrays(traces: PyTree) -> PyTree:
    """Return traces with arrays of zeros instead of shapes."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_zero(leaf) else leaf, traces
    )


def examples(shapes: PyTree) -> PyTree:
    """Return zeros with given shapes, as example arguments for tracing.

    Each is a single NumPy zero, broadcast to the shape: it takes no memory, while JAX would compile
    a program for each shape.
    """

    def example(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(example, shapes)


def widened(trace: PyTree, dtype: DTypeLike) -> PyTree:
    """Return a trace in the promoted type of its dtype and ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, dtype)), trace)


def unfused(product: jax.Array, factor: jax.Array) -> jax.Array:
    """Return a product of a factor with traces that XLA computes separately.

    XLA of jaxlib 0.10 on a CPU fuses a product into the sum over an axis that it is added to. If it
    knows that all entries of the other factor are equal, as in traces that the program has just
    reset, it then reads uninitialised memory. It does not fuse a selection.
    """
    result: jax.Array = ordered_after([factor], product)
    return result

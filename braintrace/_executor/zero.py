"""Traces that are known to be zero, or that are kept in a narrower dtype.

At the start of a sequence every trace is zero. Wherever that is known, it is given by its
shapes alone (``jax.ShapeDtypeStruct``): XLA does not drop a product with zeros, since zero
times infinity is not zero, but a term that is never written costs nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._typing import PyTree
from .overwriting import not_before


def is_zero(trace: PyTree) -> bool:
    """Tell whether a trace is given by its shapes alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trace))


def as_arrays(traces: PyTree) -> PyTree:
    """Return traces with arrays of zeros in place of shapes."""

    def as_array(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf

    return jax.tree.map(as_array, traces)


def examples(shapes: PyTree) -> PyTree:
    """Return arrays of zeros as examples of arrays of these shapes, for functions to be traced on.

    Each is a single zero of NumPy's, shown as an array of that shape: an example takes no memory,
    and JAX would compile a program for each shape.
    """

    def example(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(example, shapes)


def widened(trace: PyTree, dtype: DTypeLike) -> PyTree:
    """Return a trace in a dtype that holds both its own values and those of ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, dtype)), trace)


def apart(product: jax.Array, factor: jax.Array) -> jax.Array:
    """Return a product of one factor with traces as it is, and to be computed as it stands.

    XLA of jaxlib 0.10 on a CPU joins a product to a sum over an axis that it is added to. Where it
    knows that all numbers of the other factor are the same, as those of traces are that a program
    has just reset, it then reads memory that nobody has written. It does not join a selection.
    """
    found: jax.Array = not_before([factor], product)
    return found

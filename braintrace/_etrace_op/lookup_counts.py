"""The filter of an embedding's input: discounted counts of each row's lookups.

It is the low-pass filter of the one-hot input, which is never built.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .derive import like_operand
from .registry import Arrays


def zero_counts(x_var: Any, y_var: Any, *, rows: int) -> jax.Array:
    """Return zero counts of the rows, for each index of a step."""
    return jnp.zeros((*x_var.aval.shape, rows), y_var.aval.dtype)


def count(counts: jax.Array, indices: jax.Array, factors: jax.Array) -> jax.Array:
    """Count the lookups of several steps, times a factor for each step and sample."""

    def counted(row_counts: jax.Array, index: jax.Array, factor: jax.Array) -> jax.Array:
        return row_counts.at[index].add(factor.astype(row_counts.dtype), mode="drop")

    if indices.ndim == 2:
        counted = jax.vmap(counted, in_axes=(0, 1, 1))
    return counted(counts, indices, factors)


def pull_back_counts(counts: jax.Array, hidden_dim: jax.Array, weights: Arrays) -> Arrays:
    """Return the gradient of a table, with counts as the input."""
    product = jnp.einsum("...i,...o->io", counts.astype(hidden_dim.dtype), hidden_dim)
    return {"weight": like_operand(product, weights["weight"])}

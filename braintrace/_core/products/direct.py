"""Gradients by relation: sums, dtypes, and the inputs of operations."""

import jax
import jax.numpy as jnp

from ..._graph import ETraceGraph, Records, Weights
from ..layout import TraceSite, x_key


def input_of(graph: ETraceGraph, site: TraceSite, records: Records) -> jax.Array | None:
    """Return the recorded input of an operation, or None if it has no input."""
    has_input = site.relation.x_var is not None
    return records.x[x_key(graph, site.relation)] if has_input else None


def like(weights: Weights, gradients: Weights) -> Weights:
    """Return gradients with the dtypes of the weights."""
    result: Weights = jax.tree.map(lambda w, g: g.astype(w.dtype), weights, gradients)
    return result


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; gradients of relations that only one argument has are unchanged."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}

"""Gradients by relation: products of inputs and factors, sums, and dtypes."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..._etrace_op import Arrays, pull_back
from ..._graph import ETraceGraph, Records, Weights
from ..layout import row_name, trace_sites, x_key
from .nan_safe import finite_inputs

Inputs: TypeAlias = Mapping[str, jax.Array | None]
"""Inputs of operations over time, by relation; ``None``: it has no input."""


def recorded_inputs(graph: ETraceGraph, records: Records) -> Inputs:
    """Return the recorded inputs of the operations."""
    relations = graph.hidden_param_op_relations
    return {r.key: None if r.x_var is None else records.x[x_key(graph, r)] for r in relations}


def sum_products(
    graph: ETraceGraph,
    weights: Weights,
    inputs: Inputs,
    factors: Arrays,
    selects: bool,
    pull: Callable[..., Arrays] = pull_back,
) -> Weights:
    """Return ``Σ x ⊗ f`` over time, batch and groups: one product for each site in ``inputs``.

    Parameters
    ----------
    graph, weights
        The compiled model, and the operands of its relations.
    inputs, factors
        Inputs by relation, and factors by `row_name`, time first.
    selects
        See `nan_safe`.
    pull
        Pulls factors back to the operands, given the inputs.
    """
    gradients: Weights = {}
    for site in trace_sites(graph):
        name, key = row_name(graph, site), site.relation.key
        if name in factors and key in inputs:
            x, factor = inputs[key], factors[name]
            if site.has_fan_out:  # without an input, one sum over all steps and samples
                factor = factor.sum((0, 1))[None] if x is None else factor.sum(1)
            x = finite_inputs(site, x, factor) if selects else x
            gradients = add(gradients, {key: pull(*site.operation, x, factor, weights[key])})
    return gradients


def like(arrays: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return new arrays, gradients or traces, with the dtypes of others."""
    result: dict[str, Any] = jax.tree.map(lambda a, n: n.astype(a.dtype), dict(arrays), dict(new))
    return result


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; gradients of relations that only one argument has are unchanged."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}

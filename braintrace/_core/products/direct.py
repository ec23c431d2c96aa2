r"""Direct gradient: the contribution of the steps of a recorded chunk.

.. math:: \sum_s x^s \otimes (D_f^s \cdot \lambda^s),

one product over time and batch for every operation; :math:`\lambda` is the adjoint of the states of
each step.
"""

import functools

import jax
import jax.numpy as jnp

from ..._etrace_op import Arrays, pull_back
from ..._graph import ETraceGraph, HiddenGroup, Records, Weights
from ..layout import TraceSite, trace_sites, x_key
from .active_outputs import ActiveOutputs, active_outputs_of
from .nan_safe import Products


def direct_gradient(
    graph: ETraceGraph,
    group: HiddenGroup,
    weights: Weights,
    records: Records,
    adjoint: dict[int, jax.Array],
    products: Products,
) -> Weights:
    """Return the gradients of the relations of one group, by relation.

    Parameters
    ----------
    graph, group, weights, records
        The compiled model, one of its groups, and the operands and residuals of a chunk.
    adjoint
        Adjoints of some states of the group, per element, time first.
    products
        Multiplication of the factors.
    """
    gradients = {}
    for site in trace_sites(graph, group):
        states = [a for a in site.influence.reached if a in adjoint and site.key(a) in records.Df]
        if states:
            terms = [
                products.times(site.to_outputs(adjoint[a]), records.Df[site.key(a)]) for a in states
            ]
            factor = sum(terms[1:], terms[0])
            if site.has_fan_out:  # without an input, one sum over all steps and samples
                over_time = site.relation.x_var is None
                factor = factor.sum((0, 1))[None] if over_time else jnp.sum(factor, axis=1)
            active = active_outputs_of(site.relation, site.influence, states)
            x, key = input_of(graph, site, records), site.relation.key
            x = products.inputs(site, x, factor)
            gradients[key] = _pulled_back(site, active, x, factor, weights[key])
    return gradients


def input_of(graph: ETraceGraph, site: TraceSite, records: Records) -> jax.Array | None:
    """Return the recorded input of an operation, or None if it has no input."""
    has_input = site.relation.x_var is not None
    return records.x[x_key(graph, site.relation)] if has_input else None


def _pulled_back(
    site: TraceSite,
    active: ActiveOutputs,
    x: jax.Array | None,
    factor: jax.Array,
    weights: Arrays,
) -> Arrays:
    if active.runs is None:
        return pull_back(*site.operation, x, factor, weights)
    select = functools.partial(active.operands, site.relation)
    result = pull_back(*site.operation, x, active.pick(factor), select(weights))
    (gradients,) = jax.linear_transpose(select, weights)(result)
    return dict(gradients)


def like(weights: Weights, gradients: Weights) -> Weights:
    """Return gradients with the dtypes of the weights."""
    result: Weights = jax.tree.map(lambda w, g: g.astype(w.dtype), weights, gradients)
    return result


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; gradients of relations that only one argument has are unchanged."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}

r"""Gradients as products of filtered inputs with output-shaped factors.

.. math::

    \nabla w = \sum_s \epsilon_x^s \otimes ( \sum_a l^s[p(u), a]\, f^s[u, a] ),

one product over time and batch for every operation; ``f`` is a rule's approximation of the
derivative of a state with respect to the output.
"""

import jax
import jax.numpy as jnp

from ..._core.layout import (
    TraceSite,
    filter_key,
    output_keys,
    trace_sites,
)
from ..._core.products.direct import add, like
from ..._core.products.nan_safe import Products
from ..._etrace_op import Arrays, pull_back_filtered
from ..._graph import ETraceGraph, Weights


def factors(graph: ETraceGraph, signal: Arrays, f: Arrays, products: Products) -> Arrays:
    """Return ``Σ_a l[a] f[a]`` of one step, by the name of the first state's output-shaped array.

    Both are in the layout of each operation's output, by names (see `output_keys`).
    """
    result: Arrays = {}
    shared = output_keys(graph)
    for site in trace_sites(graph):
        keys = [shared[site.key(a)] for a in site.influence.reached]
        shown = [key for key in keys if key in signal and key in f]
        terms = [products.times(signal[key], f[key]) for key in shown]
        if terms and keys[0] not in result:
            total = sum(terms[1:], terms[0])
            total = jnp.sum(total, axis=0) if _is_summed_by_step(site) else total
            result[keys[0]] = total.astype(site.relation.y_var.aval.dtype)
    return result


def _is_summed_by_step(site: TraceSite) -> bool:
    """Test whether the cotangents of a fan-out are summed to one output in each step.

    Its elements may be samples on several devices. Without an input, there is only one sum, over
    all steps, and so only one collective.
    """
    is_alone = jax.device_count() == 1
    return site.has_fan_out and (is_alone or site.relation.x_var is not None)


def contract(
    graph: ETraceGraph, weights: Weights, eps_x: Arrays, factors: Arrays, products: Products
) -> Weights:
    """Return the gradients of all relations whose filter is given, over time and batch at once."""
    gradients = jax.tree.map(jnp.zeros_like, weights)
    shared = output_keys(graph)
    for site in trace_sites(graph):
        relation, name = site.relation, shared[site.key(site.influence.reached[0])]
        is_known = relation.x_var is None or filter_key(graph, relation) in eps_x
        if name in factors and is_known:
            x = None if relation.x_var is None else eps_x[filter_key(graph, relation)]
            factor = factors[name]
            if site.has_fan_out and not _is_summed_by_step(site):
                factor = factor.sum((0, 1))[None]
            x = products.inputs(site, x, factor)
            part = pull_back_filtered(*site.operation, x, factor, weights[relation.key])
            gradients = add(gradients, {relation.key: part})
    return like(weights, gradients)


def contract_once(
    graph: ETraceGraph,
    weights: Weights,
    eps_x: Arrays,
    signal: Arrays,
    f: Arrays,
    products: Products,
) -> Weights:
    """Return the gradients of all relations for one signal; see `factors` and `contract`."""
    result = eps_x, factors(graph, signal, f, products)
    x, factor = jax.tree.map(lambda leaf: leaf[None], result)
    return contract(graph, weights, x, factor, products)

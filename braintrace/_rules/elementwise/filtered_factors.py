r"""Filters of output factors, instead of filters of inputs.

Along a chunk of ``K`` steps, with :math:`\epsilon_x^s = \alpha \epsilon_x^{s-1} + \phi(x^s)`,

.. math::

    \sum_s \epsilon_x^s \otimes f^s = \sum_s \phi(x^s) \otimes g^s
    + \epsilon_x^0 \otimes \alpha g^1, \qquad g^s = f^s + \alpha\, g^{s+1},

and the filter advances once, :math:`\epsilon_x^K = \alpha^K \epsilon_x^0 + \sum_s \alpha^{K-s}
\phi(x^s)`. This form is used for embeddings, which then add only to rows that they have looked up.
A filter at each step updates all rows: sequences of 64 steps and 8 samples with a table of 10,000
rows take 10 times as long with it, of 128 steps and 16 samples with 200 rows 1.4 times (CPU,
2026-11-25).
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.layout import TraceSite, filter_key, output_keys, trace_sites, x_key
from ..._core.products.direct import add
from ..._core.products.nan_safe import Products
from ..._core.resets import over_first_axis
from ..._core.time_loops import scan_over_time
from ..._core.zero import as_arrays, is_zero, widened
from ..._etrace_op import (
    Arrays,
    count_steps,
    get_primitive_spec,
    pull_back,
    pull_back_filtered,
)
from ..._graph import ETraceGraph, HiddenParamOpRelation, Records, Weights
from .input_filters import inputs_of, rows_of_samples


def split_filters(graph: ETraceGraph, records: Records, filters: Arrays) -> tuple[Arrays, Arrays]:
    """Return the filters of inputs that advance at each step, and those that advance once."""
    relations = inputs_of(graph)
    once = {key for key in filters if records.steps > 1 and _looks_up(relations[key])}
    stepwise = {key: eps for key, eps in filters.items() if key not in once}
    return stepwise, {key: eps for key, eps in filters.items() if key in once}


def advanced_filters(graph: ETraceGraph, alpha: float, records: Records, filters: Arrays) -> Arrays:
    """Return filters that advance once, after a recorded chunk."""
    steps, result = records.steps, {}
    for key, stored in filters.items():
        relation = inputs_of(graph)[key]
        wide = jnp.promote_types(stored.dtype, relation.y_var.aval.dtype)
        before = widened(as_arrays(stored), wide)
        powers = jnp.asarray(alpha ** np.arange(steps)[::-1], wide)
        x = records.x[x_key(graph, relation)]
        lead = x.shape[: 1 + _lead(relation)]
        factors = jnp.broadcast_to(over_first_axis(powers, len(lead)), lead)
        is_new, before = _reset_rows(graph, key, records), alpha**steps * before
        if is_new is not None:
            later = jax.lax.cummax(is_new.astype(jnp.int8), axis=0, reverse=True) > 0
            factors = jnp.where(jnp.concatenate([later[1:], jnp.zeros_like(later[:1])]), 0, factors)
            before = jnp.where(over_first_axis(later[0], before.ndim), 0, before)
        after = count_steps(before, x, factors)
        result[key] = after.astype(stored.dtype)
    return result


def gradients(
    graph: ETraceGraph,
    alpha: float,
    weights: Weights,
    records: Records,
    filters: Arrays,
    factors: Arrays,
    products: Products,
) -> Weights:
    """Return the gradients of a recorded chunk, for operations whose filters advance once.

    Parameters
    ----------
    graph, alpha, weights, records
        The compiled model, the decay of the filters, the operands, and the chunk.
    filters
        The filters before the chunk.
    factors
        Factors of all steps, time first, by name; see `filtered_products`.
    products
        Multiplication of the factors.
    """
    result: Weights = {}
    for site, name in _sites(graph, filters):
        if name not in factors:
            continue
        relation, operands = site.relation, weights[site.relation.key]
        key = filter_key(graph, relation)
        is_new = _reset_rows(graph, key, records)
        past, own = _backward(alpha, factors[name], is_new)
        x = products.inputs(site, records.x[x_key(graph, relation)], own)
        part = pull_back(*site.operation, x, own, operands)
        result = add(result, {relation.key: part})
        if not is_zero(filters[key]):
            eps = products.inputs(site, widened(filters[key], past.dtype)[None], past[None])
            part = pull_back_filtered(*site.operation, eps, past[None], operands)
            result = add(result, {relation.key: part})
    return result


def _backward(
    alpha: float, factors: jax.Array, is_new: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return ``α g^1``, the factor of the filter before the chunk, and ``g`` of every step."""

    def step(
        later: jax.Array, now: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        factor, is_new = now
        g = factor + later
        if is_new is None:
            return alpha * g, g
        return jnp.where(over_first_axis(is_new, g.ndim), 0, alpha * g), g

    factors = widened(factors, jnp.float32)
    start = jnp.zeros_like(factors[0])
    past, own = scan_over_time(step, start, (factors, is_new), reverse=True)
    return past, own


def _sites(graph: ETraceGraph, filters: Arrays) -> list[tuple[TraceSite, str]]:
    """Return the uses of operations with some filters, and the names of their factors."""
    shared = output_keys(graph)
    return [
        (site, shared[site.key(site.influence.reached[0])])
        for site in trace_sites(graph)
        if site.relation.x_var is not None and filter_key(graph, site.relation) in filters
    ]


def _looks_up(relation: HiddenParamOpRelation) -> bool:
    return get_primitive_spec(relation.primitive).looks_up


def _lead(relation: HiddenParamOpRelation) -> int:
    """Return the number of axes of samples."""
    return int(get_primitive_spec(relation.primitive).batched)


def _reset_rows(graph: ETraceGraph, key: str, records: Records) -> jax.Array | None:
    """Return the rows of a filter that are reset before each step: ``(steps, [batch])``."""
    if records.reset is None:
        return None
    lead = _lead(inputs_of(graph)[key])
    return jax.vmap(lambda flags: rows_of_samples(graph, key, lead, flags))(records.reset)

r"""Filters of the inputs of operations along a chunk, by name.

Operations with the same input share its filter; the first of them names it.

The filter of an embedding contains discounted counts of the lookups of each row. Of a chunk of
``K`` steps, its factors ``f`` are filtered backward in time instead,

.. math::

    \sum_s f^s \otimes \epsilon_x^s = \sum_s g^s \otimes x^s + \alpha g^1 \otimes \epsilon_x^0,
    \qquad g^s = f^s + \alpha\, g^{s+1},

and the counts advance once. The gradient of the table then changes only in the rows that were
looked up: with a filter of each step, 64 steps of 8 samples with 10,000 rows take 10 times as long
(CPU, 2026-11-25).
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._core.layout import TraceSite, filter_key, row_name, trace_sites, x_key
from .._core.products import Inputs
from .._core.signals import at_elements, over_first_axis
from .._core.time_loops import scan_records
from .._core.traces import as_arrays, is_zero, widened
from .._errors import OptionError, PrimitiveError
from .._etrace_op import (
    ETP_RULES_INIT_PP,
    Arrays,
    count,
    get_primitive_spec,
    pull_back,
    zero_filter,
)
from .._graph import ETraceGraph, HiddenParamOpRelation, Records, Role, TraceSpec
from .._jax import struct_of
from .._jaxpr.dataflow import Kind, kinds_of


def inputs_of(graph: ETraceGraph) -> dict[str, HiddenParamOpRelation]:
    """Return the first of the operations that share the filter of an input, by its name."""
    relations = graph.hidden_param_op_relations
    return {r.key: r for r in relations if r.x_var is not None and filter_key(graph, r) == r.key}


def by_relation(graph: ETraceGraph, filters: Arrays) -> Inputs:
    """Return the filter of each relation; ``None`` for a relation without an input."""
    relations, found = graph.hidden_param_op_relations, dict[str, jax.Array | None]()
    for relation in relations:
        if relation.x_var is None:
            found[relation.key] = None
        elif (key := filter_key(graph, relation)) in filters:
            found[relation.key] = filters[key]
    return found


def _looks_up(relation: HiddenParamOpRelation) -> bool:
    return get_primitive_spec(relation.primitive).looks_up


def filter_inputs(
    graph: ETraceGraph, alpha: float, records: Records, before: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the filters of every step of a chunk, without counts, and the filters after it."""
    relations = inputs_of(graph)
    dense = {key: relation for key, relation in relations.items() if not _looks_up(relation)}
    start = {
        key: widened(as_arrays(before[key]), relation.y_var.aval.dtype)
        for key, relation in dense.items()
    }

    def step(eps: Arrays, now: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        x, reset = now
        if reset is not None:
            eps = {key: _unless(rows_of_samples(graph, key, reset), e) for key, e in eps.items()}
        eps = {key: (alpha * value + x[key]).astype(value.dtype) for key, value in eps.items()}
        return eps, eps

    x = {key: records.x[x_key(graph, relation)] for key, relation in dense.items()}
    after, every = scan_records(step, start, (x, records.reset), records.steps)
    for key in relations.keys() - dense.keys():
        after[key] = _counts_after(graph, alpha, records, key, as_arrays(before[key]))
    return every, {key: eps.astype(before[key].dtype) for key, eps in after.items()}


def _unless(flags: jax.Array, eps: jax.Array) -> jax.Array:
    return jnp.where(over_first_axis(flags, eps.ndim), 0, eps)


def _counts_after(
    graph: ETraceGraph, alpha: float, records: Records, key: str, before: jax.Array
) -> jax.Array:
    x = records.x[x_key(graph, inputs_of(graph)[key])]
    before = widened(before, jnp.float32)
    powers = jnp.asarray(alpha ** np.arange(records.steps)[::-1], before.dtype)
    factors, before = over_first_axis(powers, x.ndim), alpha**records.steps * before
    if records.reset is not None:
        is_new = jax.vmap(functools.partial(rows_of_samples, graph, key))(records.reset)
        later = jax.lax.cummax(is_new.astype(jnp.int8), axis=0, reverse=True) > 0
        is_last = ~jnp.concatenate([later[1:], jnp.zeros_like(later[:1])])
        factors = jnp.where(over_first_axis(is_last, x.ndim), factors, 0)
        before = _unless(later[0], before)
    return count(before, x, jnp.broadcast_to(factors, x.shape))


InputsAndFactors: TypeAlias = tuple[Inputs, Arrays]
"""In place of the input of each relation, and factors by the names of rows, time first."""


def filter_backward(
    graph: ETraceGraph, alpha: float, records: Records, before: Arrays, factors: Arrays
) -> tuple[InputsAndFactors, InputsAndFactors]:
    """Return the indices of a chunk with ``g``, and the counts before it with ``α g^1``."""
    sites = {row_name(graph, site): site for site in trace_sites(graph) if _looks_up(site.relation)}
    relations = [r for r in graph.hidden_param_op_relations if _looks_up(r)]

    def step(later: Arrays, now: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        factors, reset = now
        g = {name: factor + later[name] for name, factor in factors.items()}
        kept = {name: alpha * value for name, value in g.items()}
        if reset is not None:
            for name, value in kept.items():
                flags = at_elements(graph, sites[name].group, reset)
                kept[name] = jnp.where(sites[name].to_outputs(flags), 0, value)
        return kept, g

    # Sums in half precision would stop growing.
    own = {name: widened(f, jnp.float32) for name, f in factors.items() if name in sites}
    zeros = {name: jnp.zeros_like(factor[0]) for name, factor in own.items()}
    first, g = scan_records(step, zeros, (own, records.reset), records.steps, reverse=True)
    counts = {r.key: before[filter_key(graph, r)] for r in relations}
    indices = {r.key: records.x[x_key(graph, r)] for r in relations}
    known = {key: eps[None] for key, eps in counts.items() if not is_zero(eps)}
    return (indices, g), (known, {name: value[None] for name, value in first.items()})


def rows_of_samples(graph: ETraceGraph, key: str, flags: jax.Array) -> jax.Array:
    """Return the rows of a filter of inputs whose sample has a flag; one flag stays one.

    Raises
    ------
    OptionError
        If samples that share the input, or one of the states that it reaches, have flags.
    """
    if flags.ndim == 0:
        return flags
    sites = [
        site
        for site in trace_sites(graph)
        if site.relation.x_var is not None and filter_key(graph, site.relation) == key
    ]
    if len({_is_shared(graph, site) for site in sites}) > 1:
        raise OptionError(
            f"The input of '{key}' reaches hidden states that all samples share, and others that "
            "they do not, so this algorithm cannot reset single samples. Give `reset` one value "
            "per step, or use `D_RTRL`."
        )
    return functools.reduce(jnp.logical_or, [_rows(graph, site, flags) for site in sites])


def _is_shared(graph: ETraceGraph, site: TraceSite) -> bool:
    return all(graph.batch.axis(state) is None for state in site.group.states)


def _rows(graph: ETraceGraph, site: TraceSite, flags: jax.Array) -> jax.Array:
    if not get_primitive_spec(site.relation.primitive).batched:
        raise OptionError(
            f"All samples share the input of '{site.relation.key}', so this algorithm cannot "
            "reset single samples. Give `reset` one value per step, or use `D_RTRL`."
        )
    outputs = site.to_outputs(at_elements(graph, site.group, flags))
    rows = outputs.any(0) if site.has_fan_out else outputs
    return rows.any(tuple(range(1, rows.ndim)))


def check_filtered_inputs(graph: ETraceGraph, rule: str) -> None:
    """Check that every operation has a gradient in terms of a filter of its input.

    Raises
    ------
    PrimitiveError
        Naming the rule, and the first operation that is not linear in its input.
    """
    for relation in graph.hidden_param_op_relations:
        spec = get_primitive_spec(relation.primitive)
        is_known = spec.linear_in_input or spec.looks_up
        if relation.x_var is None or is_known or _is_linear_in_input(relation):
            continue
        raise PrimitiveError(
            f"{rule} filters the input of '{relation.key}' ({relation.source}), but `xy_to_dw` of "
            f"`{relation.primitive}` is not linear in that input. Use `D_RTRL`, or compute "
            "the nonlinear function before the operation. If JAX cannot see that it is linear, "
            "declare `linear_in_input=True`."
        )


def _is_linear_in_input(relation: HiddenParamOpRelation) -> bool:
    operation = relation.primitive, relation.params
    weights = {name: struct_of(var.aval) for name, var in relation.trainable_vars.items()}

    def pulled_back(x: jax.Array, factor: jax.Array, weights: Arrays) -> Arrays:
        return pull_back(*operation, x[None], factor[None], weights)

    y = struct_of(relation.y_var.aval)
    try:
        return Kind.OTHER not in kinds_of(pulled_back, _filter_shape(relation), y, weights)
    except Exception:  # a rule for integers, such as indices, may fail for other dtypes
        return False


def _filter_shape(relation: HiddenParamOpRelation) -> jax.ShapeDtypeStruct:
    operation = relation.primitive, relation.params
    zero = functools.partial(zero_filter, *operation, relation.x_var, relation.y_var)
    result: jax.ShapeDtypeStruct = jax.eval_shape(zero)
    return result


def spec_of_input(graph: ETraceGraph, key: str) -> TraceSpec:
    """Return the specification of the filter of an input."""
    relation = inputs_of(graph)[key]
    shape = _filter_shape(relation)

    def samples(flags: jax.Array) -> jax.Array:
        return over_first_axis(rows_of_samples(graph, key, flags), len(shape.shape))

    axes = _operand_axes(relation, len(shape.shape), "input")
    return TraceSpec(shape.shape, shape.dtype, axes, relation=key, operand="input", samples=samples)


def spec_of_output(graph: ETraceGraph, site: TraceSite, state: int) -> TraceSpec:
    """Return the specification of an array in the layout of an output, for one state."""
    relation, shape = site.relation, site.influence.output_shape
    lead: tuple[Role, ...] = ("fan_out",) if site.has_fan_out else ()

    def samples(flags: jax.Array) -> jax.Array:
        return site.to_outputs(at_elements(graph, site.group, flags))

    return TraceSpec(
        shape,
        _dtype_of_outputs(relation),
        (*lead, *_operand_axes(relation, len(shape) - len(lead), "output")),
        relation=relation.key,
        state=site.group.states[state].name,
        operand="output",
        samples=samples,
    )


def _dtype_of_outputs(relation: HiddenParamOpRelation) -> np.dtype:
    rule = ETP_RULES_INIT_PP[relation.primitive]
    variables = dict(relation.trainable_vars)
    zero = jax.eval_shape(lambda: rule(relation.x_var, relation.y_var, variables, 1))
    dtype: np.dtype = np.dtype(zero.dtype)
    return dtype


def _operand_axes(relation: HiddenParamOpRelation, ndim: int, last: Role) -> tuple[Role, ...]:
    is_batched = get_primitive_spec(relation.primitive).batched
    batch: list[Role] = ["batch"] if is_batched else []
    spatial: list[Role] = ["spatial"] * (ndim - len(batch) - 1)
    return tuple([*batch, *spatial, last][:ndim])

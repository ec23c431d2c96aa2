"""Low-pass filters of the operations' inputs.

Operations with the same input and the same kind of filter share it; the first of them names it. An
operation that is not linear in its input is refused, except an embedding: the filter of its one-hot
input contains counts.
"""

import functools

import jax
import jax.numpy as jnp

from ..._core.layout import TraceSite, filter_key, trace_sites, x_key
from ..._core.resets import at_elements, over_first_axis
from ..._core.zero import widened
from ..._errors import OptionError, PrimitiveError
from ..._etrace_op import (
    Arrays,
    add_to_filter,
    get_primitive_spec,
    pull_back,
    zero_filter,
)
from ..._graph import ETraceGraph, HiddenParamOpRelation, Role, TraceSpec
from ..._jax import struct_of
from ..._jaxpr.dataflow import Kind, kinds_of


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
        return Kind.OTHER not in kinds_of(pulled_back, _shape_of_filter(relation), y, weights)
    except Exception:  # a rule for integers, such as indices, may fail for other dtypes
        return False


def _shape_of_filter(relation: HiddenParamOpRelation) -> jax.ShapeDtypeStruct:
    operation = relation.primitive, relation.params
    result: jax.ShapeDtypeStruct = jax.eval_shape(
        lambda: zero_filter(*operation, relation.x_var, relation.y_var)
    )
    return result


def inputs_of(graph: ETraceGraph) -> dict[str, HiddenParamOpRelation]:
    """Return the operation of each filter of an input, by name.

    Operations that share a filter are represented by the first of them.
    """
    relations = graph.hidden_param_op_relations
    return {r.key: r for r in relations if r.x_var is not None and filter_key(graph, r) == r.key}


def specs_of_inputs(graph: ETraceGraph) -> dict[str, TraceSpec]:
    """Return the specifications of the filters of inputs, by name."""
    specs = {}
    for key, relation in inputs_of(graph).items():
        shape = _shape_of_filter(relation)
        specs[key] = TraceSpec(
            shape.shape,
            shape.dtype,
            operand_axes(relation, len(shape.shape), "input"),
            relation=key,
            operand="input",
            samples=functools.partial(rows_of_samples, graph, key, len(shape.shape)),
        )
    return specs


def operand_axes(relation: HiddenParamOpRelation, ndim: int, last: Role) -> tuple[Role, ...]:
    """Return the roles of the axes of an operation's input or output."""
    is_batched = get_primitive_spec(relation.primitive).batched
    batch: list[Role] = ["batch"] if is_batched else []
    spatial: list[Role] = ["spatial"] * (ndim - len(batch) - 1)
    return tuple([*batch, *spatial, last][:ndim])


def take_in(
    graph: ETraceGraph, alpha: float, stored: Arrays, x: Arrays, reset: jax.Array | None
) -> tuple[Arrays, Arrays]:
    """Return ``α ε_x + x`` after one more step, in computing and in stored precision.

    Samples whose flag is set are reset before the step.
    """
    by_key = {key: relation for key, relation in inputs_of(graph).items() if key in stored}
    before = {key: widened(eps, by_key[key].y_var.aval.dtype) for key, eps in stored.items()}
    if reset is not None:
        before = _reset_inputs(graph, before, reset)
    taken = {
        key: add_to_filter(r.primitive, alpha * before[key], x[x_key(graph, r)])
        for key, r in by_key.items()
    }
    return taken, {key: eps.astype(stored[key].dtype) for key, eps in taken.items()}


def _reset_inputs(graph: ETraceGraph, inputs: Arrays, reset: jax.Array) -> Arrays:
    """Return filters of inputs that are reset for some samples, or all."""
    return {
        key: jnp.where(rows_of_samples(graph, key, eps.ndim, reset), 0, eps)
        for key, eps in inputs.items()
    }


def rows_of_samples(graph: ETraceGraph, key: str, ndim: int, flags: jax.Array) -> jax.Array:
    """Return the rows of a filter of inputs that belong to samples whose flag is set."""
    sites = [
        site
        for site in trace_sites(graph)
        if site.relation.x_var is not None and filter_key(graph, site.relation) == key
    ]
    if flags.ndim and len({_is_shared(graph, site) for site in sites}) > 1:
        raise OptionError(
            f"The input of '{key}' reaches hidden states that all samples share, and others that "
            "they do not, so this algorithm cannot reset single samples. Give `reset` one value "
            "per step, or use `D_RTRL`."
        )
    rows = [_rows(graph, site, flags) for site in sites]
    return over_first_axis(functools.reduce(jnp.logical_or, rows), ndim)


def _is_shared(graph: ETraceGraph, site: TraceSite) -> bool:
    """Test whether the states of a group are shared by all samples."""
    return all(graph.batch.axis(state) is None for state in site.group.states)


def _rows(graph: ETraceGraph, site: TraceSite, reset: jax.Array) -> jax.Array:
    """Return the rows of an operation's input that belong to samples whose flag is set."""
    if reset.ndim == 0:
        return reset
    if not get_primitive_spec(site.relation.primitive).batched:
        raise OptionError(
            f"All samples share the input of '{site.relation.key}', so this algorithm cannot "
            "reset single samples. Give `reset` one value per step, or use `D_RTRL`."
        )
    flags = site.to_outputs(at_elements(graph, site.group, reset))
    if site.has_fan_out:
        flags = flags.any(0)
    return flags.any(tuple(range(1, flags.ndim)))

"""Filters of the inputs of operations, and arrays in the layout of their outputs, as traces.

An operation that is not linear in its input is refused, except an embedding: the filter of its
one-hot input contains counts.
"""

import functools

import jax
import numpy as np

from ..._core.layout import TraceSite
from ..._core.resets import at_elements, over_first_axis
from ..._errors import PrimitiveError
from ..._etrace_op import (
    ETP_RULES_INIT_PP,
    Arrays,
    get_primitive_spec,
    pull_back,
    zero_filter,
)
from ..._graph import ETraceGraph, HiddenParamOpRelation, Role, TraceSpec
from ..._jax import struct_of
from ..._jaxpr.dataflow import Kind, kinds_of
from .filtered_inputs import inputs_of, rows_of_samples


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

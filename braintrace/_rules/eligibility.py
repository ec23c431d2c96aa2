"""Eligibility: the trace of one weight, for every state that it reaches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import is_quantity
from .._core.layout import trace_sites
from .._core.products import active_outputs_of, trace_shapes
from .._errors import OptionError, ShapeError
from .._graph import (
    ETraceGraph,
    FlatState,
    HiddenParamOpRelation,
    Traces,
    TraceSpec,
    TraceSpecs,
    specs_of,
)
from .._graph.diagnostics import quoted
from .._typing import Path, path_name


def eligibility(
    graph: ETraceGraph, specs: TraceSpecs, traces: Traces, path: str | Path
) -> dict[str, Any]:
    """Return the derivative of states, by name, with respect to one parameter.

    Parameters
    ----------
    graph
        The compiled model.
    specs, traces
        Specifications of the stored traces, and the traces in unpacked form.
    path
        Path of the parameter, or its name.

    Returns
    -------
    dict
        An array for every state, or a dict of them if the parameter's value is a dict.

    Raises
    ------
    OptionError
        If there is no such weight, or no trace array of its form.
    ShapeError
        If it is used by operations whose traces have different forms.
    """
    name = path if isinstance(path, str) else path_name(tuple(path))
    names = _leaf_names(graph, name)
    if graph.flat_state is None:
        result = _of_operations(graph, specs, traces, name, names)
    else:
        result = _of_flat_state(graph, graph.flat_state, specs, traces, name, names)
    if not result:
        raise OptionError(
            f"This algorithm has no trace with the shape of '{name}'. D_RTRL, SnAp(n=1) and RTRL "
            "have one for every weight; other rules store filters of inputs and outputs, or "
            "entries of a sparsity pattern. Read these from `traces.value`."
        )
    return result if len(names) > 1 else {state: own[names[0]] for state, own in result.items()}


def _of_operations(
    graph: ETraceGraph, specs: TraceSpecs, traces: Traces, name: str, names: list[str]
) -> dict[str, dict[str, jax.Array]]:
    """Return the traces of operations' operands, by state and name of the parameter's array."""
    leaf_of = {
        (relation.key, array): relation.trainable_leaves[operand]
        for relation, operand in _operands(graph, name)
        for array in _arrays_of(graph, relation, operand)
    }
    result: dict[str, dict[str, jax.Array]] = {}
    for spec, trace in zip(jax.tree.leaves(specs), jax.tree.leaves(traces), strict=True):
        leaf = leaf_of.get((spec.relation, spec.operand))
        if spec.state is not None and leaf is not None:
            own = result.setdefault(spec.state, {})
            flat = _with_zeros(graph, specs, spec, trace)
            own[names[leaf]] = _added(name, own.get(names[leaf]), flat)
    return result


def _of_flat_state(
    graph: ETraceGraph,
    flat: FlatState,
    specs: TraceSpecs,
    traces: Traces,
    name: str,
    names: list[str],
) -> dict[str, dict[str, jax.Array]]:
    """Return the derivative of every state, ``(samples, *its shape, *shape of the array)``."""
    result: dict[str, dict[str, jax.Array]] = {}
    if not graph.passes_weights:
        return result
    pairs = zip(jax.tree.leaves(specs), jax.tree.leaves(traces), strict=True)
    by_state = {
        spec.operand: trace
        for spec, trace in pairs
        if "state" in spec.axes and spec.relation is None
    }
    every = [leaf for leaf in graph.traced.leaves if leaf.name in by_state]
    own = [leaf for leaf in every if path_name(leaf.path) == name]
    if not own:
        raise _is_unknown(name, [path_name(leaf.path) for leaf in every])
    for leaf in own:
        reached = flat.reached[leaf.name]
        ends = np.cumsum([flat.sizes[index] for index in reached])[:-1]
        parts = jnp.split(by_state[leaf.name], ends, axis=1)
        for index, part in zip(reached, parts, strict=True):
            state, axis = flat.leaves[index], flat.axes[index]
            of_sample = tuple(size for a, size in enumerate(state.shape) if a != axis)
            lead = () if axis is None else (flat.samples,)
            array = part.reshape(*lead, *of_sample, *leaf.shape)
            result.setdefault(state.name, {})[names[leaf.leaf]] = array
    return result


def _is_unknown(name: str, known: list[str]) -> OptionError:
    return OptionError(
        f"`path` is '{name}', which has no trace. Weights that reach a hidden state and have one: "
        f"{quoted(list(dict.fromkeys(known))) or 'none by this rule'}."
    )


def _operands(graph: ETraceGraph, name: str) -> list[tuple[HiddenParamOpRelation, str]]:
    """Return the relations that have a weight as an operand, with the operand's name."""
    every = [
        (path_name(path), relation, operand)
        for relation in graph.hidden_param_op_relations
        for operand, path in relation.trainable_paths.items()
    ]
    result = [(relation, operand) for own, relation, operand in every if own == name]
    if not result:
        raise _is_unknown(name, [own for own, _, _ in every])
    return result


def _arrays_of(graph: ETraceGraph, relation: HiddenParamOpRelation, operand: str) -> set[str]:
    """Return the names of the trace arrays that contain the entries of an operand.

    It is the array of the same name, or the arrays that the operation stores instead of its
    operands.
    """
    own = [spec for spec in specs_of(graph.trace_specs) if spec.relation == relation.key]
    made = {spec.operand for spec in own} & set(trace_shapes(relation))
    return {operand} & made or made - set(relation.trainable_vars)


def _leaf_names(graph: ETraceGraph, name: str) -> list[str]:
    """Return the names of the arrays in a parameter's value."""
    trees = {path_name(path): tree for path, tree in graph.traced.state_trees.items()}
    if (tree := trees.get(name)) is None:
        return []
    value = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    paths = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_quantity)
    return [path_name(tuple(getattr(key, "key", key) for key in path)) for path, _ in paths]


def _with_zeros(
    graph: ETraceGraph, specs: TraceSpecs, spec: TraceSpec, trace: jax.Array
) -> jax.Array:
    """Return a trace with zeros for the outputs that it does not store."""
    if spec.full_shape in (None, spec.shape):
        return trace
    stored = {s.state for s in specs_of(specs) if s.relation == spec.relation}
    site, states = next(
        (site, [state.name for state in site.group.states])
        for site in trace_sites(graph)
        if site.relation.key == spec.relation
        and any(state.name == spec.state for state in site.group.states)
    )
    own = [a for a, state in enumerate(states) if state in stored]
    outputs = active_outputs_of(site.relation, site.influence, own)
    full = jax.ShapeDtypeStruct(spec.full_shape, trace.dtype)
    found: jax.Array = jax.linear_transpose(outputs.pick, full)(trace)[0]
    return found


def _added(name: str, first: jax.Array | None, second: jax.Array) -> jax.Array:
    if first is None:
        return second
    if first.shape != second.shape:
        raise ShapeError(
            f"'{name}' is used by operations whose traces have shapes {first.shape} and "
            f"{second.shape}, which cannot be added. Read each of them from `traces.value`."
        )
    return jnp.add(first, second)

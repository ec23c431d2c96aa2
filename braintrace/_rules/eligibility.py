"""Eligibility: the trace of one weight, for every state that it reaches."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import is_quantity, path_name, quoted
from .._core.active_outputs import active_outputs_of, trace_shapes
from .._core.sites import trace_sites
from .._errors import OptionError, ShapeError
from .._graph.graph import ETraceGraph, TraceSpec, TraceSpecs, specs_of
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.method import Traces
from .._typing import Path

Pairs: TypeAlias = list[tuple[TraceSpec, jax.Array]]
"""Every trace with its specification."""

Found: TypeAlias = Iterator[tuple[str, int, jax.Array]]
"""Name of a state, index of the parameter's array, and the derivative."""


def eligibility_of(
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
        If no such weight exists, or no trace array of its form.
    ShapeError
        If it is used by operations whose traces have different forms.
    """
    name = path if isinstance(path, str) else path_name(tuple(path))
    pairs = list(zip(jax.tree.leaves(specs), jax.tree.leaves(traces), strict=True))
    find = _of_operations if graph.flat_state is None else _of_flat_state
    result: dict[str, dict[str, jax.Array]] = {}
    names = _leaf_names(graph, name)
    for state, leaf, trace in find(graph, pairs, name):
        own = result.setdefault(state, {})
        known = own.get(names[leaf], jnp.zeros_like(trace))
        if known.shape != trace.shape:
            raise ShapeError(
                f"'{name}' is used by operations whose traces have shapes {known.shape} and "
                f"{trace.shape}, which cannot be added. Read each of them from `traces.value`."
            )
        own[names[leaf]] = known + trace
    if not result:
        raise OptionError(
            f"This algorithm has no trace with the shape of '{name}'. D_RTRL, SnAp(n=1) and RTRL "
            "have one for every weight; other rules store filters of inputs and outputs, or "
            "entries of a sparsity pattern. Read these from `traces.value`."
        )
    return result if len(names) > 1 else {state: own[names[0]] for state, own in result.items()}


def _leaf_names(graph: ETraceGraph, name: str) -> list[str]:
    """Return the names of the arrays in a parameter's value."""
    trees = {path_name(path): tree for path, tree in graph.traced.state_trees.items()}
    if (tree := trees.get(name)) is None:
        return []
    value = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    paths = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_quantity)
    return [path_name(tuple(getattr(key, "key", key) for key in path)) for path, _ in paths]


def _check_known(name: str, known: list[str]) -> None:
    if name not in known:
        raise OptionError(
            f"`path` is '{name}', which has no trace. Weights that reach a hidden state and have "
            f"one: {quoted(list(dict.fromkeys(known))) or 'none by this rule'}."
        )


# --- traces of operations


def _of_operations(graph: ETraceGraph, pairs: Pairs, name: str) -> Found:
    every = [
        (path_name(path), relation, operand)
        for relation in graph.hidden_param_op_relations
        for operand, path in relation.trainable_paths.items()
    ]
    _check_known(name, [own for own, _, _ in every])
    leaf_of: dict[tuple[str | None, str], int] = {
        (relation.key, array): relation.trainable_leaves[operand]
        for own, relation, operand in every
        if own == name
        for array in _arrays_of(graph, relation, operand)
    }
    for spec, trace in pairs:
        leaf = leaf_of.get((spec.relation, spec.operand))
        if spec.state is not None and leaf is not None:
            yield spec.state, leaf, _with_zeros(graph, pairs, spec, trace)


def _arrays_of(graph: ETraceGraph, relation: HiddenParamOpRelation, operand: str) -> set[str]:
    """Return the names of the trace arrays that contain the entries of an operand.

    It is the array of the same name, or the arrays that the operation stores instead of its
    operands.
    """
    own = [spec for spec in specs_of(graph.trace_specs) if spec.relation == relation.key]
    made = {spec.operand for spec in own} & set(trace_shapes(relation))
    return {operand} & made or made - set(relation.trainable_vars)


def _with_zeros(graph: ETraceGraph, pairs: Pairs, spec: TraceSpec, trace: jax.Array) -> jax.Array:
    """Return a trace with zeros for the outputs that it does not store."""
    if spec.full_shape in (None, spec.shape):
        return trace
    stored = {other.state for other, _ in pairs if other.relation == spec.relation}
    site, names = next(
        (site, names)
        for site in trace_sites(graph)
        if site.relation.key == spec.relation and spec.state in (names := site.group.names)
    )
    own = [a for a, state in enumerate(names) if state in stored]
    outputs = active_outputs_of(site.relation, site.influence, own)
    full = jax.ShapeDtypeStruct(spec.full_shape, trace.dtype)
    return jax.linear_transpose(outputs.pick, full)(trace)[0]


# --- traces of the flattened state


def _of_flat_state(graph: ETraceGraph, pairs: Pairs, name: str) -> Found:
    """Yield the derivative of every state, ``(samples, *its shape, *shape of the array)``."""
    flat = graph.flat_state
    if flat is None or not graph.passes_weights:
        return
    by_name = {
        spec.operand: trace
        for spec, trace in pairs
        if "state" in spec.axes and spec.relation is None
    }
    leaves = {leaf: path_name(leaf.path) for leaf in graph.traced.leaves if leaf.name in by_name}
    _check_known(name, list(leaves.values()))
    for leaf in (leaf for leaf, own in leaves.items() if own == name):
        reached = flat.reached[leaf.name]
        ends = np.cumsum([flat.sizes[index] for index in reached])[:-1]
        parts = jnp.split(by_name[leaf.name], ends, axis=1)
        for index, part in zip(reached, parts, strict=True):
            state, axis = flat.leaves[index], flat.axes[index]
            of_sample = tuple(size for a, size in enumerate(state.shape) if a != axis)
            lead = () if axis is None else (flat.samples,)
            yield state.name, leaf.leaf, part.reshape(*lead, *of_sample, *leaf.shape)

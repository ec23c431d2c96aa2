"""Conversion of traces between split and fused gates.

A model whose units are sharded over a mesh has split gates (`braintrace._compiler.readouts.gates`),
with a separate trace for each gate. Saved and reported traces have fused gates: they are
the same on every mesh.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from .._graph import ETraceGraph, Traces, TraceSpec, TraceSpecs
from .products.active_outputs import stored_outputs

_Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CarriedSpecs:
    """A compiled model, and the specifications of its stored traces."""

    graph: ETraceGraph
    specs: TraceSpecs


def is_like(traces: Traces, specs: TraceSpecs) -> bool:
    """Test whether traces have the keys and shapes of specifications."""
    leaves = {keys: getattr(leaf, "shape", None) for keys, leaf in _leaves(traces)}
    return leaves == {keys: spec.shape for keys, spec in _leaves(specs)}


def fused_gates(split: CarriedSpecs, fused: CarriedSpecs, traces: Traces) -> Traces:
    """Return traces of split gates as traces of fused gates."""
    leaves, arrays = dict(_leaves(traces)), {}
    for keys, gates, own in _gates(split, fused):
        like = leaves[next(iter(own.values()))]
        parts = [leaves[own[g]] if g in own else jnp.zeros_like(like) for g in gates]
        arrays[keys] = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    joined: Traces = _like(fused.specs, arrays)
    return joined


def split_gates(split: CarriedSpecs, fused: CarriedSpecs, traces: Traces) -> Traces:
    """Return traces of fused gates as traces of split gates."""
    leaves, arrays = dict(_leaves(traces)), {}
    for keys, gates, own in _gates(split, fused):
        parts = [leaves[keys]] if len(gates) == 1 else jnp.split(leaves[keys], len(gates), axis=-1)
        arrays.update({own[g]: part for g, part in zip(gates, parts, strict=True) if g in own})
    carried: Traces = _like(split.specs, arrays)
    return carried


def _gates(
    split: CarriedSpecs, fused: CarriedSpecs
) -> Iterator[tuple[_Keys, list[int], dict[int, _Keys]]]:
    """Yield the keys of an array, its stored gates, and the keys of the arrays of single gates."""
    sizes = {keys: spec.shape[-1:] for keys, spec in _leaves(split.specs)}
    gates_of = _gates_of(split)
    for keys, spec in _leaves(fused.specs):
        own = gates_of[keys]
        size = sizes[next(iter(own.values()))]
        yield (
            keys,
            sorted(own) if spec.shape[-1:] == size else _stored_gates(fused, spec, *size),
            own,
        )


def _stored_gates(fused: CarriedSpecs, spec: TraceSpec, size: int) -> list[int]:
    """Return the gates of a given size that an array of fused gates stores."""
    width = (spec.full_shape or spec.shape)[-1]
    is_part = spec.shape[-1] < width
    runs = stored_outputs(fused.graph, fused.specs, spec).runs if is_part else None
    spans = runs or ((0, width),)
    return [g for g in range(width // size) if any(a <= g * size < b for a, b in spans)]


def _gates_of(split: CarriedSpecs) -> dict[_Keys, dict[int, _Keys]]:
    """Return the keys of the traces of each gate, by the keys of the fused gates' trace."""
    gates = {r.key: r.gate for r in split.graph.hidden_param_op_relations if r.gate is not None}
    result: dict[_Keys, dict[int, _Keys]] = {}
    for keys, _ in _leaves(split.specs):
        index, named = 0, keys
        for key, (name, gate, _) in gates.items():  # keys end in a bracket: none is a prefix
            if any(key in own for own in keys):
                index, named = gate, tuple(own.replace(key, name) for own in keys)
        result.setdefault(named, {})[index] = keys
    return result


def _leaves(tree: Any, keys: _Keys = ()) -> Iterator[tuple[_Keys, Any]]:
    if isinstance(tree, dict):
        for key, inner in tree.items():
            yield from _leaves(inner, (*keys, key))
    else:
        yield keys, tree


def _like(specs: Any, found: dict[_Keys, Any], keys: _Keys = ()) -> Any:
    """Return found arrays in the structure of specifications."""
    if not isinstance(specs, dict):
        return found[keys]
    return {key: _like(inner, found, (*keys, key)) for key, inner in specs.items()}

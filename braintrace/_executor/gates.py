"""Traces of operations that compute one gate each, and those of the operations that compute all.

A model whose units a mesh divides has its gates apart (`braintrace._compiler.readouts.gates`), and
so are their traces. Saved and reported traces are the same on every mesh: the gates are
concatenated.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from .._graph import ETraceGraph, Traces, TraceSpec, TraceSpecs, specs_of
from .active_outputs import active_outputs_of
from .layout import trace_sites

_Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CarriedSpecs:
    """A compiled model, and what is known of its traces as they are kept."""

    graph: ETraceGraph
    specs: TraceSpecs


def is_like(traces: Traces, specs: TraceSpecs) -> bool:
    """Tell whether there are traces of these keys and shapes."""
    given = {keys: getattr(leaf, "shape", None) for keys, leaf in _leaves(traces)}
    return given == {keys: spec.shape for keys, spec in _leaves(specs)}


def side_by_side(apart: CarriedSpecs, whole: CarriedSpecs, traces: Traces) -> Traces:
    """Return traces of gates as those of the operations that compute all of them."""
    given, found = dict(_leaves(traces)), {}
    for keys, gates, own in _gates(apart, whole):
        like = given[next(iter(own.values()))]
        parts = [given[own[g]] if g in own else jnp.zeros_like(like) for g in gates]
        found[keys] = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    joined: Traces = _like(whole.specs, found)
    return joined


def one_by_one(apart: CarriedSpecs, whole: CarriedSpecs, traces: Traces) -> Traces:
    """Return traces of operations as those of their gates."""
    given, found = dict(_leaves(traces)), {}
    for keys, gates, own in _gates(apart, whole):
        parts = [given[keys]] if len(gates) == 1 else jnp.split(given[keys], len(gates), axis=-1)
        found.update({own[g]: part for g, part in zip(gates, parts, strict=True) if g in own})
    carried: Traces = _like(apart.specs, found)
    return carried


def _gates(
    apart: CarriedSpecs, whole: CarriedSpecs
) -> Iterator[tuple[_Keys, list[int], dict[int, _Keys]]]:
    """Yield where an array is, which gates it is kept for, and where those of single gates are."""
    sizes = {keys: spec.shape[-1:] for keys, spec in _leaves(apart.specs)}
    gates_of = _gates_of(apart)
    for keys, spec in _leaves(whole.specs):
        own = gates_of[keys]
        size = sizes[next(iter(own.values()))]
        yield keys, sorted(own) if spec.shape[-1:] == size else _kept(whole, spec, *size), own


def _kept(whole: CarriedSpecs, spec: TraceSpec, size: int) -> list[int]:
    """Return the gates, each of some size, that an array of a whole operation is kept for."""
    width = (spec.full_shape or spec.shape)[-1]
    runs: tuple[tuple[int, int], ...] = ((0, width),)
    if spec.shape[-1] < width:
        kept = {s.state for s in specs_of(whole.specs) if s.relation == spec.relation}
        for site in trace_sites(whole.graph):
            states = [a for a, state in enumerate(site.group.states) if state.name in kept]
            if site.relation.key == spec.relation and states:
                runs = active_outputs_of(site.relation, site.influence, states).runs or runs
    return [g for g in range(width // size) if any(a <= g * size < b for a, b in runs)]


def _gates_of(apart: CarriedSpecs) -> dict[_Keys, dict[int, _Keys]]:
    """Return where the traces of each gate are, by the keys of those of the whole operation."""
    gates = {r.key: r.gate for r in apart.graph.hidden_param_op_relations if r.gate is not None}
    found: dict[_Keys, dict[int, _Keys]] = {}
    for keys, _ in _leaves(apart.specs):
        index, named = 0, keys
        for key, (name, gate, _) in gates.items():  # a key ends in a bracket: none begins another
            if any(key in own for own in keys):
                index, named = gate, tuple(own.replace(key, name) for own in keys)
        found.setdefault(named, {})[index] = keys
    return found


def _leaves(tree: Any, keys: _Keys = ()) -> Iterator[tuple[_Keys, Any]]:
    if isinstance(tree, dict):
        for key, inner in tree.items():
            yield from _leaves(inner, (*keys, key))
    else:
        yield keys, tree


def _like(specs: Any, found: dict[_Keys, Any], keys: _Keys = ()) -> Any:
    """Return what has been found in the structure of specifications."""
    if not isinstance(specs, dict):
        return found[keys]
    return {key: _like(inner, found, (*keys, key)) for key, inner in specs.items()}

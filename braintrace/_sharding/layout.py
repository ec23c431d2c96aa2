"""Layout: the sharded axes of States and traces, derived from the roles of their axes.

Samples are sharded over ``data``: the batch axis of every State that is reset with a sequence, and
the axis ``'batch'`` of a trace. Outputs are sharded over ``model``. This depends on the hidden
group: it is sharded along an axis of its elements that the outputs of all its operations run over.
All other arrays are sharded along the axis that places each array element on the device of its
group element (see `parts`). Trace updates then need no communication.

Entries of a sparse matrix are sharded if equal parts of them, in their order, belong to equal parts
of the outputs.

A group without such an axis, or with an axis whose size is not a multiple of the number of parts,
is replicated. So are all arrays that reach it, such as entries in another order. Sharding them
would need communication at every step. Concatenated gates are not affected: the compiler has split
them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .._core.layout import TraceSite, trace_sites
from .._core.products.active_outputs import active_outputs_of
from .._etrace_op import get_primitive_spec
from .._graph import ETraceGraph, HiddenGroup, StateLeaf, TraceSpec, TraceSpecs
from .._jax import Var
from .._typing import Path
from .division import Division, Names
from .parts import Parts, axes_before, is_sharded_along, parts_along, parts_of, sharded_axis

Leaf = tuple[Path, int]
"""Path of a State, and the index of a leaf of its value."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sharded axes of the arrays of a compiled model.

    Attributes
    ----------
    leaves
        Mesh axes of the leaves of States; missing leaves are replicated.
    traces
        Mesh axes of the traces, in their structure.
    samples
        Batch size; ``None``: no batch axis.
    batched
        Keys of the operations whose input has a leading batch axis.
    replicated
        Names of hidden states, and of parameters of ETP operations that reach them, that are
        replicated although outputs are sharded.
    """

    leaves: Mapping[Leaf, Names]
    traces: Mapping[str, Any]
    samples: int | None
    batched: frozenset[str]
    replicated: tuple[str, ...]


def layout_of(graph: ETraceGraph, specs: TraceSpecs, division: Division) -> Layout:
    """Return the layout of a compiled model on a mesh.

    Parameters
    ----------
    graph, specs
        The compiled model, and the specifications of its stored traces.
    division
        The mesh.
    """
    return _Finder(graph, division).layout(specs)


_Sites = Mapping[tuple[str | None, str | None], TraceSite]
"""Sites by the key of a relation and the name of a state."""


class _Finder:
    def __init__(self, graph: ETraceGraph, division: Division) -> None:
        self._graph, self._samples = graph, graph.batch.samples
        self._data, self._model = division.data, division.model
        self._count, self._data_count = division.model_parts, division.data_parts
        self._units = {group.index: self._units_of(group) for group in graph.hidden_groups}

    def layout(self, specs: TraceSpecs) -> Layout:
        leaves = {**dict(self._of_states()), **dict(self._of_parameters())}
        sites: _Sites = {
            (site.relation.key, site.group.states[a].name): site
            for site in trace_sites(self._graph)
            for a in site.influence.reached
        }
        traces = _mapped(lambda spec: self._of_trace(spec, sites, specs), specs)
        batched = [
            relation.key
            for relation in self._graph.hidden_param_op_relations
            if get_primitive_spec(relation.primitive).batched
        ]
        replicated = tuple(self._replicated(leaves))
        return Layout(leaves, traces, self._samples, frozenset(batched), replicated)

    def _units_of(self, group: HiddenGroup) -> Parts | None:
        """Return the parts of a group's elements; ``None`` for a replicated group."""
        if self._count == 1:
            return None
        sites = [site for site in trace_sites(self._graph, group) if _has_outputs(site)]
        if len(sites) < len(trace_sites(self._graph, group)):
            return None
        batch = self._graph.batch_axis(group)
        for axis in (axis for axis in range(len(group.shape)) if axis != batch):
            if sites and group.shape[axis] and group.shape[axis] % self._count == 0:
                parts = parts_along(group.shape, axis, self._count)
                if all(self._fits(site, parts) for site in sites):
                    return parts
        return None

    def _fits(self, site: TraceSite, parts: Parts) -> bool:
        """Test whether the outputs of an operation are on the same devices as their elements."""
        own = parts_of(site.influence.positions, parts)
        is_sharded = own.ndim > 1 and is_sharded_along(own.ndim - 1, own, self._count)
        return is_sharded and not _has_entries(site)

    def _of_states(self) -> Iterator[tuple[Leaf, Names]]:
        for leaf in self._graph.traced.leaves:
            if leaf.kind in ("hidden", "other") and leaf.shape:
                names: list[str | None] = [None] * len(leaf.shape)
                batch = self._graph.batch.axis(leaf)
                if batch is not None:
                    names[batch] = self._data
                axis = self._axis_of_state(leaf)
                if axis is not None and names[axis] is None:
                    names[axis] = self._model
                yield (leaf.path, leaf.leaf), tuple(names)

    def _axis_of_state(self, leaf: StateLeaf) -> int | None:
        for group in self._graph.hidden_groups:
            units = self._units[group.index]
            for state, layout in zip(group.states, group.old_layouts, strict=True):
                if state.in_var is leaf.in_var and units is not None:
                    size = int(np.prod(leaf.shape))
                    ids = np.arange(size) if layout is None else layout
                    return sharded_axis(parts_of(ids.reshape(leaf.shape), units), self._count)
        return None

    def _of_parameters(self) -> Iterator[tuple[Leaf, Names]]:
        """Yield the parameters that all their operations shard along the same axis."""
        traced = self._graph.traced
        own = {leaf.in_var: leaf for leaf in traced.parameters}
        axes: dict[Var, set[int | None]] = {}
        for site in trace_sites(self._graph):
            for name, operand in site.relation.trainable_vars.items():
                parts = self._parts_of_operand(site, name)
                for var, axis in axes_before(traced.program, own, operand, parts, self._count):
                    axes.setdefault(var, set()).add(axis)
        for var, choices in axes.items():
            axis = choices.pop() if len(choices) == 1 else None
            if axis is not None:
                leaf = own[var]
                yield (
                    (leaf.path, leaf.leaf),
                    tuple(self._model if i == axis else None for i in range(len(leaf.shape))),
                )

    def _parts_of_operand(self, site: TraceSite, name: str) -> Parts | None:
        """Return the parts of an operand that has an axis of sharded outputs."""
        units = self._units[site.group.index]
        axis = _output_axis(site, name)
        if units is None or axis is None or not self._fits(site, units):
            return None
        return parts_along(site.relation.trainable_vars[name].aval.shape, axis, self._count)

    def _of_trace(
        self,
        spec: TraceSpec,
        sites: _Sites,
        specs: TraceSpecs,
    ) -> Names:
        site = sites.get((spec.relation, spec.state))
        names = [self._along_data(spec, axis, site) for axis in range(len(spec.shape))]
        units = None if site is None else self._units[site.group.index]
        if units is not None and spec.axes[-1:] == ("entry",):
            names[-1] = self._model
        elif site is not None and units is not None and spec.axes[-1:] == ("output",):
            own = parts_of(site.influence.positions, units)
            if own.shape[-1] != spec.shape[-1]:  # the trace contains only some outputs
                stored = [a for a in site.influence.reached if site.key(a) in specs]
                active = active_outputs_of(site.relation, site.influence, stored)
                own = np.asarray(active.pick(own))
            is_same = own.shape[-1] == spec.shape[-1]
            if is_same and is_sharded_along(own.ndim - 1, own, self._count):
                names[-1] = self._model
        return tuple(names)

    def _along_data(self, spec: TraceSpec, axis: int, site: TraceSite | None) -> str | None:
        if self._samples is None:
            return None
        if spec.axes[axis] == "batch":  # several axes before the input axis are one axis here
            return self._data if spec.shape[axis] % self._samples == 0 else None
        if spec.axes[axis] == "fan_out" and site is not None:
            batch = self._graph.batch_axis(site.group)
            if batch is not None:
                parts = parts_along(site.group.shape, batch, self._data_count)
                own = parts_of(site.influence.positions, parts)
                return self._data if is_sharded_along(0, own, self._data_count) else None
        return None

    def _replicated(self, leaves: Mapping[Leaf, Names]) -> Iterator[str]:
        if self._count == 1:
            return
        traced = {path for r in self._graph.hidden_param_op_relations for path in r.parameter_paths}
        for leaf in self._graph.traced.leaves:
            counts = leaf.kind == "hidden" or leaf.path in traced
            if counts and self._model not in leaves.get((leaf.path, leaf.leaf), ()):
                yield leaf.name


def _has_outputs(site: TraceSite) -> bool:
    """Test whether all traces of an operation end with an axis of outputs or entries."""
    axes = get_primitive_spec(site.relation.primitive).trace_axes or {}
    ends = ("output",), ("entry",)
    return bool(axes) and all(names[-1:] in ends for names in axes.values())


def _has_entries(site: TraceSite) -> bool:
    """Test whether an operand of an operation is a list of entries."""
    axes = get_primitive_spec(site.relation.primitive).trace_axes or {}
    return any(names[-1:] == ("entry",) for names in axes.values())


def _output_axis(site: TraceSite, name: str) -> int | None:
    """Return the axis of an operand that runs over the outputs or entries of its operation."""
    shape = site.relation.trainable_vars[name].aval.shape
    axes = (get_primitive_spec(site.relation.primitive).trace_axes or {}).get(name, ())
    if len(axes) == len(shape):
        along = "entry" if axes[-1:] == ("entry",) else "output"
        return axes.index(along) if along in axes else None
    outputs = site.relation.y_var.aval.shape[-1:]
    return len(shape) - 1 if shape and shape[-1:] == outputs else None


def _mapped(function: Callable[[TraceSpec], Names], specs: TraceSpecs) -> dict[str, Any]:
    return {
        key: function(entry) if isinstance(entry, TraceSpec) else _mapped(function, entry)
        for key, entry in specs.items()
    }

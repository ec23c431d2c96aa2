"""Slots: the elements of one State that belong to the same unit.

A shift register or a ring buffer has several elements of each unit. Two elements of a State belong
to one unit if one of them moves to the place of the other from step to step, or if the same value
may be written to both, at a place that data choose. They are never in one unit if they are
*rivals*: different elements of another State, or of the output of an ETP operation, reach them.
What would join rivals (``jnp.roll`` over the units of a layer) is coupling, as before.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Equation, Var
from .._jaxpr import (
    BOTTOM,
    Flow,
    Labels,
    Question,
    carries_derivative,
    flows_from,
)
from .._typing import Path
from .analysis import Analysis, through_units
from .back_through import Ids, numbered


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a State: each unit has at most one element in each of them.

    Attributes
    ----------
    slot, unit
        For every element of the State, its slot, and the number of its unit.
    """

    slot: np.ndarray
    unit: np.ndarray

    @property
    def count(self) -> int:
        """The number of slots."""
        return 1 + int(self.slot.max(initial=0))

    def shape(self, slot: int) -> tuple[int, ...]:
        """Return the shape of a slot: an index along one axis of the State, or a vector."""
        inside = self.slot == slot
        for axis, size in enumerate(inside.shape):
            along = inside.any(tuple(a for a in range(inside.ndim) if a != axis))
            if along.sum() == 1 and inside.sum() * size == inside.size:
                return (*inside.shape[:axis], *inside.shape[axis + 1 :])
        return (int(inside.sum()),)


def with_memories(traced: TracedModel, every: bool) -> TracedModel:
    """Return a model whose States that carry values of units to a later step are hidden states.

    Parameters
    ----------
    traced
        The model.
    every
        Whether any value that depends on weights counts; else an element of an ETP output, or of a
        hidden state, has to reach an element of the State.
    """
    analysis = Analysis(traced.program)
    others = [leaf for leaf in _written(traced) if leaf.kind == "other"]
    others = [leaf for leaf in others if leaf.in_var in traced.program.readers]
    if not others:
        return traced
    hidden = [leaf for leaf in _written(traced) if leaf.kind == "hidden"]
    starts = [*map(_starts_of, hidden), *({y: numbered(y)} for y in _outputs(analysis))]
    starts += [{leaf.in_var: numbered(leaf.in_var)} for leaf in traced.parameters if every]
    found: set[Path] = set()
    while starts and others:
        start = starts.pop()
        if every:
            reached = analysis.gradient_descendants(start)
            carried = [leaf for leaf in others if leaf.out_var in reached]
        else:
            flows = _flows(analysis, start)
            carried = [leaf for leaf in others if np.any(_known(flows, leaf) >= 0)]
        starts += map(_starts_of, carried)
        found.update(leaf.path for leaf in carried)
        others = [leaf for leaf in others if leaf not in carried]
    leaves = (
        dataclasses.replace(leaf, kind="hidden") if leaf.path in found else leaf
        for leaf in traced.leaves
    )
    return dataclasses.replace(traced, leaves=tuple(leaves))


def slots_of(traced: TracedModel, analysis: Analysis) -> dict[Var, Slots]:
    """Return the slots of the hidden states that have several elements of a unit, by old value."""
    hidden = [leaf for leaf in _written(traced) if leaf.kind == "hidden"]
    found = {leaf.in_var: _declared(leaf) for leaf in hidden if leaf.is_grouped}
    states = [leaf for leaf in hidden if not leaf.is_grouped]
    flows = (_flows(analysis, {leaf.in_var: numbered(leaf.in_var)}) for leaf in states)
    own = {leaf: _known(of_leaf, leaf) for leaf, of_leaf in zip(states, flows, strict=True)}
    moving = [leaf for leaf in states if _moves(own[leaf]) or _is_written_in_part(analysis, leaf)]
    if not moving:
        return found
    sources = {leaf.in_var: _flows(analysis, _starts_of(leaf)) for leaf in hidden}
    sources |= {y: _flows(analysis, {y: numbered(y)}) for y in _outputs(analysis)}
    for leaf in moving:
        others = (of_source for var, of_source in sources.items() if var is not leaf.in_var)
        labels = [_known(of_source, leaf).ravel() for of_source in others]
        slots = _slots(leaf.shape, own[leaf].ravel(), labels)
        if slots.count > 1 and any(np.any(label >= 0) for label in labels):
            found[leaf.in_var] = slots
    return found


def _declared(leaf: StateLeaf) -> Slots:
    """Return the slots of a `HiddenGroupState`: the places along its last axis."""
    *units, count = leaf.shape
    unit = np.arange(math.prod(units)).reshape(*units, 1)
    slot = np.broadcast_to(np.arange(count), leaf.shape)
    return Slots(slot, np.broadcast_to(unit, leaf.shape))


def _slots(shape: tuple[int, ...], own: Ids, labels: Sequence[Ids]) -> Slots:
    """Return the slots of a State.

    Parameters
    ----------
    shape
        Its shape.
    own
        The old element that each new element is, or a code.
    labels
        For each other source, the element of it that reaches each new element.
    """
    from scipy.sparse import coo_array  # slow to import, and few models have slots
    from scipy.sparse.csgraph import connected_components

    places = np.arange(own.size)
    pairs = [(places[own >= 0], own[own >= 0])]
    for label in labels:
        used = np.flatnonzero(label >= 0)
        _, first, alike = np.unique(label[used], return_index=True, return_inverse=True)
        pairs.append((used, used[first][alike]))
    ends = [np.concatenate(part) for part in zip(*pairs, strict=True)]
    graph = coo_array((np.ones(ends[0].size, bool), tuple(ends)), shape=(own.size, own.size))
    _, unit = connected_components(graph, directed=False)
    for label in labels:
        known = label >= 0
        low, high = np.full(own.size, np.iinfo(np.int32).max), np.full(own.size, BOTTOM)
        np.minimum.at(low, unit[known], label[known])
        np.maximum.at(high, unit[known], label[known])
        alone = ((low < high) & (high >= 0))[unit]  # rivals would be in one unit
        unit = np.unique(np.where(alone, own.size + places, unit), return_inverse=True)[1]
    order = np.argsort(unit, kind="stable")
    slot = np.empty_like(unit)
    slot[order] = places - np.searchsorted(unit[order], unit[order])
    return Slots(slot.reshape(shape), unit.reshape(shape))


def _written(traced: TracedModel) -> Iterator[StateLeaf]:
    return (
        leaf
        for leaf in traced.leaves
        if leaf.kind in ("hidden", "other")
        and leaf.out_var is not None
        and carries_derivative(leaf.out_var)
        and carries_derivative(leaf.in_var)
    )


def _outputs(analysis: Analysis) -> Iterator[Var]:
    return (v for index in analysis.opaque for v in analysis.program.equations[index].outvars)


def _starts_of(leaf: StateLeaf) -> dict[Var, Ids]:
    return {leaf.in_var: numbered(leaf.in_var), leaf.out_var: numbered(leaf.in_var)}


def _known(flows: dict[Var, Flow], leaf: StateLeaf) -> Ids:
    flow = flows.get(leaf.out_var)
    return np.full(leaf.shape, BOTTOM, np.int32) if flow is None else flow


def _moves(own: Ids) -> bool:
    return bool(np.any((own.ravel() >= 0) & (own.ravel() != np.arange(own.size))))


def _is_written_in_part(analysis: Analysis, leaf: StateLeaf) -> bool:
    """Test whether values are written at indices on the way from a State to its new value."""
    program = analysis.program
    between = program.dependents_of([leaf.in_var]) & program.depends_on([leaf.out_var])
    names = (program.equations[index].primitive.name for index in program.making(between))
    return any(name in ("dynamic_update_slice", "select_n") or "scatter" in name for name in names)


def _flows(analysis: Analysis, starts: dict[Var, Ids]) -> dict[Var, Flow]:
    """Return the element of some variables that reaches each element, without broadcasts."""
    question = Question(Labels(), derivatives=True, special=_special)
    return flows_from(question, analysis.constants, starts)


def _special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
    if equation.primitive.name == "broadcast_in_dim":
        (result,) = equation.outvars
        return [None] if result.aval.size > equation.invars[0].aval.size else None
    return through_units(equation, operands)

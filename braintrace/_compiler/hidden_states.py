"""Hidden states of a step: those that it writes, slot by slot, in units.

Any State that carries values of units to a later step is a hidden state. If it has several elements
of a unit (a register, a ring buffer, a `HiddenGroupState`), each of these slots counts as a state.
"""

import dataclasses
import functools
from typing import Any, cast

import numpy as np

from .._graph.hidden_group import Ids
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Var
from .._jaxpr.lattices import BOTTOM
from .._jaxpr.program import carries_derivative
from .analysis import Analysis
from .units import Units, moved_from


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenArray:
    """A hidden state that the step writes, or one slot of it, with the unit of each element.

    ``var`` is the variable of its new value. ``ids`` are the units of that variable's elements,
    ``old_ids`` those of the old value's elements; `BOTTOM`: in another slot. ``shape`` is that of
    its own elements, and ``has_slots`` tells whether its State has several slots.
    """

    leaf: StateLeaf
    var: Var
    ids: Ids
    old_ids: Ids
    shape: tuple[int, ...]
    has_slots: bool

    @functools.cached_property
    def old_places(self) -> np.ndarray:
        """The places of its elements in the old value, flattened."""
        return np.flatnonzero(self.old_ids.ravel() != BOTTOM)

    @property
    def units(self) -> np.ndarray:
        """The units of its elements, flattened."""
        return np.asarray(self.old_ids.ravel()[self.old_places])


def with_memories(traced: TracedModel, every: bool) -> TracedModel:
    """Return a model whose States that carry values of units to a later step are hidden states.

    Parameters
    ----------
    traced
        The model.
    every
        Whether any value that depends on weights counts; else an ETP operation, or a hidden state,
        has to reach an element of the State elementwise.
    """
    analysis = Analysis(traced.program)
    others = [leaf for leaf in written(traced, "other") if leaf.in_var in traced.program.readers]
    if not others:
        return traced
    hidden = written(traced, "hidden")
    if every:
        starts = [*(leaf.in_var for leaf in (*hidden, *traced.parameters)), *analysis.opaque]
        before: Any = {leaf.out_var: (leaf.in_var,) for leaf in others}
        reached = analysis.program.descendants(starts, before=before)
        found = {leaf.path for leaf in others if leaf.in_var in reached}
    else:
        units = Units(analysis, [*hidden, *others])
        found = {s.leaf.path for s in units.states if units.is_reached[s.numbers].any()}
    leaves = (
        dataclasses.replace(leaf, kind="hidden") if leaf.path in found else leaf
        for leaf in traced.leaves
    )
    return dataclasses.replace(traced, leaves=tuple(leaves))


def written(traced: TracedModel, kind: str) -> list[StateLeaf]:
    """Return the States of a kind that the step writes, and through which a gradient may pass."""
    leaves = (leaf for leaf in traced.leaves if leaf.kind == kind and leaf.out_var is not None)
    return [v for v in leaves if carries_derivative(v.out_var) and carries_derivative(v.in_var)]


def hidden_arrays(analysis: Analysis, units: Units) -> list[HiddenArray]:
    """Return the hidden states of a step, in the order of computation."""
    arrays: list[HiddenArray] = []
    for state in units.states:
        taken = {array.var for array in arrays}
        unit = np.asarray(units.unit[state.numbers])
        arrays += _slots_of(analysis, state.leaf, unit, taken)
    return sorted(arrays, key=lambda array: analysis.program.producer.get(array.var, -1))


def _slots_of(analysis: Analysis, leaf: StateLeaf, unit: Ids, taken: set[Var]) -> list[HiddenArray]:
    """Return an array for each slot, at a variable of its own if each of them has one."""
    order = np.argsort(unit, axis=None, kind="stable")
    in_order = unit.ravel()[order]
    slot = np.empty(unit.shape, int)
    slot.flat[order] = np.arange(unit.size) - np.searchsorted(in_order, in_order)
    inside = [slot == number for number in range(1 + int(slot.max(initial=0)))]
    has_slots, out_var = len(inside) > 1, cast(Var, leaf.out_var)
    together, apart = list[HiddenArray](), list[HiddenArray]()
    for places in inside:
        ids = np.where(places, unit, BOTTOM)
        shape = _shape_of(places) if has_slots else leaf.shape
        together.append(HiddenArray(leaf, out_var, ids, ids, shape, has_slots))
        used = taken.union(array.var for array in apart)
        free = [pair for pair in moved_from(analysis, out_var, ids) if pair[0] not in used]
        var, own = free[-1] if free else (out_var, ids)
        if not has_slots or (free and var.aval.shape == shape):
            apart.append(HiddenArray(leaf, var, own, ids, shape, has_slots))
    return apart if len(apart) == len(inside) else together


def _shape_of(inside: np.ndarray) -> tuple[int, ...]:
    """Return the shape of a slot: an index along one axis of the State, or a vector."""
    for axis, size in enumerate(inside.shape):
        along = inside.any(tuple(a for a in range(inside.ndim) if a != axis))
        if along.sum() == 1 and inside.sum() * size == inside.size:
            return (*inside.shape[:axis], *inside.shape[axis + 1 :])
    return (int(inside.sum()),)

"""Hidden groups: the hidden states that have units in common, with their paths within a step.

Any State that carries values of units to a later step is a hidden state. If it has several elements
of a unit (a register, a ring buffer, a `HiddenGroupState`), each of these slots counts as a state.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .._graph.hidden_group import Cut, HiddenGroup, HiddenParamOpRelation, Ids
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var, is_var
from .._jaxpr.dataflow import BOTTOM
from .._jaxpr.program import carries_derivative, components
from .analysis import Analysis
from .units import Units, moved_from
from .walk import Walk


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
        starts = [leaf.in_var for leaf in (*hidden, *traced.parameters)]
        starts += analysis.opaque_outputs
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


def _hidden_arrays(analysis: Analysis, units: Units) -> list[HiddenArray]:
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


# --- groups


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedStep:
    """A step, its hidden groups, and the facts that later passes need.

    Attributes
    ----------
    traced, analysis
        The step, and the analysis of its program.
    before
        The old values of the States with each new value, as the model itself reads it.
    operations
        Its ETP operations.
    groups, walks
        Hidden groups, in the order in which their first state is computed within the step, and for
        each of them the walk back from every state.
    """

    traced: TracedModel
    analysis: Analysis
    before: Mapping[Atom, Collection[Var]]
    operations: list[HiddenParamOpRelation]
    groups: list[HiddenGroup]
    walks: list[list[Walk]]

    @property
    def new_states(self) -> Iterator[tuple[StateLeaf, Var]]:
        """The grouped states, with the variables of their new values."""
        return (pair for group in self.groups for pair in new_states(group))

    def descendants_over_time(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return what depends on some variables by gradient, in this step or in a later one."""
        return self.analysis.program.descendants(starts, ends, self.before)

    def is_remembered(self, group: HiddenGroup) -> bool:
        """Test whether a later step reads the states of a group."""
        return any(state.in_var in self.analysis.program.readers for state in group.states)


def new_states(group: HiddenGroup) -> Iterator[tuple[StateLeaf, Var]]:
    """Yield the states of a group with the variables of their new values."""
    yield from dict.fromkeys(zip(group.states, group.new_vars, strict=True))


def seen_by_losses(traced: TracedModel) -> list[Atom]:
    """Return the values that a loss can read: outputs, readouts, and other States written."""
    seen = (s.out_var for s in traced.leaves if s.kind == "other" or s in traced.filtered)
    return [*traced.output_atoms, *(atom for atom in seen if atom is not None)]


def grouped(
    traced: TracedModel,
    analysis: Analysis,
    operations: list[HiddenParamOpRelation],
    every_state: bool,
) -> GroupedStep:
    """Group the hidden states of a step.

    With ``every_state``, all states have traces, including those that no later step reads.
    """
    # A readout is an output, whose derivative goes through filters.
    leaves = [leaf for leaf in written(traced, "hidden") if leaf not in traced.filtered]
    units = Units(analysis, leaves)
    states = _hidden_arrays(analysis, units)
    before = _before(traced, states)
    late_inputs = [*_late_inputs(analysis, states, before)]
    every_new = frozenset(state.var for state in states)
    targets = seen_by_losses(traced)
    loss_reads = analysis.program.ancestors(targets, every_new).union(*late_inputs)
    lines = set() if every_state else _delay_lines(analysis, states, {*targets, *loss_reads})
    groups: list[HiddenGroup] = []
    walks: list[list[Walk]] = []
    for members in _with_common_units(states, lines):
        aligned = _Aligned(analysis, units, [states[a] for a in members], every_new)
        own, is_read = aligned.states, [states[a].leaf.in_var in loss_reads for a in members]
        downstream = () if every_state or len(own) == 1 else aligned.downstream(is_read)
        group = HiddenGroup(
            index=len(groups),
            states=tuple(state.leaf for state in own),
            new_vars=tuple(state.var for state in own),
            layouts=tuple(aligned.layout(state.ids) for state in own),
            old_layouts=tuple(aligned.layout(state.old_ids) for state in own),
            shape=aligned.shape,
            transition=tuple((a, c) for a in range(len(own)) for c in aligned.reads_of(a)),
            cuts=tuple(map(aligned.cuts_of, own)),
            read_late=tuple(a for a, is_seen in enumerate(is_read) if is_seen),
            late_inputs=tuple(late_inputs[a] for a in members),
            downstream=downstream,
            read_by_operations_only=own[0].leaf in lines,
        )
        groups.append(group)
        walks.append(aligned.walks)
    return GroupedStep(traced, analysis, before, operations, groups, walks)


def _before(traced: TracedModel, states: Sequence[HiddenArray]) -> Mapping[Atom, set[Var]]:
    """Return the old values of the States with each new value."""
    pairs: list[tuple[Var, Atom | None]] = [(state.leaf.in_var, state.var) for state in states]
    known = {old for old, _ in pairs}
    pairs += [(leaf.in_var, leaf.out_var) for leaf in traced.leaves if leaf.in_var not in known]
    before: dict[Atom, set[Var]] = {}
    for old, new in pairs:
        if is_var(new):
            before.setdefault(new, set()).add(old)
    return before


def _late_inputs(
    analysis: Analysis, states: Sequence[HiddenArray], before: Mapping[Atom, set[Var]]
) -> Iterator[frozenset[Var]]:
    """Yield the old values that each state reads of States that it does not act upon."""
    old, every_new = {s.leaf.in_var for s in states}, frozenset(s.var for s in states)
    for var in (state.var for state in states):
        read = analysis.program.ancestors([var], every_new - {var})
        yield frozenset(read & old) - analysis.program.descendants([var], before=before)


def _delay_lines(
    analysis: Analysis, states: Sequence[HiddenArray], loss_reads: Collection[Atom]
) -> set[StateLeaf]:
    """Return the States that only ETP operations of later steps, and their own next value, read.

    No gradient that a trace carries returns to their contents: D-RTRL leaves out the gradient
    through those operations anyway.
    """
    lines, program = {state.leaf for state in states}, analysis.program
    for state in states:
        others = {other.var for other in states if other.leaf is not state.leaf}
        later = program.descendants([state.leaf.in_var], analysis.opaque_outputs)
        if not (later | program.descendants([state.var])).isdisjoint([*others, *loss_reads]):
            lines.discard(state.leaf)
    return lines


def _with_common_units(
    states: Sequence[HiddenArray], apart: set[StateLeaf]
) -> list[tuple[int, ...]]:
    """Return the sets of states with units in common, as indices, by the first of each.

    All slots of a State are together. The States in ``apart`` are in groups of their own.
    """
    leaves = [*dict.fromkeys(state.leaf for state in states)]
    last = max((int(state.units.max(initial=0)) for state in states), default=0)
    has_unit = np.zeros((len(leaves), last + 1), bool)
    for state in (state for state in states if state.leaf not in apart):
        has_unit[leaves.index(state.leaf), state.units] = True
    every = range(len(leaves))
    coupled = [[a for a in every if (has_unit[a] & has_unit[c]).any()] for c in every]
    sets = [{leaves[a] for a in members} for members in components(coupled)]
    return sorted(tuple(a for a, s in enumerate(states) if s.leaf in members) for members in sets)


class _Aligned:
    """The states of a group, with their units in numbers of the group, and the walks back.

    Parameters
    ----------
    analysis, units
        The step, and its units.
    states
        The states, with ids that are numbers of `Units`.
    every_new
        The new values of the states of all groups.
    """

    def __init__(
        self,
        analysis: Analysis,
        units: Units,
        states: Sequence[HiddenArray],
        every_new: frozenset[Var],
    ) -> None:
        self._analysis, self._labels, self._every_new = analysis, units.labels, every_new
        every = np.flatnonzero(np.bincount(np.concatenate([state.units for state in states])))
        wholes = [state for state in states if state.units.size == every.size]
        whole = min(wholes, key=lambda state: state.has_slots, default=None)
        self.shape = (every.size,) if whole is None else whole.shape
        # The last place is for `BOTTOM`.
        self._place = np.full(units.unit.size + 1, BOTTOM, np.int32)
        self._place[every if whole is None else whole.units] = np.arange(every.size)
        self.states = [
            dataclasses.replace(state, ids=self._own(state.ids), old_ids=self._own(state.old_ids))
            for state in states
        ]
        self._own_new = {state.var for state in states}
        self.walks = [self._walk(state, every_new - self._own_new) for state in self.states]

    def _own(self, ids: Ids) -> Ids:
        return np.asarray(self._place[ids])

    def _walk(self, state: HiddenArray, stops: frozenset[Var]) -> Walk:
        start = {state.var: state.ids}
        return Walk(self._analysis, start, self._labels, self._place, stops)

    def layout(self, ids: Ids) -> Ids | None:
        """Return the units of elements; ``None``: all are in order."""
        is_in_order = np.array_equal(ids.ravel(), np.arange(int(np.prod(self.shape))))
        return None if is_in_order else ids

    def reads_of(self, state: int) -> list[int]:
        """Return the states whose old value a walk has reached."""
        ids = [self.walks[state].ids.get(old.leaf.in_var) for old in self.states]
        pairs = zip(ids, self.states, strict=True)
        return [
            a
            for a, (own, old) in enumerate(pairs)
            if own is not None and np.any(own.ravel()[old.old_places] >= 0)
        ]

    def cuts_of(self, state: HiddenArray) -> tuple[Cut, ...]:
        """Return the cuts of all slots of a State: its new value is computed once."""
        pairs = zip(self.states, self.walks, strict=True)
        own = (walk for other, walk in pairs if other.leaf is state.leaf)
        return tuple(sorted({cut for walk in own for cut in walk.cuts}))

    def downstream(self, is_read: Sequence[bool]) -> tuple[int, ...]:
        """Return the states computed from new values only, which no later step reads.

        Their walks end at the new values of the others. If another state of the step reads such a
        state, the derivatives of that other state pass through it to its inputs. States are
        considered from the last to the first: a state may depend on other downstream states, but
        not on them alone.
        """
        analysis, every = self._analysis, self._every_new
        program, opaque = analysis.program, analysis.opaque_outputs
        old = {state.leaf.in_var for state in self.states}
        carried = {a for new in range(len(self.states)) for a in self.reads_of(new)}
        upstream, downstream = {*range(len(self.states))}, list[int]()
        for a, state in reversed([*enumerate(self.states)]):
            stops = every - {state.var}
            others = {self.states[c].var for c in upstream - {a}} - {state.var}
            is_carried = is_read[a] or a in carried
            if is_carried or program.ancestors([state.var], stops | opaque) & old:
                continue
            if program.ancestors([state.var], stops) & others:
                downstream.append(a)
                upstream.remove(a)
        for a in downstream:
            self.walks[a] = self._walk(self.states[a], every - {self.states[a].var})
        return tuple(reversed(downstream))

"""Hidden groups: the hidden states that have units in common, with their paths within a step."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from .._graph.hidden_group import Cut, HiddenGroup, HiddenParamOpRelation
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var
from .._jaxpr.lattices import BOTTOM
from .._jaxpr.program import components
from .analysis import Analysis
from .back_through import Ids
from .hidden_states import HiddenArray, delay_lines
from .step_graph import StepGraph
from .units import Units
from .walk import Origin, Walk, walk_back


def find_hidden_groups(
    traced: TracedModel,
    analysis: Analysis,
    units: Units,
    states: Sequence[HiddenArray],
    graph: StepGraph,
    outputs: Sequence[StateLeaf],
    every_state: bool,
) -> tuple[list[HiddenGroup], list[list[Walk]]]:
    """Group the hidden states of a step.

    Parameters
    ----------
    traced, analysis
        The step.
    units, states, graph
        Its units, its hidden states, and the paths between them.
    outputs
        States that count as outputs of the step; they are in no group.
    every_state
        Whether all states have traces, including those that no later step reads.

    Returns
    -------
    groups
        In the order in which their first state is computed within the step.
    walks
        For every group, the walk back from each of its states.
    """
    new_vars = Counter(state.var for state in states)
    seen = seen_by_losses(traced, outputs)
    late_inputs = list(_late_inputs(graph, states, frozenset(new_vars)))
    loss_reads = graph.values.ancestors(seen, new_vars).union(*late_inputs)
    lines = set() if every_state else delay_lines(analysis, graph, states, loss_reads)
    groups: list[HiddenGroup] = []
    walks: list[list[Walk]] = []
    for members in _connected(states, lines):
        aligned = _Aligned(analysis, units, [states[a] for a in members])
        is_read = [state.leaf.in_var in loss_reads for state in aligned.states]
        own, downstream = _walks(aligned, graph, new_vars, is_read, every_state)
        own_late = tuple(late_inputs[a] for a in members)
        is_line = aligned.states[0].leaf in lines
        groups.append(_group(len(groups), aligned, own, downstream, is_read, own_late, is_line))
        walks.append(own)
    return groups, walks


def _late_inputs(
    graph: StepGraph, states: Sequence[HiddenArray], every_new: frozenset[Var]
) -> Iterator[frozenset[Var]]:
    """Yield the old values that each state reads of States that it does not act upon."""
    old = {state.leaf.in_var for state in states}
    for state in states:
        read = graph.gradients.ancestors([state.var], every_new - {state.var})
        yield frozenset(read & old) - graph.gradients.descendants_over_time([state.var])


def _connected(states: Sequence[HiddenArray], apart: set[StateLeaf]) -> list[tuple[int, ...]]:
    """Return the sets of states with units in common, as indices, by the first of each.

    The States in ``apart`` are in groups of their own.
    """
    leaves = [state.leaf for state in states]
    coupled = [{leaves.index(leaf)} for leaf in leaves]  # all slots of a State
    together = [a for a, leaf in enumerate(leaves) if leaf not in apart]
    owner = np.full(1 + max((int(s.old_ids.max(initial=0)) for s in states), default=0), -1)
    for a in together:
        units = states[a].old_ids.ravel()[states[a].old_places]
        before = owner[units][owner[units] >= 0]
        coupled[a].update(np.flatnonzero(np.bincount(before)).tolist())
        owner[units] = a
    for a, others in enumerate(coupled):
        for c in others:
            coupled[c].add(a)
    return sorted(map(tuple, components([*map(sorted, coupled)])))


class _Aligned:
    """The states of a group, with their units in numbers of the group.

    Parameters
    ----------
    analysis, units
        The step, and its units.
    states
        The states, with ids that are numbers of `Units`.
    """

    def __init__(self, analysis: Analysis, units: Units, states: Sequence[HiddenArray]) -> None:
        self.analysis = analysis
        numbers = [state.old_ids.ravel()[state.old_places] for state in states]
        every = np.flatnonzero(np.bincount(np.concatenate(numbers)))
        wholes = [a for a, own in enumerate(numbers) if own.size == every.size]
        wholes.sort(key=lambda a: states[a].has_slots)
        self.shape = states[wholes[0]].shape if wholes else (every.size,)
        order = numbers[wholes[0]] if wholes else every
        self.place = np.full(units.unit.size + 1, BOTTOM, np.int32)  # the last one is for `BOTTOM`
        self.place[order] = np.arange(order.size)
        self.origin = Origin(units.labels, self.place)
        self.states = [
            dataclasses.replace(state, ids=self._own(state.ids), old_ids=self._own(state.old_ids))
            for state in states
        ]

    def _own(self, ids: Ids) -> Ids:
        return np.asarray(self.place[ids])

    def walk(self, state: HiddenArray, stops: frozenset[Var]) -> Walk:
        """Walk back from the new value of one of the states."""
        return walk_back(self.analysis, {state.var: state.ids}, stops, self.origin)


def _walks(
    aligned: _Aligned,
    graph: StepGraph,
    new_vars: Counter[Var],
    is_read: Sequence[bool],
    every_state: bool,
) -> tuple[list[Walk], tuple[int, ...]]:
    """Return the walks back from every state of a group, and its downstream states."""
    every_new = frozenset(new_vars)
    group_vars = Counter(state.var for state in aligned.states)
    stops = every_new.difference(var for var, count in group_vars.items() if count == new_vars[var])
    walks = [aligned.walk(state, stops) for state in aligned.states]
    if len(walks) == 1 or every_state:
        return walks, ()
    downstream = _downstream(aligned.states, graph, walks, is_read, every_new)
    for a in downstream:
        ends = stops | group_vars.keys() - {aligned.states[a].var}
        walk = aligned.walk(aligned.states[a], ends)
        walks[a] = _without_held_cuts(aligned.analysis, graph, walk, ends)
    return walks, downstream


def _downstream(
    states: Sequence[HiddenArray],
    graph: StepGraph,
    walks: Sequence[Walk],
    is_read: Sequence[bool],
    every_new: frozenset[Var],
) -> tuple[int, ...]:
    """Return the states computed from new values only, which no later step reads.

    If another state of the step reads such a state, the derivatives of that other state pass
    through it to its inputs. States are considered from the last to the first: a state may depend
    on other downstream states, but not on them alone.
    """
    old = {state.leaf.in_var for state in states}
    downstream: list[int] = []
    for a, state in reversed(list(enumerate(states))):
        upstream = {other.var for c, other in enumerate(states) if c != a and c not in downstream}
        is_carried = is_read[a] or any(_reaches_old(walk, state) for walk in walks)
        stops = every_new - {state.var}
        reads_old = graph.values.ancestors([state.var], stops | graph.opaque) & old
        reads_new = graph.values.ancestors([state.var], stops) & (upstream - {state.var})
        if reads_new and not (is_carried or reads_old):
            downstream.append(a)
    return tuple(reversed(downstream))


def _without_held_cuts(
    analysis: Analysis, graph: StepGraph, walk: Walk, ends: frozenset[Var]
) -> Walk:
    """Leave out truncated paths that end at held values: they lose no gradient."""
    equations = analysis.program.equations
    sources = graph.operations.union(analysis.program.in_vars)

    def costs(cut: Cut) -> bool:
        operand = equations[cut.equation].invars[cut.operand]
        return not sources.isdisjoint(graph.values.ancestors([operand], ends) - ends)

    return dataclasses.replace(walk, cuts=set(filter(costs, walk.cuts)))


def _reaches_old(walk: Walk, state: HiddenArray) -> bool:
    """Test whether a walk has reached the old value of a state."""
    ids = walk.ids.get(state.leaf.in_var)
    return ids is not None and bool(np.any(ids.ravel()[state.old_places] >= 0))


def _group(
    index: int,
    aligned: _Aligned,
    walks: Sequence[Walk],
    downstream: tuple[int, ...],
    is_read: Sequence[bool],
    late_inputs: tuple[frozenset[Var], ...],
    delay_line: bool,
) -> HiddenGroup:
    states, in_order = aligned.states, np.arange(int(np.prod(aligned.shape)))

    def layout(ids: Ids) -> Ids | None:
        return None if np.array_equal(ids.ravel(), in_order) else ids

    return HiddenGroup(
        index=index,
        states=tuple(state.leaf for state in states),
        new_vars=tuple(state.var for state in states),
        layouts=tuple(layout(state.ids) for state in states),
        old_layouts=tuple(layout(state.old_ids) for state in states),
        shape=aligned.shape,
        transition=tuple(
            (a, c)
            for a, walk in enumerate(walks)
            for c, state in enumerate(states)
            if _reaches_old(walk, state)
        ),
        cuts=tuple(_cuts_of(states, walks, state) for state in states),
        read_late=tuple(a for a, is_seen in enumerate(is_read) if is_seen),
        late_inputs=late_inputs,
        downstream=downstream,
        delay_line=delay_line,
    )


def _cuts_of(
    states: Sequence[HiddenArray], walks: Sequence[Walk], state: HiddenArray
) -> tuple[Cut, ...]:
    """Return the cuts of all slots of a State: its new value is computed once."""
    own = (walk for other, walk in zip(states, walks, strict=True) if other.leaf is state.leaf)
    return tuple(sorted({cut for walk in own for cut in walk.cuts}))


# --- the step with its groups


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedStep:
    """A step, its hidden groups, and the facts that later passes need.

    Attributes
    ----------
    traced, analysis
        The step, and the analysis of its program.
    graph
        Paths between its States, parameters and ETP operations.
    operations
        Its ETP operations.
    outputs
        Hidden states that count as outputs.
    groups, walks
        Hidden groups, and for each of them the walk back from every state.
    """

    traced: TracedModel
    analysis: Analysis
    graph: StepGraph
    operations: list[HiddenParamOpRelation]
    outputs: tuple[StateLeaf, ...]
    groups: list[HiddenGroup]
    walks: list[list[Walk]]

    @property
    def new_states(self) -> Iterator[tuple[StateLeaf, Var]]:
        """The grouped states, with the variables of their new values."""
        return (pair for group in self.groups for pair in new_states(group))

    @property
    def remembered_states(self) -> Iterator[tuple[StateLeaf, Var]]:
        """The states of groups that a later step reads, with their new variables."""
        remembered = filter(self.is_remembered, self.groups)
        return (pair for group in remembered for pair in new_states(group))

    def is_remembered(self, group: HiddenGroup) -> bool:
        """Test whether a later step reads the states of a group."""
        return any(state.in_var in self.analysis.program.readers for state in group.states)


def new_states(group: HiddenGroup) -> Iterator[tuple[StateLeaf, Var]]:
    """Yield the states of a group with the variables of their new values."""
    yield from dict.fromkeys(zip(group.states, group.new_vars, strict=True))


def seen_by_losses(traced: TracedModel, outputs: Sequence[StateLeaf]) -> list[Atom]:
    """Return the values that a loss can read: outputs, and other States written."""
    written = [leaf.out_var for leaf in traced.leaves if leaf.kind == "other" or leaf in outputs]
    return [*traced.output_atoms, *(atom for atom in written if atom is not None)]

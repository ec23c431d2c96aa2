"""Hidden groups: connected components of hidden states with elementwise coupling."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from .._graph import Cut, HiddenGroup
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Var
from .._jaxpr import components
from .alignment import AlignedStates, Alignment
from .analysis import Analysis
from .back_through import Ids
from .candidates import Candidate
from .delay_lines import find_delay_lines
from .grouped_step import seen_by_losses
from .step_graph import StepGraph
from .walk import Walk


def find_hidden_groups(
    traced: TracedModel,
    alignment: Alignment,
    graph: StepGraph,
    outputs: Sequence[StateLeaf],
    every_state: bool,
) -> tuple[list[HiddenGroup], list[list[Walk]]]:
    """Group the hidden states of a step.

    Parameters
    ----------
    traced
        The step.
    alignment, graph
        Its hidden states, and the paths between them.
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
    analysis, candidates = alignment.analysis, alignment.candidates
    new_vars = Counter(candidate.var for candidate in candidates)
    seen = seen_by_losses(traced, outputs)
    late_inputs = list(_late_inputs(graph, candidates, frozenset(new_vars)))
    loss_reads = graph.values.ancestors(seen, new_vars).union(*late_inputs)
    lines: frozenset[int] = frozenset()
    if not every_state:
        lines = find_delay_lines(analysis, graph, candidates, loss_reads)
    groups: list[HiddenGroup] = []
    walks: list[list[Walk]] = []
    for members in _connected(alignment, lines):
        aligned = alignment.align(members)
        is_read = [state.leaf.in_var in loss_reads for state in aligned.states]
        own, downstream = _walks(aligned, graph, new_vars, is_read, every_state)
        is_line = lines.issuperset(members)
        own_late = tuple(late_inputs[c] for c in members)
        groups.append(_group(len(groups), aligned, own, downstream, is_read, own_late, is_line))
        walks.append(own)
    return groups, walks


def _late_inputs(
    graph: StepGraph, candidates: Sequence[Candidate], every_new: frozenset[Var]
) -> Iterator[frozenset[Var]]:
    """Yield the old values that each state reads of States that it does not act upon."""
    old = {candidate.leaf.in_var for candidate in candidates}
    for candidate in candidates:
        read = graph.gradients.ancestors([candidate.var], every_new - {candidate.var})
        yield frozenset(read & old) - graph.gradients.descendants_over_time([candidate.var])


def _connected(alignment: Alignment, apart: frozenset[int]) -> list[tuple[int, ...]]:
    """Return the connected components of the coupling, ordered by first member.

    A state is coupled to the states that it reads elementwise, old or new. The slots of one State
    are always coupled. A state in ``apart`` is not coupled to the states that it
    reads.
    """
    leaves = [candidate.leaf for candidate in alignment.candidates]
    names = [leaf.in_var for leaf in leaves]
    coupled = [set[int]() for _ in names]
    pairs = (pair for pair in _coupled(alignment) if pair[0] not in apart)
    for a, c in (*pairs, *((names.index(name), i) for i, name in enumerate(names))):
        coupled[a].add(c)
        coupled[c].add(a)
    return sorted(map(tuple, components([*map(sorted, coupled)])))


def _coupled(alignment: Alignment) -> Iterator[tuple[int, int]]:
    """Yield pairs ``(a, c)``: state ``a`` reads state ``c`` in the same unit."""
    for members in alignment.sets():
        if len(members) == 1:
            continue
        aligned = alignment.align(members)
        for a, state in zip(members, aligned.states, strict=True):
            walk, others = aligned.walk(state), zip(members, aligned.states, strict=True)
            yield from ((a, c) for c, o in others if o.leaf is not state.leaf and _reaches(walk, o))


def _walks(
    aligned: AlignedStates,
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
    downstream = _downstream(aligned, graph, walks, is_read, every_new)
    for a in downstream:
        ends = stops | group_vars.keys() - {aligned.states[a].var}
        walk = aligned.walk(aligned.states[a], ends)
        walks[a] = _without_held_cuts(aligned.analysis, graph, walk, ends)
    return walks, downstream


def _downstream(
    aligned: AlignedStates,
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
    states = aligned.states
    old = {state.leaf.in_var for state in states}
    downstream: list[int] = []
    for a, candidate in reversed(list(enumerate(states))):
        upstream = {state.var for c, state in enumerate(states) if c != a and c not in downstream}
        is_carried = is_read[a] or any(_reaches_old(walk, candidate) for walk in walks)
        stops = every_new - {candidate.var}
        reads_old = graph.values.ancestors([candidate.var], stops | graph.opaque) & old
        reads_new = graph.values.ancestors([candidate.var], stops) & (upstream - {candidate.var})
        if reads_new and not (is_carried or reads_old):
            downstream.append(a)
    return tuple(reversed(downstream))


def _without_held_cuts(
    analysis: Analysis, graph: StepGraph, walk: Walk, ends: frozenset[Var]
) -> Walk:
    """Leave out truncated paths that end at held values: they lose no gradient."""
    equations = analysis.program.equations

    def costs(cut: Cut) -> bool:
        operand = equations[cut.equation].invars[cut.operand]
        return not graph.values.ancestors([operand], ends) <= ends

    return dataclasses.replace(walk, cuts=tuple(filter(costs, walk.cuts)))


def _reaches(walk: Walk, state: Candidate) -> bool:
    """Test whether a walk has reached the old or the new value of a state."""
    return _reaches_old(walk, state) or _has_units(walk, state.var, state.places)


def _reaches_old(walk: Walk, state: Candidate) -> bool:
    return _has_units(walk, state.leaf.in_var, state.old_places)


def _has_units(walk: Walk, var: Var, places: np.ndarray) -> bool:
    return var in walk.ids and bool(np.any(walk.ids[var].ravel()[places] >= 0))


def _group(
    index: int,
    aligned: AlignedStates,
    walks: Sequence[Walk],
    downstream: tuple[int, ...],
    is_read: Sequence[bool],
    late_inputs: tuple[frozenset[Var], ...],
    delay_line: bool,
) -> HiddenGroup:
    states = aligned.states
    shape = states[0].shape
    size = int(np.prod(shape))

    def layout(ids: Ids) -> Ids | None:
        return None if np.array_equal(ids.ravel(), np.arange(size)) else ids

    return HiddenGroup(
        index=index,
        states=tuple(state.leaf for state in states),
        new_vars=tuple(state.var for state in states),
        layouts=tuple(layout(state.ids) for state in states),
        old_layouts=tuple(layout(state.old_ids) for state in states),
        shape=shape,
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
    states: Sequence[Candidate], walks: Sequence[Walk], state: Candidate
) -> tuple[Cut, ...]:
    """Return the cuts of all slots of a State: its new value is computed once."""
    own = (walk for other, walk in zip(states, walks, strict=True) if other.leaf is state.leaf)
    return tuple(sorted({cut for walk in own for cut in walk.cuts}))

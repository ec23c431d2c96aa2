"""Linear readouts: hidden states whose derivative goes through filters.

A readout depends on other states, which do not depend on it, through an operation that couples
elements. Without filters, every gradient leaves out its memory of those states. A readout is a
linear filter of values in their units (see `linear_filters`). No other state reads it, and nothing
but its own new value reads its old value.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator

import numpy as np

from .._etrace_op.registry import is_marked
from .._graph import Batch, TracedModel
from .._graph.traced_model import StateLeaf
from .._jax import Var
from .back_through import Ids, numbered
from .batch import axes_of_filters, with_axes
from .hidden_groups import GroupedStep, seen_by_losses
from .linear_filters import FilterFinder, LinearFilter
from .readout_filters import with_filters, without_marks
from .walk import Walk, walk_back

Regroup = Callable[[TracedModel], GroupedStep]
"""Group the hidden states of a step."""


def filter_readouts(step: GroupedStep, batch: Batch, regroup: Regroup) -> tuple[GroupedStep, Batch]:
    """Add filters to the linear readouts of a step; the batch gets the axes of the filters."""
    readouts = _readouts(step, None)
    while readouts:
        names = {readout.leaf.name for readout in readouts}
        operations = {r.leaf.name: _operations(step, r) for r in readouts}
        plain = without_marks(step.traced, [i for r in readouts for i in r.equations])
        if plain is not step.traced:
            readouts = _readouts(regroup(plain), names)
            if len(readouts) < len(names):
                readouts = _readouts(step, {readout.leaf.name for readout in readouts})
                continue
        filtered = regroup(with_filters(plain, readouts, operations))
        axes = axes_of_filters(filtered.traced, filtered.analysis, batch)
        wrong = set(_not_in_units(filtered))
        if batch.samples is not None and not batch.unclear:
            found = filtered.traced.readouts
            wrong |= {r.state for r in found if not axes.keys() >= {*r.filters}}
        if not wrong:
            return filtered, with_axes(batch, axes)
        readouts = _readouts(step, names - wrong)
    return step, batch


def _operations(step: GroupedStep, readout: LinearFilter) -> tuple[str, ...]:
    equations = (step.analysis.program.equations[index] for index in readout.equations)
    return tuple(equation.primitive.name for equation in equations if is_marked(equation))


def _readouts(step: GroupedStep, names: Collection[str] | None) -> list[LinearFilter]:
    """Return the linear readouts of a step, or those of some names, in the order of computation."""
    others = {var for _, var in step.new_states}
    late = step.graph.gradients.ancestors(seen_by_losses(step.traced, step.outputs), others)
    finder, readouts = FilterFinder(step), []
    for leaf, var, units, walk in _states(step):
        is_wanted = not leaf.is_grouped and leaf.in_var not in late
        if not is_wanted or (names is not None and leaf.name not in names):
            continue
        nodes, mine = {leaf.in_var, var}, others - {var}
        is_read = not step.graph.gradients.descendants(nodes, mine).isdisjoint(mine)
        kept = walk.ids.get(leaf.in_var)
        is_in_place = kept is not None and np.array_equal(kept, units) and np.all(units >= 0)
        readout = None if is_read or not is_in_place else finder.find(leaf, var)
        if readout is not None and _couples(step, readout, walk):
            readouts.append(readout)
    return readouts


def _states(step: GroupedStep) -> list[tuple[StateLeaf, Var, Ids, Walk]]:
    """Return the grouped states, each with the units of its elements and the walk back from it."""
    every = []
    for group, walks in zip(step.groups, step.walks, strict=True):
        parts = zip(group.states, group.new_vars, group.old_layouts, walks, strict=True)
        every += [
            (leaf, var, numbered(leaf.in_var) if layout is None else layout, walk)
            for leaf, var, layout, walk in parts
        ]
    return sorted(every, key=lambda state: step.analysis.program.producer[state[1]])


def _couples(step: GroupedStep, readout: LinearFilter, walk: Walk) -> bool:
    """Test whether a filter depends on other states, by coupling in its own equations only."""
    others = {var for _, var in step.new_states} - {readout.var}
    ends = {*(cut.equation for cut in walk.cuts), *walk.weights_met}
    ends |= {index for index, _ in walk.states_met}
    states = others | {leaf.in_var for leaf, _ in step.new_states if leaf is not readout.leaf}
    below = step.graph.gradients.ancestors(_operands_at_ends(step, walk), others)
    return not (ends.isdisjoint(readout.equations) or states.isdisjoint(below))


def _operands_at_ends(step: GroupedStep, walk: Walk) -> Iterator[Var]:
    """Yield the operands, and the new states, before which a walk ended."""
    equations = step.analysis.program.equations
    yield from (equations[cut.equation].invars[cut.operand] for cut in walk.cuts)
    yield from (atom for index in walk.weights_met for atom in equations[index].invars)
    yield from (var for _, var in walk.states_met)


def _not_in_units(step: GroupedStep) -> Iterator[str]:
    """Yield the readouts with a filter of a value that is not elementwise in states."""
    states = _states(step)
    new, filters = {var for _, var, _, _ in states}, set(step.traced.filters)
    others = {v for leaf, var, _, _ in states if leaf not in filters for v in (leaf.in_var, var)}
    wrong = set()
    for leaf, var, _, own in (state for state in states if state[0] in filters):
        stops = frozenset(new - {var})
        walk = walk_back(step.analysis, {var: numbered(leaf.in_var)}, stops)
        ends = _operands_at_ends(step, dataclasses.replace(walk, states_met=[]))
        if own.states_met or not others.isdisjoint(step.graph.gradients.ancestors(ends, stops)):
            wrong.add(leaf.path)
    yield from (r.state for r in step.traced.readouts if not wrong.isdisjoint(r.filters))

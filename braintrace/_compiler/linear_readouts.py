"""Linear readouts: hidden states whose derivative goes through filters.

A readout depends on other states, which do not depend on it, through an operation that couples
elements. Without filters, every gradient leaves out its memory of those states. A readout is a
linear filter of values in their units (see `linear_filters`). No other state reads it, and nothing
but its own new value reads its old value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .._etrace_op.registry import is_marked
from .._graph import Batch, StateLeaf, TracedModel
from .._graph.diagnostics import Diagnostic
from .._graph.traced_model import FILTERS
from .._jax import Var
from .back_through import numbered
from .batch import axes_of_filters, with_axes
from .grouped_step import GroupedStep
from .linear_filters import NO_DECAY, NOT_LINEAR, FilterFinder, LinearFilter
from .readout_filters import with_filters, without_marks
from .walk import Walk, walk_back

Regroup = Callable[[TracedModel], GroupedStep]
"""Group the hidden states of a step."""

JOINED = "it is a part of a `HiddenGroupState`"
COUPLED = (
    "its input is not an elementwise function of hidden states: a nonlinear operation follows an "
    "operation that couples elements"
)
CHAINED = "it reads another such state, and a chain of readouts has no filters"
READ_LATE = "the outputs of `update`, or other States, depend on its previous value"
MOVED = "its elements change their indices"
OTHER_AXES = "its input has no axis with the samples of its batch"


def filter_readouts(
    step: GroupedStep, batch: Batch, regroup: Regroup
) -> tuple[GroupedStep, Batch, list[Diagnostic]]:
    """Add filters to the linear readouts of a step, and report refused candidates.

    The batch gets the axes of the filters as well.
    """
    states = _states_of(step)
    dependent = [state.leaf for state in states if _is_dependent(step, states, state)]
    refused = {leaf.name: JOINED for leaf in dependent if leaf.is_grouped}
    wanted = {leaf.name for leaf in dependent}
    while True:
        readouts = _readouts(step, wanted - refused.keys(), refused)
        if not readouts:
            return step, batch, _refusals(step, states, refused)
        operations = {r.leaf.name: _operations(step, r) for r in readouts}
        plain = without_marks(step.traced, [i for r in readouts for i in r.equations])
        if plain is not step.traced:
            names = {readout.leaf.name for readout in readouts}
            readouts = _readouts(regroup(plain), names, refused)
            if refused.keys() & names:
                continue
        filtered = regroup(with_filters(plain, readouts, operations))
        wrong = dict.fromkeys(_not_at_positions(filtered), COUPLED)
        axes = axes_of_filters(filtered.traced, filtered.analysis, batch)
        if batch.samples is not None and not batch.unclear:
            of = filtered.traced.readouts
            wrong = {r.state: OTHER_AXES for r in of if not axes.keys() >= {*r.filters}} | wrong
        if not wrong:
            return filtered, with_axes(batch, axes), _refusals(step, states, refused)
        refused.update(wrong)


def _operations(step: GroupedStep, readout: LinearFilter) -> tuple[str, ...]:
    equations = (step.analysis.program.equations[index] for index in readout.equations)
    return tuple(equation.primitive.name for equation in equations if is_marked(equation))


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """A hidden state of a step, and the walk back from its new value.

    Attributes
    ----------
    leaf, var
        The state, and the variable of its new value.
    layout
        See `HiddenGroup.old_layouts`.
    walk
        The walk back from the new value.
    """

    leaf: StateLeaf
    var: Var
    layout: np.ndarray | None
    walk: Walk

    @property
    def nodes(self) -> set[Var]:
        """The state before and after the step."""
        return {self.leaf.in_var, self.var}


def _states_of(step: GroupedStep) -> list[_State]:
    """Return the grouped states of a step, in the order of computation."""
    every = [
        _State(*fields)
        for group, walks in zip(step.groups, step.walks, strict=True)
        for fields in zip(group.states, group.new_vars, group.old_layouts, walks, strict=True)
    ]
    return sorted(every, key=lambda state: step.analysis.program.producer[state.var])


def _is_dependent(step: GroupedStep, states: Sequence[_State], state: _State) -> bool:
    """Test whether a state depends on others by coupling, without feedback to those."""
    gradients = step.graph.gradients
    if state.leaf.in_var not in gradients.ancestors([state.var], _others(step, state)):
        return False
    coupled, affected = _coupled(step, state.walk), gradients.descendants_over_time(state.nodes)
    others = (other for other in states if not coupled.isdisjoint(other.nodes))
    return any(other is not state and other.var not in affected for other in others)


def _coupled(step: GroupedStep, walk: Walk) -> set[Var]:
    """Return the states before or after a step that a walk ended before."""
    equations = step.analysis.program.equations
    operands = [equations[cut.equation].invars[cut.operand] for cut in walk.cuts]
    operands += [atom for index in walk.weights_met for atom in equations[index].invars]
    operands += [var for _, var in walk.states_met]
    return step.graph.gradients.ancestors(operands, _others(step))


def _others(step: GroupedStep, state: _State | None = None) -> set[Var]:
    """Return the new values of all states, or of all but one."""
    return {var for _, var in step.new_states if state is None or var is not state.var}


def _readers(step: GroupedStep, states: Sequence[_State], state: _State) -> list[StateLeaf]:
    """Return the other states that read a state in the step, old or new."""
    reached = step.graph.gradients.descendants(state.nodes, _others(step, state))
    return [other.leaf for other in states if other is not state and other.var in reached]


def _refusals(
    step: GroupedStep, states: Sequence[_State], refused: Mapping[str, str]
) -> list[Diagnostic]:
    """Report why states are not readouts, except nonlinear layers that others read."""
    layers = {
        state.leaf.name
        for state in states
        if any(reader.path != state.leaf.path for reader in _readers(step, states, state))
    }
    return [
        Diagnostic(
            "info",
            "truncated",
            f"Hidden state '{name}' remembers its inputs from other states, but is not a linear "
            f"readout, whose gradient would be exact: {why}.",
            (name,),
        )
        for name, why in refused.items()
        if name not in layers or why not in (NOT_LINEAR, NO_DECAY, JOINED)
    ]


def _readouts(step: GroupedStep, names: set[str], refused: dict[str, str]) -> list[LinearFilter]:
    """Return the linear readouts among some states; record why others are refused."""
    states, finder = _states_of(step), FilterFinder(step)
    readouts = []
    for state in (state for state in states if state.leaf.name in names):
        readout = finder.find(state.leaf, state.var)
        if not isinstance(readout, str):
            readout = _why_not(step, states, state, readout) or readout
        if isinstance(readout, str):
            refused[state.leaf.name] = readout
        else:
            readouts.append(readout)
    return readouts


def _why_not(
    step: GroupedStep, states: Sequence[_State], state: _State, readout: LinearFilter
) -> str | None:
    """Return why a linear filter cannot have readout filters; ``None``: it can."""
    if _is_read_late(step, state):
        return READ_LATE
    if not _is_in_place(state):
        return MOVED
    for reader in _readers(step, states, state):
        return f"hidden state '{reader.name}' reads it"
    walk = state.walk
    ends = {*(cut.equation for cut in walk.cuts), *walk.weights_met}
    if ends.union(index for index, _ in walk.states_met).isdisjoint(readout.equations):
        return COUPLED if _others(step).isdisjoint(readout.values) else CHAINED
    return None


def _is_in_place(state: _State) -> bool:
    """Test whether each element of a state depends on its old value."""
    leaf = state.leaf
    units = numbered(leaf.in_var) if state.layout is None else state.layout
    comes_from = state.walk.ids.get(leaf.in_var)
    is_kept = comes_from is not None and np.array_equal(comes_from, units)
    return is_kept and bool(state.var.aval.shape == leaf.shape)


def _is_read_late(step: GroupedStep, state: _State) -> bool:
    """Test whether outputs of the step read the old value of a state."""
    written = [*(leaf for leaf in step.traced.leaves if leaf.kind == "other"), *step.outputs]
    outputs = [leaf.out_var for leaf in written if leaf.out_var is not None]
    targets = [*step.traced.output_atoms, *outputs]
    return state.leaf.in_var in step.graph.gradients.ancestors(targets, _others(step))


def _not_at_positions(step: GroupedStep) -> list[str]:
    """Return the readouts with a filter of a value that is not elementwise in states."""
    states = _states_of(step)
    filters = [state for state in states if state.leaf.path[0] == FILTERS]
    others = {var for state in states if state not in filters for var in state.nodes}
    wrong = set()
    for state in filters:
        start, stops = {state.var: numbered(state.leaf.in_var)}, frozenset(_others(step, state))
        walk = dataclasses.replace(walk_back(step.analysis, start, stops), states_met=())
        if state.walk.states_met or not others.isdisjoint(_coupled(step, walk)):
            wrong.add(state.leaf.path)
    return [r.state for r in step.traced.readouts if not wrong.isdisjoint(r.filters)]

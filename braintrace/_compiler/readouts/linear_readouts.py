"""Linear readouts: hidden states whose derivative goes through filters.

A readout depends on other states, which do not depend on it, through an operation that couples
elements. Without filters, every gradient leaves out its memory of those states. A readout is a
linear filter of values in their units (see `linear_filters`). No other state reads it, and nothing
but its own new value reads its old value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from ..._etrace_op.marked import is_marked
from ..._graph import Batch, StateLeaf, TracedModel
from ..._graph.diagnostics import Diagnostic
from ..._graph.traced_model import FILTERS
from ..._jax import Var, is_var
from ..._jaxpr import reached
from ..core.back_through import numbered
from ..core.batch import axes_of_filters, with_axes
from ..core.walk import Walk, walk_back
from ..groups.grouped_step import GroupedStep
from .linear_filters import NO_DECAY, NOT_LINEAR, FilterFinder, LinearFilter
from .readout_filters import with_filters, without_marks

Regroup = Callable[[TracedModel], GroupedStep]
"""Group the hidden states of a step."""

JOINED = "it is a part of a `HiddenGroupState`"
MIXED = (
    "what it filters is no function of hidden states position by position: a nonlinear operation "
    "lies behind one that couples elements"
)
CHAINED = "it reads another such state, and a chain of readouts has no filters"
READ_LATE = "what `update` returns, or writes to other States, depends on its value before the step"
MOVED = "its elements do not stay where they are"
OTHER_AXES = "its input has no axis with the samples of its batch"


def filter_readouts(
    step: GroupedStep, batch: Batch, regroup: Regroup
) -> tuple[GroupedStep, Batch, list[Diagnostic]]:
    """Add filters to the linear readouts of a step, and report refused candidates.

    The batch gets the axes of the filters as well.
    """
    states = _States(step)
    dependent = [*_dependent_states(states)]
    refused = {s.leaf.name: JOINED for s in dependent if s.leaf.joined_var is not None}
    wanted = {state.leaf.name for state in dependent}
    while True:
        readouts = _readouts(states, wanted - refused.keys(), refused)
        if not readouts:
            return step, batch, _refusals(states, refused)
        operations = {r.leaf.name: _operations(step, r) for r in readouts}
        plain = without_marks(step.traced, [i for r in readouts for i in r.equations])
        if plain is not step.traced:
            names = {readout.leaf.name for readout in readouts}
            readouts = _readouts(_States(regroup(plain)), names, refused)
            if refused.keys() & names:
                continue
        filtered = regroup(with_filters(plain, readouts, operations))
        wrong = dict.fromkeys(_not_at_positions(filtered), MIXED)
        axes = axes_of_filters(filtered.traced, filtered.analysis, batch)
        if batch.samples is not None and not batch.unclear:
            of = filtered.traced.readouts
            wrong = {r.state: OTHER_AXES for r in of if not axes.keys() >= {*r.filters}} | wrong
        if not wrong:
            return filtered, with_axes(batch, axes), _refusals(states, refused)
        refused.update(wrong)


def _operations(step: GroupedStep, readout: LinearFilter) -> tuple[str, ...]:
    equations = (step.analysis.program.equations[index] for index in readout.equations)
    return tuple(equation.primitive.name for equation in equations if is_marked(equation))


def _refusals(states: _States, refused: Mapping[str, str]) -> list[Diagnostic]:
    """Report why states are not readouts, except nonlinear layers that others read."""
    path = {state.leaf.name: state.leaf.path for state in states.every}
    layers = {
        name for reader, read in states.read.items() for name in read if path[name] != path[reader]
    }
    return [
        Diagnostic(
            "info",
            "not-a-linear-readout",
            f"Hidden state '{name}' remembers what other states feed it, and is no linear readout, "
            f"whose gradient would be exact: {why}.",
            (name,),
        )
        for name, why in refused.items()
        if name not in layers or why not in (NOT_LINEAR, NO_DECAY, JOINED)
    ]


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


class _States:
    """The hidden states of a step, and the states that each of them reads."""

    def __init__(self, step: GroupedStep) -> None:
        self.step = step
        self.every = [
            _State(*fields)
            for group, walks in zip(step.groups, step.walks, strict=True)
            for fields in zip(group.states, group.new_vars, group.old_layouts, walks, strict=True)
        ]
        producer = step.analysis.program.producer
        self.every.sort(key=lambda state: producer[state.var])

    @functools.cached_property
    def new_vars(self) -> dict[str, Var]:
        """The variables of the new values, by the names of the states."""
        return {state.leaf.name: state.var for state in self.every}

    def ancestors(self, variables: Iterable[Var], start: Var | None = None) -> set[Var]:
        """Return the variables that a gradient reaches in the step, up to other states."""
        stops = frozenset(self.new_vars.values()) - {start}
        return self.step.analysis.gradient_ancestors(variables, stops)

    @functools.cached_property
    def read(self) -> dict[str, set[str]]:
        """Names of the states that each state reads in a step, old or new."""
        return {
            state.leaf.name: self._named(self.ancestors([state.var], state.var)) - {state.leaf.name}
            for state in self.every
        }

    def remembers(self, state: _State) -> bool:
        """Test whether a state reads its own old value."""
        return state.leaf.in_var in self.ancestors([state.var], state.var)

    def _named(self, variables: set[Var]) -> set[str]:
        return {s.leaf.name for s in self.every if not variables.isdisjoint((s.var, s.leaf.in_var))}

    def mixed_into(self, state: _State) -> set[str]:
        """Return the names of the states that reach a state, but not elementwise."""
        program, walk = self.step.analysis.program, state.walk
        operands = [program.equations[cut.equation].invars[cut.operand] for cut in walk.cuts]
        operands += [a for index in walk.weights_met for a in program.equations[index].invars]
        operands += [var for _, var in walk.states_met]
        return self._named(self.ancestors(filter(is_var, operands)))


def _dependent_states(states: _States) -> Iterator[_State]:
    """Yield the states that depend on others by coupling, without feedback to those."""
    for state in states.every:
        name = state.leaf.name
        others = (other for other in states.mixed_into(state) if other != name)
        if states.remembers(state) and any(name not in _all_read(states, o) for o in others):
            yield state


def _all_read(states: _States, name: str) -> set[str]:
    """Return the names of the states that one depends on, over time."""
    return reached(states.read[name], states.read.__getitem__)


def _readouts(states: _States, names: set[str], refused: dict[str, str]) -> list[LinearFilter]:
    """Return the linear readouts among some states; record why others are refused."""
    step = states.step
    finder = FilterFinder(step.traced, step.analysis, states.new_vars)
    late, readouts = _read_late(states), []
    for state in states.every:
        name = state.leaf.name
        if name not in names:
            continue
        readout = finder.find(state.leaf, state.var)
        if not isinstance(readout, str):
            why = READ_LATE if name in late else _why_not(states, state, readout)
            readout = why or readout
        if isinstance(readout, str):
            refused[name] = readout
        else:
            readouts.append(readout)
    return readouts


def _why_not(states: _States, state: _State, readout: LinearFilter) -> str | None:
    """Return why a linear filter cannot have readout filters; ``None``: it can."""
    if not _is_in_place(state):
        return MOVED
    both = {state.var, state.leaf.in_var}
    for other in states.every:
        if other is not state and not states.ancestors([other.var], other.var).isdisjoint(both):
            return f"hidden state '{other.leaf.name}' reads it"
    if _mixing(state).isdisjoint(readout.equations):
        is_chain = not set(states.new_vars.values()).isdisjoint(readout.values)
        return CHAINED if is_chain else MIXED
    return None


def _mixing(state: _State) -> set[int]:
    """Return the equations before a state at which elementwise dependence ends."""
    walk = state.walk
    cuts = (cut.equation for cut in walk.cuts)
    return {*cuts, *walk.weights_met, *(index for index, _ in walk.states_met)}


def _is_in_place(state: _State) -> bool:
    """Test whether each element of a state depends on its old value."""
    leaf = state.leaf
    units = numbered(leaf.in_var) if state.layout is None else state.layout
    comes_from = state.walk.ids.get(leaf.in_var)
    is_kept = comes_from is not None and np.array_equal(comes_from, units)
    return is_kept and bool(state.var.aval.shape == leaf.shape)


def _read_late(states: _States) -> set[str]:
    """Return the names of the states whose old value the outputs read."""
    traced = states.step.traced
    written = [*(s for s in traced.leaves if s.kind == "other"), *states.step.outputs]
    atoms = [*traced.output_atoms, *(leaf.out_var for leaf in written)]
    ancestors = states.ancestors(atom for atom in atoms if atom is not None and is_var(atom))
    return {state.leaf.name for state in states.every if state.leaf.in_var in ancestors}


def _not_at_positions(step: GroupedStep) -> list[str]:
    """Return the readouts with a filter of a value that is not elementwise in states."""
    states = _States(step)
    others = {state.leaf.name for state in states.every if state.leaf.path[0] != FILTERS}
    wrong = set()
    for state in states.every:
        if state.leaf.path[0] != FILTERS:
            continue
        stops = frozenset(var for var in states.new_vars.values() if var is not state.var)
        walk = walk_back(step.analysis, {state.var: numbered(state.leaf.in_var)}, stops)
        alone = dataclasses.replace(state, walk=dataclasses.replace(walk, states_met=()))
        apart = {var for _, var in state.walk.states_met}
        if states.mixed_into(alone) & others or apart:
            wrong.add(state.leaf.path)
    return [r.state for r in step.traced.readouts if not wrong.isdisjoint(r.filters)]

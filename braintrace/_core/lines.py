"""Delay lines: states of a group that only hold earlier values of others.

The new value of such a state is the old value of another one, element by element: the slots of a
shift register, or States that a value moves through. A state has a *root*, and an *age*: the root
had its value this many steps ago. If no other state of the group reads them, traces follow the
*core* alone: the group without these states.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from .._graph.graph import ETraceGraph
from .._graph.hidden_group import HiddenGroup, HiddenParamOpRelation
from .registers import Numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """The delay lines of a group.

    Attributes
    ----------
    group
        The group.
    core
        The graph with the core in the place of the group, and with its relations alone.
    origins
        For each state of the group, the index of its root in the core, and its age.
    carried
        Indices in the core of the states that its next step reads.
    steps
        The number of steps between the traces and the present. A root that no later step reads has
        no trace; its value is computed in the step after them.
    """

    group: HiddenGroup
    core: ETraceGraph
    origins: tuple[tuple[int, int], ...]
    carried: tuple[int, ...]
    steps: int

    @property
    def core_group(self) -> HiddenGroup:
        """The core as a group."""
        (group,) = self.core.traced_groups
        return group

    @property
    def printed(self) -> str:
        """The names of the States with earlier values."""
        pairs = zip(self.group.states, self.origins, strict=True)
        return ", ".join(dict.fromkeys(leaf.name for leaf, (_, age) in pairs if age))


@functools.lru_cache(maxsize=64)
def lines_of(graph: ETraceGraph) -> tuple[Line, ...]:
    """Return the delay lines of the groups that have some."""
    found = (_line_of(graph, group) for group in graph.traced_groups)
    return tuple(line for line in found if line is not None)


def _line_of(graph: ETraceGraph, group: HiddenGroup) -> Line | None:
    origins = _origins(graph, group)
    moved = {a for a, (root, _) in enumerate(origins) if root != a}
    is_read = any(c in moved and a not in moved for a, c in group.transition)
    is_complex = any(np.issubdtype(state.dtype, np.complexfloating) for state in group.states)
    if not any(age for _, age in origins) or is_read or is_complex:
        return None
    kept = [a for a in range(len(group.states)) if a not in moved]
    places = {a: place for place, a in enumerate(kept)}
    core = _core(group, kept, places)
    carried = core.read_states
    # A loss may read old values.
    late = [age + (a in group.read_late) for a, (_, age) in enumerate(origins)]
    steps = max(
        n + (places[root] not in carried) for n, (root, _) in zip(late, origins, strict=True)
    )
    core = dataclasses.replace(core, suffix=f", {steps} steps ago")
    relations = tuple(
        _of_core(relation, group.index, core, places, carried)
        for relation in graph.hidden_param_op_relations
        if group in relation.hidden_groups
    )
    groups = tuple(core if other is group else other for other in graph.hidden_groups)
    changes = {"hidden_groups": groups, "hidden_param_op_relations": relations}
    return Line(
        group,
        dataclasses.replace(graph, **changes),  # type: ignore[arg-type]
        tuple((places[root], age) for root, age in origins),
        carried,
        steps,
    )


def _origins(graph: ETraceGraph, group: HiddenGroup) -> list[tuple[int, int]]:
    """Return the root of each state, and its age."""
    units, states = group.num_positions, range(len(group.states))
    numbers = Numbers()
    for a, (state, layout) in enumerate(zip(group.states, group.old_layouts, strict=True)):
        layout = np.arange(units) if layout is None else layout
        own = numbers.setdefault(state.in_var, np.full(state.shape, -1))
        own.flat[np.flatnonzero(layout >= 0)] = a * units + layout[layout >= 0]
    numbers.follow(graph.traced.program, group.new_vars)
    pairs = zip(group.new_vars, group.layouts, strict=True)
    every = [_in_units(numbers.of(var), layout, units) for var, layout in pairs]
    old = range(0, units * len(states), units)
    source = {
        a: int(own[0]) // units
        for a, own in enumerate(every)
        if own[0] in old and np.array_equal(own - own[0], np.arange(units))
    }
    # States with equal values have one root: one that a computed state reads, or the first.
    is_read = {c for a, c in group.transition if a not in source}
    first = dict[bytes, int]()
    for a in sorted(states, key=lambda a: a not in is_read):
        if a not in group.downstream and every[a].min() >= 0:
            first.setdefault(every[a].tobytes(), a)
    roots = [a if a in is_read else first.get(every[a].tobytes(), a) for a in states]
    origins = (_origin(source, a) for a in states)
    return [(roots[root], age) for root, age in origins]


def _in_units(numbers: np.ndarray, layout: np.ndarray | None, units: int) -> np.ndarray:
    """Return the number of each unit's element, -1 without one."""
    unit = np.arange(units) if layout is None else layout.ravel()
    result = np.full(units, -1)
    result[unit[unit >= 0]] = numbers.ravel()[unit >= 0]
    return result


def _origin(source: dict[int, int], state: int) -> tuple[int, int]:
    """Return the root of a state, and its age; a state on a cycle is its own root."""
    root, age = state, 0
    while root in source:
        root, age = source[root], age + 1
        if root == state or age > len(source):
            return state, 0
    return root, age


def _core(group: HiddenGroup, kept: list[int], places: dict[int, int]) -> HiddenGroup:
    """Return a group with some of its states."""

    def of_kept(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[a] for a in kept)

    return dataclasses.replace(
        group,
        states=of_kept(group.states),
        new_vars=of_kept(group.new_vars),
        layouts=of_kept(group.layouts),
        old_layouts=of_kept(group.old_layouts),
        transition=tuple(
            (places[a], places[c]) for a, c in group.transition if a in places and c in places
        ),
        cuts=of_kept(group.cuts),
        read_late=(),
        late_inputs=of_kept(group.late_inputs),
        downstream=tuple(places[a] for a in group.downstream if a in places),
    )


def _of_core(
    relation: HiddenParamOpRelation,
    index: int,
    core: HiddenGroup,
    places: dict[int, int],
    carried: tuple[int, ...],
) -> HiddenParamOpRelation:
    """Return a relation that reaches the core alone."""
    (influence,) = (own for own in relation.influences if own.group == index)
    reached = tuple(places[a] for a in influence.reached if a in places)
    own = dataclasses.replace(
        influence,
        taps=tuple(
            dataclasses.replace(tap, state=places[tap.state])
            for tap in influence.taps
            if tap.state in places
        ),
        reached=reached,
        stored=tuple(a for a in reached if a in carried),
    )
    return dataclasses.replace(relation, influences=(own,), hidden_groups=(core,))

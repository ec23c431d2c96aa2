"""Units: connected components of elementwise dependence over the elements of States.

An element of a State, before a step or after it, has a number. Elements that depend on each other
elementwise belong to one *unit*, of whatever States they are: the potential and the adaptation of a
neuron, the slots of a register or of a ring buffer that hold its earlier values. The exception are
*rivals*: elements of one State which one ETP operation drives by different outputs, neither by all
those of the other. They are the units of a layer. What would join rivals (a sum over a layer,
`jnp.roll`) is coupling: it is cut, and reported.

1. An element that an ETP operation reaches within the step begins as a unit of its own.
2. Labels (units) flow forward through the step from the elements that have one. An element without
   a label takes the one that arrives first.
3. Where labels meet, their units become one, all those that meet in one equation together, unless
   that would put rivals into one unit. Then the label in order counts, or none. Labels that are
   both in order (element ``i`` of one State and of another) meet before all others.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .._etrace_op.registry import ETP_PRIMITIVE_SPECS, role
from .._graph.hidden_group import Ids
from .._graph.traced_model import StateLeaf
from .._jax import OWN_DERIVATIVE, Equation, Var, is_var
from .._jaxpr.dataflow import BOTTOM, TOP, Dataflow, Flow, Labels
from .._jaxpr.primitives import PRODUCTS, chosen_axes, columns_of, moved_operands, sources_of
from .._jaxpr.program import carries_derivative
from .analysis import Analysis, numbered, through_derivative
from .walk import Walk, is_write


@dataclasses.dataclass(frozen=True, eq=False)
class Elements:
    """A State that the step writes, with the numbers of its elements.

    ``new`` are the variables that consist of all elements of its new value, or of those of one
    component that its author declares (`HiddenGroupState`), with their numbers.
    """

    leaf: StateLeaf
    numbers: Ids
    new: Mapping[Var, Ids]

    @property
    def component(self) -> np.ndarray:
        """The declared component of each element."""
        count = self.leaf.shape[-1] if self.leaf.is_grouped else 1
        return np.arange(self.numbers.size) % count


class Units:
    """The units of a step.

    Parameters
    ----------
    analysis
        Analysis of the step.
    leaves
        The States that may carry values of units.

    Attributes
    ----------
    states
        The States, each with the numbers of its elements.
    unit
        For each element, the lowest number of the elements of its unit.
    is_reached
        For each element, whether an ETP operation reaches its unit, at once or over time.
    labels
        The unit that the elements of each variable depend on.
    """

    def __init__(self, analysis: Analysis, leaves: Sequence[StateLeaf]) -> None:
        self._analysis = analysis
        program = analysis.program
        making = program.making(analysis.operation_outputs)
        operations = [program.equations[index] for index in making]
        self._outputs = {y: _orders_of(e) for e in operations for y in e.outvars}
        self.states = [*_elements(analysis, leaves)]
        sizes = self._sizes = np.array([state.numbers.size for state in self.states], int)
        self.unit = np.arange(sizes.sum())
        self._state = np.repeat(np.arange(sizes.size), sizes)
        self._place = self.unit - np.repeat(np.cumsum(sizes) - sizes, sizes)
        components = [np.zeros(0, int), *(state.component for state in self.states)]
        self._kind = np.concatenate(components) * sizes.size + self._state
        self._joins: Literal["in order", "all", "none"] = "in order"
        self._source = np.full(self.unit.size, BOTTOM)
        self._alone = [*map(self._walk_alone, self.states)]
        self._leading = {var for walk in self._alone for var in walk.ids}
        self._driven: dict[int, list[np.ndarray]] = {}

        self._begun = self._reached_now()
        self._known = self._begun.copy()
        self._grow()
        self.is_reached = self._known.copy()
        if not self._known.all():  # the rest is in units as well, for reports
            self._begun = self._begun | ~self._known
            self._known[:] = True
            self._grow()
        self._joins = "none"
        self.labels = self._flow()

    # --- labels that meet

    def now(self, labels: Ids) -> Ids:
        """Return the present units of labels."""
        return np.where(labels >= 0, self.unit[np.maximum(labels, 0)], labels).astype(np.int32)

    def in_order(self, labels: Ids) -> np.ndarray:
        """Test whether labels are where the first element of their unit is in its State."""
        first = np.maximum(labels, 0)
        place = np.arange(labels.size).reshape(labels.shape)
        is_whole = self._sizes[self._state[first]] == labels.size
        return np.asarray((labels >= 0) & is_whole & (self._place[first] == place))

    def meet(self, first: Ids, second: Ids, most: int | None = None) -> tuple[Ids, Ids]:
        """Join units that differ, all that pairs connect together, unless they contain rivals.

        Return the units after it. With ``most``, no joined unit has more elements of one State.
        """
        first, second = self.now(first), self.now(second)
        differ = (first >= 0) & (second >= 0) & (first != second)
        if self._joins == "in order" and differ.any():
            differ &= self.in_order(first) & self.in_order(second)
        if self._joins == "none" or not differ.any():
            return first, second
        unit = _connected(self.unit.size, first[differ], second[differ])[self.unit]
        refused = self._have_rivals(unit)
        if most is not None:
            refused |= self._have_more(unit, most)
        self.unit = np.where(refused[unit], self.unit, unit)
        return self.now(first), self.now(second)

    def _have_rivals(self, unit: np.ndarray) -> np.ndarray:
        """Test each unit of an assignment for rivals."""
        have_rivals = np.zeros(unit.size, bool)
        grows = np.zeros(unit.size, bool)
        grows[unit[unit != self.unit]] = True
        own = np.flatnonzero(self._known & grows[unit])
        key = unit[own] * (1 + self._kind.max(initial=0)) + self._kind[own]
        in_order = np.sort(key)
        if not (in_order[1:] == in_order[:-1]).any():  # as in most models, and quick to see
            return have_rivals
        _, number, count = np.unique(key, return_inverse=True, return_counts=True)
        own, number = own[count[number] > 1], number[count[number] > 1]
        for state in np.unique(self._state[own]):
            inside = self._state[own] == state
            for drive in self._drives(state):
                elements, key = own[inside], number[inside]
                sets = drive[self._place[elements]]
                is_driven = sets[:, 0] > NOTHING
                elements, key, sets = elements[is_driven], key[is_driven], sets[is_driven]
                # Sets that contain each other are a chain, from small to large.
                order = np.lexsort((sets.sum(1, dtype=np.int64), key))
                elements, key, sets = elements[order], key[order], sets[order]
                are_rivals = (sets[:-1] > sets[1:]).any(1) & (key[:-1] == key[1:])
                have_rivals[unit[elements[1:][are_rivals]]] = True
        return have_rivals

    def _have_more(self, unit: np.ndarray, most: int) -> np.ndarray:
        """Test each unit of an assignment for more elements of one State than ``most``."""
        have_more, own = np.zeros(unit.size, bool), np.flatnonzero(self._known)
        key, count = np.unique(unit[own] * len(self.states) + self._state[own], return_counts=True)
        have_more[key[count > most] // len(self.states)] = True
        return have_more

    def _drives(self, state: int) -> list[np.ndarray]:
        """Return for each ETP operation the outputs that reach the elements of a State.

        An element that no operation drives is its own drive if it began as a unit. Of the uses of a
        value, those that the walk back from the State has cut do not count. A broadcast of a weight
        makes as many outputs as it has elements: the units of a layer that share it are rivals.
        """
        if state not in self._driven:
            program = self._analysis.program
            cut: dict[int, set[int]] = {}
            for use in self._alone[state].cuts:
                cut.setdefault(id(program.equations[use.equation]), set()).add(use.operand)
            new = self.states[state].leaf.out_var
            flows = (
                self._dataflow(sets, cut).flows_from({y: sets.of(numbered(y))}).get(new)
                for y, sets in self._outputs.items()
            )
            found = [flow.reshape(-1, flow.shape[-1]) for flow in flows if flow is not None]
            self._driven[state] = found
        drives, own = self._driven[state], self._state == state
        is_alone = self._begun[own]
        for drive in drives:
            is_alone = is_alone & (drive[:, 0] == NOTHING)
        itself = _Orders().of(np.arange(is_alone.size))
        return [*drives, np.where(is_alone[:, None], itself, NOTHING)]

    def _dataflow(self, lattice: Any, cut: Mapping[int, set[int]] | None = None) -> Dataflow:
        """Return the analysis of elementwise derivatives, for the equations of the step."""

        def special(equation: Equation, operands: Sequence[Flow]) -> Sequence[Flow] | None:
            held = cut.get(id(equation)) if cut else None
            if held:
                operands = [None if i in held else flow for i, flow in enumerate(operands)]
                if any(flow is not None for flow in operands):
                    return self._dataflow(lattice).flows_of_results(equation, operands)
                return [None] * len(equation.outvars)
            name, marked = equation.primitive.name, role(equation)
            if name in PRODUCTS and not self._is_constant_map(equation):
                return [None]  # an element of a product is not an element of its operands
            if isinstance(lattice, _Orders) and lattice.of_weights and name == "broadcast_in_dim":
                (result,) = equation.outvars
                if result.aval.size > equation.invars[0].aval.size:
                    return [lattice.of(numbered(result))]
            if marked is not None:
                through = operands[0] if marked == "transparent" else None
                return [through] * len(equation.outvars)
            own_derivative = name in OWN_DERIVATIVE
            return through_derivative(lattice, equation, operands) if own_derivative else None

        return Dataflow(self._analysis.constants, lattice, derivatives=True, special=special)

    def _is_constant_map(self, equation: Equation) -> bool:
        """Test whether a product applies a constant matrix (the memory of an LMU)."""
        return equation.primitive.name == "dot_general" and any(
            map(self._analysis.constants.has, equation.invars)
        )

    def _walk_alone(self, state: Elements) -> Walk:
        """Walk back from a State as if each of its elements that stay in place were a unit."""
        old, new = state.leaf.in_var, state.leaf.out_var
        own = self._dataflow(Labels()).flows_from({old: state.numbers})
        if new in own:
            self._source[state.numbers] = own[new]
        place = _ends(np.where(self._source == np.arange(self.unit.size), BOTTOM, self._source))
        ids = np.asarray(place[state.numbers], np.int32)
        return Walk(self._analysis, {new: ids}, own, place, writes_anywhere=True)

    # --- growth

    def _reached_now(self) -> np.ndarray:
        """Return the elements that ETP operations reach within the step."""
        starts = {y: np.zeros(y.aval.shape, np.int32) for y in self._outputs}
        flows = self._dataflow(Labels()).flows_from(starts)
        reached = np.zeros(self.unit.size, bool)
        for state, walk in zip(self.states, self._alone, strict=True):
            flow = flows.get(state.leaf.out_var)
            if flow is not None and not self._outputs.keys().isdisjoint(walk.ids):
                reached[state.numbers] = flow == 0
        return reached

    def _grow(self) -> None:
        """Let labels flow through the step, and arrive, until nothing changes."""
        for self._joins in ("in order", "all"):
            self._grow_to_the_end()

    def _grow_to_the_end(self) -> None:
        while True:
            before, known = self.unit, self._known.copy()
            self._flow()
            if np.array_equal(before, self.unit) and np.array_equal(known, self._known):
                return
            self._follow_moves()

    def _flow(self) -> dict[Var, Ids]:
        """Let labels flow through the step once; while units grow, to where they may arrive."""
        program, constants = self._analysis.program, self._analysis.constants
        dataflow, labels = self._dataflow(_Meeting(self)), dict[Var, Ids]()
        new = {var: numbers for state in self.states for var, numbers in state.new.items()}
        starts = new | {state.leaf.in_var: state.numbers for state in self.states}
        labels.update((var, self._labels_of(numbers)) for var, numbers in starts.items())
        for index in program.forward(labels):
            equation = program.equations[index]
            if self._joins != "none" and self._leading.isdisjoint(equation.outvars):
                continue
            operands = [labels.get(atom) if is_var(atom) else None for atom in equation.invars]
            if is_write(equation) and operands[0] is not None:
                # The places of a value, if data choose its place, are slots of one unit.
                axes = chosen_axes(equation, columns_of(equation, constants))
                dataflow.lattice.over(operands[0], axes)
            flows = dataflow.flows_of_results(equation, operands)
            for var, flow in zip(equation.outvars, flows, strict=True):
                if flow is not None and carries_derivative(var):
                    labels[var] = self._arrive(new[var], flow) if var in new else flow
        return labels

    def _labels_of(self, numbers: Ids) -> Ids:
        return np.where(self._known[numbers], self.unit[numbers], BOTTOM).astype(np.int32)

    def _arrive(self, numbers: Ids, labels: Ids) -> Ids:
        """Let labels arrive at elements of a new State, and return the labels of these."""
        _, labels = self.meet(self._labels_of(numbers), labels)
        begins = ~self._known[numbers] & (labels >= 0)
        self.unit = self.unit.copy()
        self.unit[numbers[begins]] = labels[begins]
        self._known[numbers[begins]] = True
        return self._labels_of(numbers)

    def _follow_moves(self) -> None:
        """Give elements that only move from step to step (a register) their unit at once."""
        end = _ends(np.where(self._known, BOTTOM, self._source))
        found = ~self._known & self._known[end]
        self.unit = np.where(found, self.unit[end], self.unit)
        self._known |= found


def _ends(source: np.ndarray) -> np.ndarray:
    """Follow the sources of elements to the first one without a source; a cycle has no end."""
    every = np.arange(source.size)
    if (source < 0).all():
        return every
    first = end = np.where(source < 0, every, source)
    for _ in range(source.size.bit_length()):
        before, end = end, end[end]
        if np.array_equal(before, end):
            break
    return np.where(first[end] == end, end, every)


def _elements(analysis: Analysis, leaves: Sequence[StateLeaf]) -> Iterator[Elements]:
    """Yield States with the numbers of their elements, one State after the other."""
    start, taken = 0, {leaf.out_var for leaf in leaves}
    for leaf in leaves:
        numbers = np.asarray(start + numbered(leaf.in_var))
        state = Elements(leaf, numbers, {leaf.out_var: numbers})
        parts = state.component.reshape(leaf.shape)
        new = dict(state.new)
        for part in range(1 + int(parts.max(initial=0))):
            ids = np.where(parts == part, numbers, BOTTOM)
            sources = moved_from(analysis, leaf.out_var, ids)
            new.update((var, own) for var, own in sources if var not in taken)
        taken |= new.keys()
        start += numbers.size
        yield dataclasses.replace(state, new=new)


def moved_from(analysis: Analysis, var: Var, ids: Ids) -> Iterator[tuple[Var, Ids]]:
    """Yield the variables that consist of some elements of a variable, with their ids.

    A model that writes ``h.reshape(...)`` to a State and continues with ``h`` reads the new State
    at ``h``. The search goes back through data movement.
    """
    program, count = analysis.program, int(np.count_nonzero(ids != BOTTOM))
    while (equation := program.maker(var)) is not None:
        operands = [equation.invars[operand] for operand in moved_operands(equation)]
        sources = sources_of(analysis.constants, equation) if operands else None
        if sources is None or len(sources) > 1:
            return
        ends = np.cumsum([atom.aval.size for atom in operands])
        received = np.full(ends[-1] + 1, BOTTOM)  # the last one is for elements from nowhere
        received[sources[0]] = ids
        parts = zip(operands, np.split(received, ends), strict=False)
        wholes = [(atom, own) for atom, own in parts if np.count_nonzero(own >= 0) == count]
        if not wholes or wholes[0][0] not in program.producer:
            return
        ((var, ids),) = wholes
        ids = ids.reshape(var.aval.shape)
        if ids.size == count:
            yield var, ids


def _connected(count: int, first: Ids, second: Ids) -> np.ndarray:
    """Return the lowest number that each number is connected to by some pairs."""
    lowest = np.arange(count)
    while True:
        one, other = lowest[first], lowest[second]
        if np.array_equal(one, other):
            return lowest
        np.minimum.at(lowest, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(lowest, lowest[lowest]):
            lowest = lowest[lowest]


def _orders_of(operation: Equation) -> "_Orders":
    spec = ETP_PRIMITIVE_SPECS.get(operation.primitive)
    return _Orders(of_weights=spec is not None and spec.x_invar_index is None)


MOST_SUMMED = 16
"""Most elements of a State that a sum joins in one unit: their traces cost as many times as much,
and each of them depends on each. A register or a ring may have any number."""


class _Meeting:
    """Labels whose units become one where they meet, as far as the units allow."""

    rank = 0

    def __init__(self, units: Units) -> None:
        self._units = units

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return Labels().empty(shape)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        if first is second:
            return first
        first, second = self._units.meet(first, second)
        # A label counts more than several, and these count more than none.
        one = np.maximum(first, second)
        one = np.where(one < 0, np.minimum(first, second), one)
        differ = (first >= 0) & (second >= 0) & (first != second)
        if differ.any():
            in_order = np.where(self._units.in_order(second), second, TOP)
            in_order = np.where(self._units.in_order(first), first, in_order)
            one = np.where(differ, in_order, one)
        return np.asarray(one, np.int32)

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        flow = self._units.now(flow)
        highest = np.max(flow, axis=tuple(axes), initial=BOTTOM, keepdims=True)
        flow, _ = self._units.meet(flow, np.broadcast_to(highest, flow.shape), MOST_SUMMED)
        return Labels().over(flow, axes)

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        last = self.empty([base.size + 1])
        last[targets] = flow
        flow, _ = self._units.meet(flow, last[targets])
        put = Labels().put(self.empty(base.shape), targets, flow)
        return np.asarray(self.join(base, put))


NOTHING = np.iinfo(np.int32).min


@dataclasses.dataclass(frozen=True)
class _Orders:
    """Sets of numbers, each as its largest number in several orders.

    A set contains another if its number is at least as large in each order. The reverse holds for
    single numbers, and almost surely for others.

    ``of_weights`` tells whether the numbers are weights, which samples and units share.
    """

    of_weights: bool = False
    rank = 1

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sets of single numbers."""
        numbers = numbers.astype(np.int64)
        factors = (1, 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
        keys = [(numbers * factor) % 2**31 for factor in factors]
        return np.stack([*keys, *(-key for key in keys)], -1).astype(np.int32)

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.full((*shape, 8), NOTHING, np.int32)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(first, second))

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        return np.asarray(np.max(flow, axis=tuple(axes), initial=NOTHING))

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        rows = np.concatenate([base.reshape(-1, 8), self.empty([1])])
        np.maximum.at(rows, targets.ravel(), flow.reshape(-1, 8))
        return rows[:-1].reshape(base.shape)

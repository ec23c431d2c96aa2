r"""Dataflow through a jaxpr: the sources of each element, as an entry of a lattice.

A *flow* is a NumPy array with the shape of a variable, followed by the axes of the lattice. Its
entries have a partial order with a least upper bound :math:`a \vee b` (`join`) and a least entry
(`empty`), for which :math:`a \vee a = a`. ``None`` means an array of least entries. An element that
depends on several others has the least upper bound of their entries. A flow that is too large is
therefore safe, and one that is too small is wrong.

The analysis visits equations in order. It follows calls into their bodies, joins the results of
branches, and iterates scans to a fixpoint.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from .._jax import TRANSPARENT_CALLS, AnyJaxpr, Atom, Equation, Var, call_body, is_var
from .primitives import (
    ELEMENTWISE,
    MOVES,
    NOWHERE,
    READS,
    UPDATES,
    WINDOWS,
    WRITES,
    Constants,
    chosen_axes,
    columns_of,
    elements_of_slices,
    elements_of_windows,
    letters_of,
    moved_operands,
    slices_of,
    sources_of,
    update_of,
)
from .program import STOPS_GRADIENT, carries_derivative, split_scan

# The sources of the elements of an array; ``None``: no source is followed.
Flow: TypeAlias = np.ndarray | None

# The label of an element without a labelled source.
BOTTOM = -1

# The label of an element with sources of several labels.
TOP = -2


class Lattice(Protocol):
    """The operations of a lattice.

    Attributes
    ----------
    rank
        Number of axes that a flow has after the axes of the variable.
    """

    @property
    def rank(self) -> int: ...

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        """Return a flow of least entries, for a variable of this shape."""
        ...

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the least upper bound of two flows, elementwise."""
        ...

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        """Return the least upper bound along some axes, which are removed."""
        ...

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        """Join each element of a flow into the element of ``base`` at ``targets``.

        Elements are counted in order; -1 means no element.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Labels:
    """One label for each element: a number, `BOTTOM`, or `TOP` for several labels."""

    rank = 0

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.full(shape, BOTTOM, np.int32)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return merge(first, second)

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        axes = tuple(axes)
        if not axes:
            return flow
        # As unsigned numbers, `BOTTOM` is the largest.
        unsigned = flow.view(np.uint32).min(axes, initial=2**32 - 1, keepdims=True)
        low = unsigned.view(np.int32)
        is_one = ((flow == low) | (flow == BOTTOM)).all(axes)
        return np.where(is_one, low.squeeze(axes), np.int32(TOP))

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        used = (targets >= 0) & (flow != BOTTOM)
        places, values = (targets, flow) if used.all() else (targets[used], flow[used])
        added = self.empty([base.size])
        added[places] = values
        differ = added[places] != values
        if differ.any():
            added[places[differ]] = TOP
        return merge(base, added.reshape(base.shape))


def merge(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the labels of elements that come from two sources."""
    if first is second:
        return first
    differ = first != second
    if not differ.any():
        return first
    merged = np.where(first == BOTTOM, second, first)
    merged[differ & (first != BOTTOM) & (second != BOTTOM)] = TOP
    return merged


@dataclasses.dataclass(frozen=True)
class Sets:
    """A subset of ``count`` numbers for each element, as booleans along a last axis."""

    count: int
    rank = 1

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.zeros((*shape, self.count), bool)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.asarray(first | second)

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        return np.asarray(flow.any(tuple(axes)))

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        rows = np.concatenate([base.reshape(-1, self.count), self.empty([1])])
        np.logical_or.at(rows, targets.ravel(), flow.reshape(-1, self.count))
        return rows[:-1].reshape(base.shape)


def filled(lattice: Lattice, flow: Flow, shape: Sequence[int]) -> np.ndarray:
    """Return the flow of a variable as an array, also if it is ``None``."""
    return lattice.empty(shape) if flow is None else flow


def spread(lattice: Lattice, flow: Any, shape: Sequence[int]) -> Any:
    """Broadcast a flow to the shape of another variable."""
    if flow is None:
        return None
    every = (*shape, *flow.shape[flow.ndim - lattice.rank :])
    return flow if flow.shape == every else np.broadcast_to(flow, every)


def joined(lattice: Lattice, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of several flows of one shape."""
    present = [flow for flow in flows if flow is not None]
    return functools.reduce(lattice.join, present) if present else None


def along(lattice: Lattice, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the least upper bound along some axes, at all elements of these axes."""
    if not axes:
        return flow
    one = np.expand_dims(lattice.over(flow, axes), tuple(axes))
    return spread(lattice, one, flow.shape[: flow.ndim - lattice.rank])


def everything(lattice: Lattice, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of all elements of some flows, as one entry."""
    every = [lattice.over(f, range(f.ndim - lattice.rank)) for f in flows if f is not None]
    return joined(lattice, every)


def by_letters(
    lattice: Lattice, flow: Flow, before: Sequence[str], after: Sequence[str], shape: Sequence[int]
) -> Flow:
    """Join along the letters that are only before, and broadcast along those only after."""
    if flow is None:
        return None
    kept = [before.index(a) for a in after if a in before]
    order = (*kept, *(i for i, a in enumerate(before) if a not in after))
    flow = flow.transpose(*order, *range(len(order), flow.ndim))
    flow = lattice.over(flow, range(len(kept), len(order)))
    missing = tuple(i for i, a in enumerate(after) if a not in before)
    return spread(lattice, np.expand_dims(flow, missing), shape)


def _taken(lattice: Lattice, flows: Sequence[np.ndarray], sources: np.ndarray) -> np.ndarray:
    rows = [f.reshape(-1, *f.shape[f.ndim - lattice.rank :]) for f in flows]
    return np.asarray(np.concatenate([*rows, lattice.empty([1])])[sources])


# --- programs

# ``(equation, flows of its operands) -> flows of its results``, or ``None`` for no answer.
Special: TypeAlias = Callable[[Equation, Sequence[Any]], Sequence[Any] | None]

# In a longer scan, all slices of a sequence count as one.
LONGEST_WALK = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Dataflow:
    """An analysis of a program, or of the body of an equation.

    Attributes
    ----------
    constants, lattice
        The program with its constants, and the facts about an element.
    derivatives
        Whether only derivatives are followed, not values. A function with a custom derivative then
        couples everything, unless ``special`` answers: its body is not its derivative.
    special
        A rule that is tried first for every equation, also in bodies.
    """

    constants: Constants
    lattice: Any
    derivatives: bool = False
    special: Special | None = None

    def flows_from(self, starts: Mapping[Var, Flow]) -> dict[Var, np.ndarray]:
        """Return the flows of all variables that depend on some others; these do not change."""
        known = {var: flow for var, flow in starts.items() if flow is not None}
        for index in self.constants.program.forward(known):
            equation = self.constants.program.equations[index]
            operands = [known.get(atom) if is_var(atom) else None for atom in equation.invars]
            results = zip(equation.outvars, self.flows_of_results(equation, operands), strict=True)
            for var, flow in results:
                if flow is not None and (not self.derivatives or carries_derivative(var)):
                    known.setdefault(var, flow)
        return known

    def flows_of_outputs(self, inputs: Sequence[Flow]) -> list[Flow]:
        """Return the flows of the outputs, given the flows of the inputs."""
        program = self.constants.program
        known = self.flows_from(dict(zip(program.in_vars, inputs, strict=True)))
        return [known.get(atom) if is_var(atom) else None for atom in program.out_atoms]

    def flows_of_results(self, equation: Equation, operands: Sequence[Flow]) -> Sequence[Flow]:
        """Return the flows of an equation's results, given the flows of its operands."""
        name = equation.primitive.name
        flows = None if self.special is None else self.special(equation, operands)
        if flows is not None:
            return flows
        if self.derivatives and name in STOPS_GRADIENT:
            return [None] * len(equation.outvars)
        if name == "optimization_barrier":  # operand by operand
            return list(operands)
        body = call_body(equation)
        if body is not None and (name in TRANSPARENT_CALLS or not self.derivatives):
            return self._inside(body, equation.invars).flows_of_outputs(operands)
        if name == "cond":
            return self._through_branches(equation, *operands)
        if name == "scan":
            return self._through_scan(equation, operands)
        return self._through_primitive(equation, operands)

    def _inside(self, body: AnyJaxpr, inputs: Sequence[Atom]) -> "Dataflow":
        return dataclasses.replace(self, constants=self.constants.body(body, inputs))

    def _through_branches(self, equation: Equation, choice: Flow, *operands: Flow) -> list[Flow]:
        """Join the results of the branches, and the flow of the index that selects one."""
        bodies = (self._inside(body, equation.invars[1:]) for body in equation.params["branches"])
        every = [body.flows_of_outputs(operands) for body in bodies]
        chosen = everything(self.lattice, [choice])
        every.append([spread(self.lattice, chosen, var.aval.shape) for var in equation.outvars])
        return [joined(self.lattice, flows) for flows in zip(*every, strict=True)]

    def _through_scan(self, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
        """Follow a scan to a fixpoint of its carry, which then holds at each of its steps."""
        lattice, (fixed, start, sequences) = self.lattice, split_scan(equation, operands)
        count, length = len(start), equation.params["length"]
        body = self._inside(equation.params["jaxpr"], split_scan(equation, equation.invars)[0])

        def run(carried: Sequence[Flow], slices: Sequence[Flow]) -> list[Flow]:
            return body.flows_of_outputs([*fixed, *carried, *slices])

        steps = [[s if s is None else lattice.over(s, [0]) for s in sequences]]
        carried: Sequence[Any] = start
        while True:  # the least c = start ∨ run(c)
            before, pairs = carried, zip(carried, run(carried, steps[0]), strict=False)
            carried = [joined(lattice, pair) for pair in pairs]
            if all(map(np.array_equal, before, carried)):
                break
        differ = any(s is not None and (s != s[:1]).any() for s in sequences)
        if differ and length <= LONGEST_WALK:
            steps = [[s if s is None else s[i] for s in sequences] for i in range(length)]
        stacked = []
        every = (run(carried, step)[count:] for step in steps)
        for var, *flows in zip(equation.outvars[count:], *every, strict=True):
            full = [filled(lattice, flow, var.aval.shape[1:]) for flow in flows]
            is_none = all(flow is None for flow in flows)
            stacked.append(None if is_none else spread(lattice, np.stack(full), var.aval.shape))
        return [*carried, *stacked]

    # Along the axes of an index that data choose (the write index of a ring buffer), an element may
    # be anywhere. A write at a chosen index is a selection: each element is kept or replaced.

    def _through_primitive(self, equation: Equation, flows: Sequence[Flow]) -> list[Flow]:
        if not equation.outvars:
            return []
        lattice, name = self.lattice, equation.primitive.name
        result = equation.outvars[0].aval.shape
        if name in ELEMENTWISE or name in STOPS_GRADIENT:
            return [joined(lattice, [spread(lattice, flow, result) for flow in flows])]
        if name in READS:
            return [self._read(equation, *flows)]
        if name in WRITES or name in UPDATES:
            return [self._write(equation, flows)]
        if name in MOVES or name in WINDOWS:
            pairs = zip(flows, equation.invars, strict=True)
            full = [filled(lattice, flow, atom.aval.shape) for flow, atom in pairs]
            if name in WINDOWS:
                return [lattice.over(_taken(lattice, full[:1], elements_of_windows(equation)), [0])]
            sources = sources_of(self.constants, equation)
            return [_taken(lattice, full, source) for source in sources or ()]
        if letters := letters_of(equation):
            *before, after = letters
            each = zip(flows, before, strict=True)
            return [joined(lattice, [by_letters(lattice, f, a, after, result) for f, a in each])]
        one = None if name == "zeros_mapped_like" else everything(lattice, flows)
        return [spread(lattice, one, var.aval.shape) for var in equation.outvars]

    def _read(self, equation: Equation, flow: Flow, *places: Flow) -> Flow:
        """Follow a gather or a slice; each slice depends on its indices."""
        lattice = self.lattice
        if flow is not None:
            columns = columns_of(equation, self.constants)
            anywhere = along(lattice, flow, chosen_axes(equation, columns))
            flow = _taken(lattice, [anywhere], elements_of_slices(equation, columns))
        of_slices = everything(lattice, places)
        if equation.primitive.name == "gather" and places[0] is not None:
            of_slices = lattice.over(places[0], [len(equation.invars[1].aval.shape) - 1])
            of_slices = np.expand_dims(of_slices, tuple(slices_of(equation).window))
        return joined(lattice, [flow, spread(lattice, of_slices, equation.outvars[0].aval.shape)])

    def _write(self, equation: Equation, flows: Sequence[Flow]) -> Flow:
        """Follow updates to their positions; every element depends on all indices."""
        lattice, shape = self.lattice, equation.outvars[0].aval.shape
        flow, update = filled(lattice, flows[0], shape), flows[update_of(equation)]
        columns = columns_of(equation, self.constants)
        targets, axes = elements_of_slices(equation, columns), chosen_axes(equation, columns)
        if moved_operands(equation) and not axes:
            kept = np.arange(math.prod(shape))  # other elements than those that are overwritten
            kept[targets[targets != NOWHERE]] = NOWHERE
            flow = _taken(lattice, [flow], kept.reshape(shape))
        if update is not None:
            put = lattice.put(lattice.empty(shape), targets, update)
            flow = lattice.join(flow, along(lattice, put, axes))
        places = everything(lattice, [flows[i] for i in slices_of(equation).indices])
        return joined(lattice, [flow, spread(lattice, places, shape)])

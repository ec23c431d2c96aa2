"""Dataflow of a step for its picture: the direct origins of each value.

One pass over the equations, in their order. Each variable has a set of `Origin` s. A product with a
weight, and the new value of a state, are origins of all variables that follow.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._etrace_op.registry import is_marked
from .._graph import FILTERS, ETraceGraph, StateLeaf
from .._jax import Atom, Equation, Var, is_var, source_line
from .._jaxpr.dataflow import PRODUCTS
from .._typing import path_name


class Origin(NamedTuple):
    """Direct origin of a variable.

    Attributes
    ----------
    kind
        ``'argument'``, ``'old'`` (a state before the step), ``'new'``, ``'weight'`` (a `Use`) or
        ``'parameter'``.
    name
        Name of the argument, the state, the use or the parameter.
    """

    kind: str
    name: str


@dataclasses.dataclass(frozen=True)
class Use:
    """One operation that combines weights with data.

    Attributes
    ----------
    key
        Its name; the key of the relation if it is one.
    parameters
        Names of the parameters that the weights depend on.
    origins
        Origins of the data.
    source
        The line of the user's code.
    """

    key: str
    parameters: tuple[str, ...]
    origins: frozenset[Origin]
    source: str


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """Origins of all states and outputs of a step.

    Attributes
    ----------
    uses
        Uses of weights, in the order of the step.
    states
        Origins of the new value of each state, by its name.
    outputs
        Origins of the step's output.
    """

    uses: tuple[Use, ...]
    states: Mapping[str, frozenset[Origin]]
    outputs: frozenset[Origin]


def dataflow_of(graph: ETraceGraph) -> Dataflow:
    """Return the dataflow of a step."""
    return _Pass(graph).result()


class _Pass:
    def __init__(self, graph: ETraceGraph) -> None:
        traced = graph.traced
        self._graph, self._program = graph, traced.program
        self._keys = {r.equation: r.key for r in graph.hidden_param_op_relations}
        if graph.flat_state is not None:
            found = ((use.equation, use.key) for use in graph.flat_state.uses)
            self._keys |= {index: key for index, key in found if index is not None}
        self._news = new_vars(graph)
        self._origins: dict[Var, frozenset[Origin]] = {}
        for leaf in traced.leaves:
            if leaf.kind == "parameter":
                self._origins[leaf.in_var] = frozenset({Origin("parameter", path_name(leaf.path))})
            elif leaf.kind != "random" and leaf.out_var is not None:  # else it is a constant
                self._origins[leaf.in_var] = frozenset({Origin("old", leaf.name)})
        for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
            self._origins[var] = frozenset({Origin("argument", name)})
        self._uses: dict[str, Use] = {}
        self._states: dict[str, frozenset[Origin]] = {}

    def result(self) -> Dataflow:
        """Return the dataflow, after one pass over all equations."""
        for var in [v for v in self._news if v not in self._program.producer]:
            self._end_in(var, passes=False)
        for index, equation in enumerate(self._program.equations):
            found = self._behind(equation.invars)
            used = self._use(index, equation)
            if used is not None:
                found = frozenset({Origin("weight", used.key)})
            for var in equation.outvars:
                self._origins[var] = found
                if var in self._news:
                    self._end_in(var, passes=True)
        outputs = self._behind(self._graph.traced.output_atoms)
        return Dataflow(tuple(self._uses.values()), self._states, outputs)

    def _end_in(self, var: Var, passes: bool) -> None:
        """Record the origins of new states, which become the origins of all later variables."""
        names = self._news[var]
        for name in names:
            self._states[name] = self._behind([var])
        if passes:
            self._origins[var] = frozenset(Origin("new", name) for name in names)

    def _behind(self, atoms: Iterable[Atom]) -> frozenset[Origin]:
        known = [self._origins.get(atom, frozenset()) for atom in atoms if is_var(atom)]
        return frozenset[Origin]().union(*known)

    def _use(self, index: int, equation: Equation) -> Use | None:
        """Return the use of weights by an equation, or None."""
        if not (is_marked(equation) or equation.primitive.name in PRODUCTS):
            return None
        weights, data = self._split(equation)
        if not weights or not (data or index in self._keys):
            return None
        key = self._keys.get(index, f"{equation.primitive.name} {index}")
        names = tuple(sorted(origin.name for origin in weights))
        self._uses[key] = use = Use(key, names, frozenset(data), source_line(equation))
        return use

    def _split(self, equation: Equation) -> tuple[set[Origin], set[Origin]]:
        """Return the parameters that are separate operands, and all other origins."""
        weights, data = set[Origin](), set[Origin]()
        for atom in equation.invars:
            found = self._behind([atom])
            is_weight = all(origin.kind == "parameter" for origin in found)
            (weights if is_weight else data).update(found)
        return weights, data


def new_vars(graph: ETraceGraph) -> dict[Var, list[str]]:
    """Return the names of the states that each variable is the new value of."""
    found: dict[Var, list[str]] = {}
    grouped = set[str]()
    for group in graph.hidden_groups:
        for leaf, var in zip(group.states, group.new_vars, strict=True):
            found.setdefault(var, []).append(leaf.name)
            grouped.add(leaf.name)
    for leaf in ungrouped(graph, grouped):
        if is_var(leaf.out_var):
            found.setdefault(leaf.out_var, []).append(leaf.name)
    return found


def ungrouped(graph: ETraceGraph, grouped: Iterable[str]) -> Sequence[StateLeaf]:
    """Return the states that a step writes and that are in no group, except filters."""
    own = frozenset(grouped)
    return [
        leaf
        for leaf in graph.traced.leaves
        if leaf.kind in ("hidden", "other")
        and leaf.out_var is not None
        and leaf.path[0] != FILTERS
        and leaf.name not in own
    ]

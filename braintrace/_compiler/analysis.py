"""Cached facts about one program, shared by the passes of the compiler.

There is one `Analysis` of a step, and another of every rewriting of it.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from .._etrace_op.registry import MarkedRole, is_marked, role
from .._jax import OWN_DERIVATIVE, Atom, Equation, Var
from .._jaxpr import (
    BOTTOM,
    CONSTANT,
    PRODUCTS,
    TOP,
    Constants,
    Flow,
    Labels,
    Program,
    Question,
    carries_derivative,
    flows_from,
    joined,
)
from .back_through import SOURCES, Ids, numbered


class Analysis:
    """Cached facts about one program.

    Parameters
    ----------
    program
        The program.

    Attributes
    ----------
    program
        The program, with the equations that write and read each variable.
    constants
        Values that depend on no input.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = Constants(program)
        self._origins: dict[tuple[object, ...], Origin] = {}
        self._elements: dict[Var, tuple[int, Mapping[Var, Ids]]] = {}

    # --- ETP operations

    @functools.cached_property
    def roles(self) -> Mapping[int, MarkedRole]:
        """The role of each ETP operation in a walk, by the index of its equation."""
        pairs = ((index, role(equation)) for index, equation in enumerate(self.program.equations))
        return MappingProxyType({index: what for index, what in pairs if what is not None})

    @functools.cached_property
    def opaque(self) -> frozenset[int]:
        """Equations of the ETP operations that end a walk."""
        return frozenset(index for index, what in self.roles.items() if what == "opaque")

    # --- ancestors and descendants, by value or by gradient

    @functools.cached_property
    def _places(self) -> Mapping[Var, int]:
        return {var: place for place, var in enumerate(self.program.in_vars)}

    def inputs_among(self, variables: Iterable[Var]) -> list[Var]:
        """Return the inputs of the program among some variables, in order."""
        return sorted((v for v in variables if v in self._places), key=self._places.__getitem__)

    def value_ancestors(
        self, targets: Iterable[Atom], stops: frozenset[Var] = frozenset()
    ) -> set[Var]:
        """Return the ancestors of some targets, without the ancestors of ``stops``.

        Values read through ``stop_gradient`` count as constants.
        """
        return self.program.depends_on(targets, stops, CONSTANT)

    def gradient_ancestors(
        self, targets: Iterable[Atom], stops: frozenset[Var] = frozenset()
    ) -> set[Var]:
        """Return the ancestors that a gradient of some targets reaches.

        Variables in ``stops`` are included, their ancestors are not.
        """
        return self.program.depends_on(targets, stops, CONSTANT, carries_derivative)

    def gradient_descendants(self, starts: Iterable[Var]) -> set[Var]:
        """Return the descendants whose gradient reaches ``starts``."""
        return self.program.dependents_of(starts, None, CONSTANT, carries_derivative)

    # --- the source of each element

    def origin(self, starts: Mapping[Var, Ids], last: int) -> "Origin":
        """Return the old element that each element is, for equations up to ``last``.

        ``starts`` are the old states, with the numbers of their elements.
        """
        key = (last, *((var, id(ids)) for var, ids in starts.items()))
        if key not in self._origins:
            self._origins[key] = Origin(self, starts, last)
        return self._origins[key]

    def elements_of(self, start: Var, last: int) -> Mapping[Var, Ids]:
        """Return the one element of ``start`` that each element of a variable depends on.

        A variable is left out if one of its elements depends on several. The result covers the
        variables that the equations up to ``last`` write, and may cover more.
        """
        known, elements = self._elements.get(start, (-2, {}))
        if known < last:
            flows = flows_from(SOURCES, self.constants, {start: numbered(start)}, last).items()
            elements = {v: f for v, f in flows if f is not None and not np.any(f == TOP)}
            self._elements[start] = last, elements
        return elements


class Origin:
    """The element of an old state that each element of a variable is.

    Parameters
    ----------
    analysis
        Analysis of the program.
    starts
        The old states, with the numbers of their elements.
    last
        Index of the last equation to follow.
    """

    def __init__(self, analysis: Analysis, starts: Mapping[Var, Ids], last: int) -> None:
        self._constants, self._starts, self._last = analysis.constants, starts, last

    def of(self, var: Var) -> Ids | None:
        """Return the numbers of a variable's elements, `BOTTOM` where they are unknown.

        The result is ``None`` if no number is known.
        """
        flow = self._flows.get(var)
        if flow is None or flow.max(initial=BOTTOM) == BOTTOM:
            return None
        return np.where(flow == TOP, BOTTOM, flow)

    def reaches(self, var: Var) -> bool:
        """Test whether a variable depends on old states."""
        return var in self._flows

    @functools.cached_property
    def _flows(self) -> Mapping[Var, Flow]:
        question = Question(Labels(), derivatives=True, special=through_units)
        return flows_from(question, self._constants, self._starts, self._last)


def through_units(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
    """Follow a custom derivative as if it were elementwise; products end the flow.

    An element of a product is not an element of its operands. Results of a custom derivative take
    the flow of the operands of their shape.
    """
    if equation.primitive.name in PRODUCTS or is_marked(equation):
        return [None] * len(equation.outvars)
    if equation.primitive.name not in OWN_DERIVATIVE:
        return None
    shapes = [var.aval.shape for var in equation.outvars]
    alike = [[f for f in operands if f is not None and f.shape == shape] for shape in shapes]
    return [joined(Labels(), flows) for flows in alike]

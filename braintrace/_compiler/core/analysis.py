"""What the passes ask of one program, each fact found once.

There is one `Analysis` of a step, and another of every rewriting of it.
"""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from ..._graph.marked import MarkedRole, role
from ..._jax import Atom, Equation, Var
from ..._jaxpr import Program, carries_derivative
from ..._jaxpr.dataflow import CONSTANT, MIXED, Constants, flows_from
from .back_through import SOURCES, Ids, numbered
from .derivative import Derivative
from .origin_position import (
    least_moved_positions,
    origin_positions,
)


class Analysis:
    """What is known of one program.

    Parameters
    ----------
    program
        The program.

    Attributes
    ----------
    program
        The program, with the equations that make and read each variable.
    constants
        Values that depend on no input.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = Constants(program)
        self._derivatives: dict[int, Derivative] = {}
        self._origins: dict[tuple[object, ...], Origin] = {}
        self._elements: dict[Var, tuple[int, Mapping[Var, Ids]]] = {}

    # --- marked operations

    @functools.cached_property
    def roles(self) -> Mapping[int, MarkedRole]:
        """What the marked operations are to a walk, by the index of their equation."""
        found = ((index, role(equation)) for index, equation in enumerate(self.program.equations))
        return MappingProxyType({index: what for index, what in found if what is not None})

    @functools.cached_property
    def opaque(self) -> frozenset[int]:
        """Equations of the marked operations that end a walk."""
        return frozenset(index for index, what in self.roles.items() if what == "opaque")

    # --- what a value is computed from, and where a gradient goes

    @functools.cached_property
    def _places(self) -> Mapping[Var, int]:
        return {var: place for place, var in enumerate(self.program.in_vars)}

    def inputs_among(self, variables: Iterable[Var]) -> list[Var]:
        """Return the inputs of the program among some variables, in order."""
        return sorted((v for v in variables if v in self._places), key=self._places.__getitem__)

    def values_behind(
        self, targets: Iterable[Atom], stops: frozenset[Var] = frozenset()
    ) -> set[Var]:
        """Return the ancestors of some targets, without the ancestors of ``stops``.

        Values read through ``stop_gradient`` count as constants.
        """
        return self.program.depends_on(targets, stops, CONSTANT)

    def gradients_behind(
        self, targets: Iterable[Atom], stops: frozenset[Var] = frozenset()
    ) -> set[Var]:
        """Return what a gradient goes back to from some targets, not looking behind ``stops``."""
        return self.program.depends_on(targets, stops, CONSTANT, carries_derivative)

    def gradients_ahead(self, starts: Iterable[Var]) -> set[Var]:
        """Return the variables that a gradient connects to ``starts``."""
        return self.program.dependents_of(starts, None, CONSTANT, carries_derivative)

    def derivative(self, equation: Equation) -> Derivative:
        """Return the derivative of an equation."""
        return self._derivatives.setdefault(id(equation), Derivative(equation))

    # --- where elements come from

    def origin(self, starts: Mapping[Var, Ids], last: int) -> "Origin":
        """Return where elements come from, counted from old states up to one equation."""
        key = (last, *((var, id(ids)) for var, ids in starts.items()))
        if key not in self._origins:
            self._origins[key] = Origin(self, starts, last)
        return self._origins[key]

    def elements_of(self, start: Var, last: int) -> Mapping[Var, Ids]:
        """Return the element of ``start`` that each element of other variables is made from.

        A variable is left out if one of its elements is made from several. It is known of what the
        equations up to ``last`` make, and may be known of more.
        """
        known, found = self._elements.get(start, (-2, {}))
        if known < last:
            flows = flows_from(SOURCES, self.constants, {start: numbered(start)}, last).items()
            found = {v: f for v, f in flows if f is not None and not np.any(f == MIXED)}
            self._elements[start] = last, found
        return found


class Origin:
    """Where the elements of variables come from, counted from some old states.

    Parameters
    ----------
    analysis
        Of the program.
    starts
        Those states, with the numbers of their elements.
    last
        Index of the last equation that is looked at.
    """

    def __init__(self, analysis: Analysis, starts: Mapping[Var, Ids], last: int) -> None:
        constants = analysis.constants
        self._question = (analysis.program, starts, constants, last)

    @functools.cached_property
    def certain(self) -> Mapping[Var, Ids]:
        """Where they come from one place each."""
        return origin_positions(*self._question)

    @functools.cached_property
    def likely(self) -> Mapping[Var, Ids]:
        """See `least_moved_positions`."""
        return least_moved_positions(*self._question)

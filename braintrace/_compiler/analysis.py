"""Cached facts about one program, shared by the passes of the compiler.

There is one `Analysis` of a step, and another of every rewriting of it.
"""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from .._etrace_op.registry import MarkedRole, role
from .._jax import Atom, Var
from .._jaxpr import (
    CONSTANT,
    TOP,
    Constants,
    Program,
    carries_derivative,
    flows_from,
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

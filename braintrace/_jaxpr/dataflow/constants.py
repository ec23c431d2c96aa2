"""Constant folding: values that depend on no input of a program, computed lazily."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..._jax import AnyJaxpr, Atom, Equation, Var, is_var
from ..evaluate import evaluate
from ..program import Program, program_of

Sources: TypeAlias = list[np.ndarray] | None
"""The number of the operand element that each result element is, counted through all operands.

``None``: the equation moves elements to places that depend on data."""


class Constants:
    """Values that depend on no input of a program, each computed once.

    Parameters
    ----------
    program
        The program.
    outer, inputs
        For the body of an equation: the constants of the surrounding program, and its atoms that
        are inputs of the body.
    """

    def __init__(
        self,
        program: Program,
        outer: "Constants | None" = None,
        inputs: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.program = program
        self._outer, self._inputs = outer, inputs or {}
        self._values: dict[Var, np.ndarray] = {}
        self._sources: dict[int, Sources] = {}
        self._bodies: dict[tuple[int, ...], Constants] = {}

    @functools.cached_property
    def _varying(self) -> set[Var]:
        inputs = (var for var in self.program.in_vars if var not in self._inputs)
        return self.program.dependents_of(inputs)

    def has(self, atom: Atom) -> bool:
        """Test whether an atom depends on no input."""
        return not is_var(atom) or atom not in self._varying

    def value(self, atom: Atom) -> np.ndarray | None:
        """Return the value of ``atom``, or ``None`` if it depends on an input."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if not self.has(atom):
            return None
        if atom not in self._values:
            with jax.ensure_compile_time_eval():
                values = evaluate(self.program, [atom], self._known_inputs(atom))
                self._values[atom] = np.asarray(values[0])
        return self._values[atom]

    def _known_inputs(self, atom: Atom) -> dict[Var, Any]:
        if self._outer is None or not self._inputs:
            return {}
        needed = self.program.depends_on([atom])
        return {v: self._outer.value(a) for v, a in self._inputs.items() if v in needed}

    def sources(
        self,
        equation: Equation,
        find: Callable[[Equation, Callable[[Atom], np.ndarray | None]], Sources],
    ) -> Sources:
        """Return the sources of the elements that an equation moves, as ``find`` finds them.

        ``find`` gets the equation and `value`.
        """
        if id(equation) not in self._sources:
            self._sources[id(equation)] = find(equation, self.value)
        return self._sources[id(equation)]

    def body(self, jaxpr: AnyJaxpr, inputs: Sequence[Atom]) -> "Constants":
        """Return the constants of a body in the program.

        Parameters
        ----------
        jaxpr
            The body.
        inputs
            Its first inputs, as atoms of the program; the others vary from run to run.
        """
        key = (id(jaxpr), *map(id, inputs))
        if key not in self._bodies:
            program = program_of(jaxpr)
            known = zip(program.in_vars, inputs, strict=False)
            fixed = {var: atom for var, atom in known if self.has(atom)}
            self._bodies[key] = Constants(program, self, fixed)
        return self._bodies[key]

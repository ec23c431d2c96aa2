"""What a program computes from no input of its own."""

import functools

import jax
import numpy as np

from .._jax import Atom, Equation, Var, is_var
from .._jaxpr import Program, evaluate
from .._jaxpr.data_movement import source_map


class Constants:
    """Values that depend on no input of a program, each found once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._values: dict[Var, np.ndarray] = {}
        self._sources: dict[int, list[np.ndarray] | None] = {}

    @functools.cached_property
    def _varying(self) -> set[Var]:
        return self._program.dependents_of(self._program.in_vars)

    def value(self, atom: Atom) -> np.ndarray | None:
        """Return the value of ``atom``, or ``None`` where it depends on an input."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if atom in self._varying:
            return None
        if atom not in self._values:
            with jax.ensure_compile_time_eval():
                self._values[atom] = np.asarray(evaluate(self._program, [atom], {})[0])
        return self._values[atom]

    def sources(self, equation: Equation) -> list[np.ndarray] | None:
        """Return where an equation of the program moves elements from; see `source_map`."""
        if id(equation) not in self._sources:
            self._sources[id(equation)] = source_map(equation, self.value)
        return self._sources[id(equation)]

"""Constant folding: values that depend on no input of a program, computed lazily."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import AnyJaxpr, Atom, Var, is_var
from .evaluate import evaluate
from .program import Program, program_of


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
        self._outer: Any = outer
        self._inputs = inputs or {}
        self._values: dict[Var, np.ndarray] = {}
        self._bodies: dict[tuple[int, ...], Constants] = {}

    @functools.cached_property
    def _varying(self) -> set[Var]:
        known = {v for v, atom in self._inputs.items() if self._outer.has(atom)}
        return self.program.dependents_of(v for v in self.program.in_vars if v not in known)

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
            needed = self.program.depends_on([atom]) & self._inputs.keys()
            known = {var: self._outer.value(self._inputs[var]) for var in needed}
            with jax.ensure_compile_time_eval():
                self._values[atom] = np.asarray(evaluate(self.program, [atom], known)[0])
        return self._values[atom]

    def outside(self, atom: Atom) -> "tuple[Constants, Atom] | None":
        """Return the surrounding program, and its atom that is this input of a body."""
        if self._outer is None or not is_var(atom) or atom not in self._inputs:
            return None
        return self._outer, self._inputs[atom]

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
            known = dict(zip(program.in_vars, inputs, strict=False))
            self._bodies[key] = Constants(program, self, known)
        return self._bodies[key]

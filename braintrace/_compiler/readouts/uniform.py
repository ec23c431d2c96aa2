"""Arrays that hold one and the same number at every place, and that number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..._jax import Atom, Equation, Var, bind, is_var
from ..._jaxpr.data_movement import is_data_movement
from ..._jaxpr.dataflow import ELEMENTWISE
from ..core.analysis import Analysis

Known: TypeAlias = Mapping[Var, Any]
"""Values of variables."""


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A number that a step computes.

    Attributes
    ----------
    key
        Numbers with the same key are equal.
    variables
        Variables that it is computed from.
    compute
        Computes it from their values.
    constant
        The number, if no variable is behind it.
    """

    key: Hashable
    variables: frozenset[Var]
    compute: Callable[[Known], Any]
    constant: float | None = None


def constant(value: float) -> Number:
    """Return a number that is known."""
    return Number(("number", value), frozenset(), lambda known: value, value)


def combined(name: str, function: Callable[..., Any], *numbers: Number) -> Number:
    """Return a function of numbers, which is known by its name."""
    values = [number.constant for number in numbers]
    if all(value is not None for value in values):
        return constant(function(*values))
    return Number(
        (name, *(number.key for number in numbers)),
        frozenset().union(*(number.variables for number in numbers)),
        lambda known: function(*(number.compute(known) for number in numbers)),
    )


class Uniform:
    """Finds the number that an array of a program holds everywhere.

    Parameters
    ----------
    analysis
        Of the program.
    names
        For variables that are equal to others: the first of them.
    """

    def __init__(self, analysis: Analysis, names: Mapping[Var, Var]) -> None:
        self._analysis, self._names = analysis, names
        self._found: dict[Var, Number | None] = {}

    def number(self, atom: Atom) -> Number | None:
        """Return the number; ``None`` where places may differ."""
        if not is_var(atom):
            return _constant(np.asarray(atom.val))
        if atom not in self._found:
            self._found[atom] = self._number(atom)
        return self._found[atom]

    def _number(self, var: Var) -> Number | None:
        value = self._analysis.constants.value(var)
        if value is not None:
            return _constant(value)
        index = self._analysis.program.producer.get(var)
        if var.aval.size == 1:
            return self._named(var, frozenset([var]), lambda known: jnp.reshape(known[var], ()))
        if index is None:
            return None
        equation = self._analysis.program.equations[index]
        name = equation.primitive.name
        is_copied = is_data_movement(equation) and len(equation.invars) == 1
        if not is_copied and (name not in ELEMENTWISE or len(equation.outvars) != 1):
            return None
        numbers = [self.number(atom) for atom in equation.invars]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        if is_copied:
            return known[0]
        variables = frozenset[Var]().union(*(number.variables for number in known))
        return self._named(var, variables, functools.partial(_run, equation, known))

    def _named(
        self, var: Var, variables: frozenset[Var], compute: Callable[[Known], Any]
    ) -> Number:
        return Number(("variable", self._names.get(var, var)), variables, compute)


def _run(equation: Equation, numbers: list[Number], known: Known) -> Any:
    values = [
        jnp.asarray(number.compute(known), atom.aval.dtype)
        for number, atom in zip(numbers, equation.invars, strict=True)
    ]
    return bind(equation, values)[0]


def _constant(value: np.ndarray) -> Number | None:
    first = value.ravel()[:1]
    return constant(first[0].item()) if first.size and np.all(value == first) else None

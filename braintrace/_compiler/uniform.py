"""Uniform arrays: all entries are the same scalar."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._jax import Atom, Equation, Var, bind, is_var
from .._jaxpr import ELEMENTWISE, moved_operands
from .analysis import Analysis

Number: TypeAlias = Callable[[Mapping[Var, Any]], Any]
"""Compute a scalar from the values of variables."""


def uniform(analysis: Analysis, atom: Atom) -> Number | None:
    """Return the scalar that fills an array; ``None``: its entries may differ."""
    value = analysis.constants.value(atom)
    if value is not None:
        first = value.ravel()[:1]
        return constant(first[0]) if first.size and np.all(value == first) else None
    if not is_var(atom):
        return None
    if atom.aval.size == 1:
        return lambda known: jnp.reshape(known[atom], ())
    index = analysis.program.producer.get(atom)
    if index is None:
        return None
    equation = analysis.program.equations[index]
    return through(equation, [uniform(analysis, operand) for operand in equation.invars])


def through(equation: Equation, numbers: Sequence[Number | None]) -> Number | None:
    """Return the scalar that fills an equation's result, given those of its operands."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len(equation.outvars) != 1:
        return None
    if moved_operands(equation) and len(numbers) == 1:
        return known[0]
    is_elementwise = equation.primitive.name in ELEMENTWISE
    return functools.partial(_run, equation, known) if is_elementwise else None


def constant(value: Any) -> Number:
    """Return a known number as a function."""
    return lambda known: value


def _run(equation: Equation, numbers: Sequence[Number], known: Mapping[Var, Any]) -> Any:
    values = [
        jnp.asarray(number(known), atom.aval.dtype)
        for number, atom in zip(numbers, equation.invars, strict=True)
    ]
    return bind(equation, values)[0]

r"""Linear filters: hidden states of the form ``o' = kappa o + A(v)``.

``kappa`` is the same scalar for every unit. The coefficients of ``A`` depend on parameters,
constants and States that the step does not write, and on nothing else. A walk goes back from the
new value through all equations that are linear in this sense. It ends at the *sources*: values
``v`` of other states or of data, and parameter-derived summands such as a bias, which is ``A(1)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._etrace_op import ETP_PRIMITIVE_SPECS
from .._etrace_op.registry import is_marked
from .._graph import StateLeaf
from .._jax import OWN_DERIVATIVE, Atom, Equation, Var, bind, is_var, struct_of
from .._jaxpr import (
    ELEMENTWISE,
    BindingTime,
    Kind,
    carries_derivative,
    kinds_of,
    moved_operands,
    nonlinear_operands,
    program_of,
    vjp_of,
)
from .._typing import Path
from .analysis import Analysis, data_of, time_of_leaf
from .hidden_groups import GroupedStep

Number: TypeAlias = Callable[[Mapping[Var, Any]], Any]
"""Compute the scalar that fills an array from the values of variables."""

Added: TypeAlias = tuple[int, int]
"""A use of a summand that is the same for all data: an equation and its operand."""


@dataclasses.dataclass(frozen=True, eq=False)
class LinearFilter:
    """A hidden state that is a linear filter.

    Attributes
    ----------
    leaf, var
        The state, and the variable of its new value.
    decay
        The scalar ``kappa``.
    decay_weights
        The parameter-derived factors of ``kappa``.
    values
        The filtered variables, of data or of other states, that a gradient needs.
    added
        Summands that depend on parameters.
    path
        Variables between all of these and the new value, which is included.
    equations
        The equations that write them.
    held, parameters
        Paths of the States that coefficients and summands depend on: other States, and parameters.
    """

    leaf: StateLeaf
    var: Var
    decay: Number
    decay_weights: tuple[Var, ...]
    values: tuple[Var, ...]
    added: tuple[Added, ...]
    path: frozenset[Var]
    equations: tuple[int, ...]
    held: tuple[Path, ...]
    parameters: tuple[Path, ...]


_LINEAR = ("convert_element_type", "copy", "cumsum", "neg", "real", "reduce_sum")
_FACTORS = {
    "mul": [[0], [1]],
    "dot_general": [[0], [1]],
    "conv_general_dilated": [[0]],
    "div": [[0]],
}
"""For each product, the operands in which it is linear."""


class FilterFinder:
    """Search for linear filters among the hidden states of one step."""

    def __init__(self, step: GroupedStep) -> None:
        traced, self._analysis = step.traced, step.analysis
        self._program, self._parameters = self._analysis.program, traced.parameters
        self._new_vars = frozenset(var for _, var in step.new_states)
        # A step may write a parameter; a decay would then differ from step to step.
        written = (leaf.in_var for leaf in self._parameters if leaf.out_var is not None)
        self._varying = data_of(traced, self._analysis) | self._program.dependents_of(written)
        weights = [leaf.in_var for leaf in self._parameters]
        self._constant_states = [
            leaf for leaf in traced.leaves if time_of_leaf(leaf) is BindingTime.CONSTANT
        ]
        self._learning = self._analysis.gradient_descendants(weights)
        states = [leaf.in_var for leaf in traced.leaves if leaf.kind == "hidden"]
        self._with_gradient = self._analysis.gradient_descendants([*weights, *states])

    def find(self, leaf: StateLeaf, var: Var) -> LinearFilter | None:
        """Return a state as a linear filter, or ``None`` if it is not one.

        Parameters
        ----------
        leaf, var
            The state, and the variable of its new value.
        """
        ends: dict[Var, bool] = {}
        added: dict[Added, bool] = {}
        passed: dict[Var, bool] = {var: False}
        equations: list[int] = []
        stops = self._new_vars - {var}
        for index in self._program.backward([var], passed):
            equation = self._program.equations[index]
            if stops.issuperset(v for v in equation.outvars if v in passed):
                continue
            learns = any(passed[v] for v in equation.outvars if v in passed)
            data = self._data(equation)
            constants = self._is_linear(equation, data)
            if constants is None:
                ends.update((v, passed[v]) for v in equation.outvars if v in passed)
                continue
            equations.append(index)
            added.update(((index, i), learns) for i in constants)
            factors = (a for i, a in enumerate(equation.invars) if i not in (*data, *constants))
            learns |= any(is_var(a) and a in self._learning for a in factors)
            for operand in data:
                atom = equation.invars[operand]
                passed[atom] = passed.get(atom, False) or learns
        path = frozenset(v for i in equations for v in self._program.equations[i].outvars)
        ends.update((v, learns) for v, learns in passed.items() if v not in path)
        return self._filter(leaf, var, ends, added, path & passed.keys(), equations)

    def _filter(
        self,
        leaf: StateLeaf,
        var: Var,
        ends: dict[Var, bool],
        added: dict[Added, bool],
        path: frozenset[Var],
        equations: list[int],
    ) -> LinearFilter | None:
        old = leaf.in_var
        if old not in ends:
            return None
        others = {end: learns for end, learns in ends.items() if end is not old}
        if any(old in self._ancestors(end) for end in others):
            return None
        decay = self._decay(old, var, sorted(equations), added)
        if decay is None:
            return None
        number, weights = decay
        in_order = sorted(others, key=lambda end: self._program.producer.get(end, -1))
        return LinearFilter(
            leaf=leaf,
            var=var,
            decay=number,
            decay_weights=weights,
            values=tuple(end for end in in_order if others[end] or end in self._with_gradient),
            added=tuple(sorted(use for use in added if added[use] or self._learns(use))),
            path=path,
            equations=tuple(sorted(equations)),
            held=self._paths_of_factors(equations, self._constant_states),
            parameters=self._paths_of_factors(equations, self._parameters),
        )

    def _paths_of_factors(
        self, equations: Sequence[int], leaves: Sequence[StateLeaf]
    ) -> tuple[Path, ...]:
        """Return the paths of leaves that the coefficients of equations depend on."""
        path = [self._program.equations[index] for index in equations]
        factors = [
            e.invars[i] for e in path for i in range(len(e.invars)) if i not in self._data(e)
        ]
        ancestors = self._program.depends_on(factors)
        return tuple(dict.fromkeys(leaf.path for leaf in leaves if leaf.in_var in ancestors))

    def _ancestors(self, var: Var) -> set[Var]:
        return self._analysis.gradient_ancestors([var], self._new_vars)

    def _data(self, equation: Equation) -> list[int]:
        return [i for i, a in enumerate(equation.invars) if is_var(a) and a in self._varying]

    def _learns(self, use: Added) -> bool:
        atom = self._program.equations[use[0]].invars[use[1]]
        return is_var(atom) and atom in self._learning

    def _is_linear(self, equation: Equation, data: Sequence[int]) -> list[int] | None:
        """Return the summands of an equation that is linear in data; ``None``: it is not."""
        operands = equation.invars
        if not data or not all(carries_derivative(operands[i]) for i in data):
            return None
        if is_marked(equation):
            spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
            is_linear = (
                spec is not None and spec.linear_in_input and [*data] == [spec.x_invar_index]
            )
            return [] if is_linear else None
        name = equation.primitive.name
        summands = _summands(equation)
        if summands and {*summands}.issuperset(data):
            return [i for i in summands if i not in data]
        is_linear = name in _LINEAR or (name in _FACTORS and [*data] in _FACTORS[name])
        if name in OWN_DERIVATIVE:
            is_linear = _is_linear_function(equation, data)
        return [] if is_linear else None

    def _decay(
        self, old: Var, var: Var, equations: Sequence[int], added: Container[Added]
    ) -> tuple[Number, tuple[Var, ...]] | None:
        """Return the scalar that multiplies the old value, and its factors that learn.

        The scalar is the new value for an old value of ones and summands of zeros.
        """
        zero, numbers = _constant(0.0), {old: _constant(1.0)}
        weights: list[Var] = []
        for index in equations:
            equation = self._program.equations[index]
            if numbers.keys().isdisjoint(filter(is_var, equation.invars)):
                continue
            operands: list[Number | None] = []
            for i, atom in enumerate(equation.invars):
                if (index, i) in added or (is_var(atom) and atom in self._varying):
                    operands.append(numbers.get(atom, zero) if is_var(atom) else zero)
                else:
                    operands.append(_uniform(self._analysis, atom))
                    weights += [atom] if is_var(atom) and atom in self._learning else []
            number = _through(equation, operands)
            if number is None:
                return None
            numbers[equation.outvars[0]] = number
        return (numbers[var], tuple(weights)) if var in numbers else None


def _is_linear_function(equation: Equation, data: Sequence[int]) -> bool:
    """Test whether a function with a custom derivative is linear, and so is its derivative."""
    vjp = vjp_of(equation)
    if vjp.jaxpr is None or not nonlinear_operands(equation).isdisjoint(data):
        return False
    program = program_of(vjp.jaxpr)
    pairs = zip(vjp.inputs, program.out_atoms, strict=True)
    behind = program.depends_on([atom for operand, atom in pairs if operand in data])
    if not behind.isdisjoint(program.in_vars[operand] for operand in data):
        return False

    def of_data(moving: list[Any], *values: Any) -> list[Any]:
        filled = list(values)
        for operand, value in zip(data, moving, strict=True):
            filled[operand] = value
        return bind(equation, filled)

    operands = [struct_of(atom.aval) for atom in equation.invars]
    kinds = kinds_of(of_data, [operands[operand] for operand in data], *operands)
    return all(kind is Kind.LINEAR for kind in kinds)


def _summands(equation: Equation) -> Sequence[int]:
    """Return the operands that an equation's result is the sum, or concatenation, of."""
    name = equation.primitive.name
    if name in ("add", "add_any", "sub"):
        return (0, 1)
    if name == "select_n":
        return range(1, len(equation.invars))
    moved = moved_operands(equation)
    return [i for i in moved if equation.invars[i].aval.shape or not equation.outvars[0].aval.shape]


def _uniform(analysis: Analysis, atom: Atom) -> Number | None:
    """Return the scalar that fills an array; ``None``: its entries may differ."""
    value = analysis.constants.value(atom)
    if value is not None:
        first = value.ravel()[:1]
        return _constant(first[0]) if first.size and np.all(value == first) else None
    if not is_var(atom):
        return None
    if atom.aval.size == 1:
        return lambda known: jnp.reshape(known[atom], ())
    index = analysis.program.producer.get(atom)
    if index is None:
        return None
    equation = analysis.program.equations[index]
    return _through(equation, [_uniform(analysis, operand) for operand in equation.invars])


def _through(equation: Equation, numbers: Sequence[Number | None]) -> Number | None:
    """Return the scalar that fills an equation's result, given those of its operands."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers) or len(equation.outvars) != 1:
        return None
    if moved_operands(equation) and len(numbers) == 1:
        return known[0]
    is_elementwise = equation.primitive.name in ELEMENTWISE
    return functools.partial(_run, equation, known) if is_elementwise else None


def _constant(value: Any) -> Number:
    """Return a known number as a function."""
    return lambda known: value


def _run(equation: Equation, numbers: Sequence[Number], known: Mapping[Var, Any]) -> Any:
    values = [
        jnp.asarray(number(known), atom.aval.dtype)
        for number, atom in zip(numbers, equation.invars, strict=True)
    ]
    return bind(equation, values)[0]

"""Detection of unchanged States, which are constants of the step.

A step returns such a State as it was. Batch-norm statistics in evaluation mode are an example, in a
pure function that returns all its state. The State is read but not written, so no gradient
passes through it from step to step.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import Atom, Equation, is_tracer, is_var, trace_to_jaxpr
from ..._jaxpr import Program, evaluate_all, program_of
from ..._jaxpr.dataflow import IN_ORDER, Constants, PerVariable, Question, flows_of_variables
from .state_arrays import StateArray


def without_unchanged(
    program: Program, arrays: Sequence[StateArray], arguments: int
) -> tuple[Program, list[StateArray]]:
    """Return a step that does not write its unchanged States, and the State leaves.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays, arguments
        The State leaves, and the number of arguments.
    """
    inputs = range(len(program.in_vars))
    same = flows_of_variables(Question(_Same()), Constants(program), inputs)
    results = len(program.out_atoms) - sum(array.written for array in arrays)
    after = iter(program.out_atoms[results:])
    written = list(program.out_atoms[:results])
    new_arrays = []
    for place, array in enumerate(arrays, arguments):
        atom = next(after) if array.written else None
        if atom is not None and is_var(atom) and same[atom] == place:
            new_arrays.append(dataclasses.replace(array, written=False))
        else:
            new_arrays.append(array)
            written += [] if atom is None else [atom]
    return _with_results(program, written), new_arrays


def _with_results(program: Program, atoms: Sequence[Atom]) -> Program:
    """Return a program with fewer results."""
    if len(atoms) == len(program.out_atoms):
        return program
    places = {id(atom): i for i, atom in enumerate(program.out_atoms)}

    def run(*values: object) -> list[object]:
        every = evaluate_all(program.jaxpr, values, {})
        return [every[places[id(atom)]] for atom in atoms]

    return program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars]))


CHANGED, FALSE, TRUE = -1, -2, -3
"""Codes instead of an input: not the elements of one input in order, or a known truth value."""


class _Same(PerVariable):
    """The number of the input whose elements a variable has, in order, or a code."""

    def of_value(self, value: ArrayLike) -> int:
        if is_tracer(value) or jnp.result_type(value) != np.dtype(bool):
            return CHANGED
        array = np.asarray(value)
        return TRUE if array.all() else CHANGED if array.any() else FALSE

    def join(self, first: int, second: int) -> int:
        return first if first == second else CHANGED

    def decided(self, choice: int) -> None:
        return None

    def through(self, equation: Equation, operands: Sequence[int]) -> list[int]:
        name = equation.primitive.name
        if name == "select_n" and operands[0] in (FALSE, TRUE):
            return [operands[1 + (FALSE, TRUE).index(operands[0])]]
        if name == "broadcast_in_dim" and operands[0] in (FALSE, TRUE):
            return list(operands)
        is_by_column = name == "reshape" and equation.params["dimensions"] is not None
        if name not in IN_ORDER or is_by_column:
            return [CHANGED] * len(equation.outvars)
        is_same = equation.outvars[0].aval.dtype == equation.invars[0].aval.dtype
        return [operands[0] if is_same else CHANGED]

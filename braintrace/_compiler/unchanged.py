"""Detection of unchanged States, which are constants of the step.

A step returns such a State as it was. Batch-norm statistics in evaluation mode are an example, in a
pure function that returns all its state. The State is read but not written, so no gradient
passes through it from step to step.
"""

import dataclasses
from collections.abc import Sequence

from .._jax import Atom, is_var, trace_to_jaxpr
from .._jaxpr import IN_ORDER, Program, evaluate, program_of
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
    results = len(program.out_atoms) - sum(array.written for array in arrays)
    after = iter(program.out_atoms[results:])
    written = list(program.out_atoms[:results])
    new_arrays = []
    for before, array in zip(program.in_vars[arguments:], arrays, strict=True):
        atom = next(after) if array.written else None
        if atom is not None and _source(program, atom) is before:
            array = dataclasses.replace(array, written=False)
        elif atom is not None:
            written.append(atom)
        new_arrays.append(array)
    if len(written) == len(program.out_atoms):
        return program, new_arrays

    def run(*values: object) -> list[object]:
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, written, inputs, effects=True)

    return program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars])), new_arrays


def _source(program: Program, atom: Atom) -> Atom:
    """Return the variable that has the same elements in the same order, through copies."""
    while is_var(atom) and atom in program.producer:
        equation = program.equations[program.producer[atom]]
        name = equation.primitive.name
        is_by_column = name == "reshape" and equation.params["dimensions"] is not None
        if name not in IN_ORDER or is_by_column:
            break
        (copied,) = equation.invars
        if copied.aval.dtype != atom.aval.dtype:
            break
        atom = copied
    return atom

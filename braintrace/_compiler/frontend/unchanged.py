"""Find the States that a step returns unchanged: they are constants of the step.

Batch-norm statistics in evaluation mode are an example, where the step of a pure function returns
all of its state. Such a State is read, not written, so no gradient passes from step to step by it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..._jax import Atom, Equation, is_var, trace_to_jaxpr
from ..._jaxpr import Program, evaluate_all, inlined, loop_of, program_of
from ..._jaxpr.dataflow import Constants
from .state_arrays import StateArray

_PASSES = {
    "convert_element_type",
    "copy",
    "copy_p",
    "expand_dims",
    "optimization_barrier",
    "reshape",
    "squeeze",
    "stop_gradient",
}
"""Equations whose results have the elements of an operand in their order."""


def without_unchanged(
    program: Program, arrays: Sequence[StateArray], arguments: int
) -> tuple[Program, list[StateArray]]:
    """Return a step that does not write the States that it leaves unchanged, and its State leaves.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays, arguments
        The State leaves, and how many arguments there are.
    """
    constants = Constants(program)
    results = len(program.out_atoms) - sum(array.written for array in arrays)
    after = iter(program.out_atoms[results:])
    kept = list(program.out_atoms[:results])
    found = []
    for array, before in zip(arrays, program.in_vars[arguments:], strict=True):
        atom = next(after) if array.written else None
        if atom is not None and _origin(constants, atom) is before:
            found.append(dataclasses.replace(array, written=False))
        else:
            found.append(array)
            kept += [] if atom is None else [atom]
    return _with_results(program, kept), found


def _with_results(program: Program, atoms: Sequence[Atom]) -> Program:
    """Return a program with fewer results."""
    if len(atoms) == len(program.out_atoms):
        return program
    places = {id(atom): i for i, atom in enumerate(program.out_atoms)}

    def run(*values: object) -> list[object]:
        every = evaluate_all(program.jaxpr, values, {})
        return [every[places[id(atom)]] for atom in atoms]

    return program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars]))


def _origin(constants: Constants, atom: Atom) -> Atom:
    """Return the variable whose value an atom has, by equations that change no element."""
    program = constants.program
    while is_var(atom) and atom in program.producer:
        equation = program.equations[program.producer[atom]]
        before = _before(constants, equation, equation.outvars.index(atom))
        if before is None or before.aval.dtype != atom.aval.dtype:
            return atom
        atom = before
    return atom


def _before(constants: Constants, equation: Equation, place: int) -> Atom | None:
    """Return the operand whose elements a result has; ``None`` for no one operand."""
    name, operands = equation.primitive.name, equation.invars
    if name in _PASSES:
        in_order = equation.params.get("dimensions") is None or name != "reshape"
        return operands[place] if in_order else None
    if name == "select_n":
        which = constants.value(operands[0])
        is_one = which is not None and which.size > 0 and bool(np.all(which == which.flat[0]))
        return operands[1 + int(which.flat[0])] if is_one and which is not None else None
    if name == "cond":
        inputs = [_of_body(branch, place) for branch in equation.params["branches"]]
        first = inputs[0]
        return None if first is None or len(set(inputs)) > 1 else operands[1 + first]
    if name in ("scan", "while"):
        loop = loop_of(equation, operands)
        is_same = place < len(loop.carried) and _of_body(loop.body, place) == (
            len(loop.fixed) + place
        )
        return loop.carried[place] if is_same else None
    return None


def _of_body(body: object, place: int) -> int | None:
    """Return the index of the input that a result of a body equals, if any."""
    constants = Constants(program_of(inlined(body)))
    program = constants.program
    found = _origin(constants, program.out_atoms[place])
    return next((i for i, var in enumerate(program.in_vars) if var is found), None)

"""Position ids through an equation that has a derivative of its own.

What counts for ``D`` and ``Df`` is the derivative, not the value: a surrogate gradient may
carry one where the value carries none, and a custom rule may mix positions where the value does
not. So the vector-Jacobian product of the equation is traced, and every element of the pulled
back cotangent is followed to the element of the output's cotangent that it is made from.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import bind, is_var, trace_to_jaxpr
from .._jaxpr import Program, evaluate_inlined, program_of
from .canonicalize import spell_out_broadcasts
from .home import Constants, pure_origin
from .transfer import CUT, NONE, Contribution, Ids, carries_derivative, join


def through_derivative(equation: Any, out_ids: Sequence[Ids | None]) -> list[Contribution]:
    """Return what every operand receives; see `transfer`."""
    inputs = [i for i, atom in enumerate(equation.invars) if carries_derivative(atom)]
    outputs = [
        k
        for k, (var, ids) in enumerate(zip(equation.outvars, out_ids, strict=True))
        if ids is not None and carries_derivative(var)
    ]
    contributions: list[Contribution] = [None] * len(equation.invars)
    if not inputs or not outputs:
        return contributions
    try:
        program = _pull_back(equation, inputs, outputs)
    except (NotImplementedError, TypeError, ValueError):
        # No derivative rule: nothing can be said about positions.
        return [CUT] * len(equation.invars)
    constant = Constants(program)
    cotangents = program.in_vars[len(equation.invars) :]
    for cotangent, output in zip(cotangents, outputs, strict=True):
        origin = pure_origin(program, cotangent, constant)
        ids = out_ids[output]
        assert ids is not None
        for operand, atom in zip(inputs, program.out_atoms, strict=True):
            if not is_var(atom) or cotangent not in program.depends_on([atom]):
                continue
            found = _received(origin.get(atom), ids)
            contributions[operand] = join(contributions[operand], found)
    return contributions


def _received(origin: Ids | None, ids: Ids) -> Contribution:
    if origin is None:
        return CUT
    taken = ids.ravel()[np.maximum(origin, 0)]
    return np.where(origin == NONE, NONE, taken).astype(np.int32)


def _pull_back(equation: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """Return ``(operands, cotangents of outputs) -> cotangents of inputs`` as a program."""
    count = len(equation.invars)

    def pulled(*values: Any) -> list[Any]:
        def function(*changed: Any) -> list[Any]:
            operands = list(values[:count])
            for index, value in zip(inputs, changed, strict=True):
                operands[index] = value
            results = bind(equation, operands)
            return [results[k] for k in outputs]

        _, pull = jax.vjp(function, *(values[i] for i in inputs))
        return list(pull(list(values[count:])))

    avals = [atom.aval for atom in equation.invars]
    avals += [equation.outvars[k].aval for k in outputs]
    nested = trace_to_jaxpr(pulled, avals)
    return program_of(
        trace_to_jaxpr(lambda *v: evaluate_inlined(nested, v, spell_out_broadcasts), avals)
    )

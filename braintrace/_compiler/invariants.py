"""Take out of a loop what is broadcast in it alike at every step.

A parameter per unit that a loop over small steps uses for a whole batch is broadcast inside the
loop. Outside of it, its fan-out is a variable of the program, where the walks find it.
"""

from typing import Any

import jax

from .._jax import open_jaxpr, scan_counts, trace_to_jaxpr
from .._jaxpr import Program, evaluate, evaluate_inlined, program_of
from .._jaxpr.inline import Rewrite


def without_invariants(equation: Any, operands: list[Any], rewrite: Rewrite) -> list[Any] | None:
    """Return the outputs of a ``scan`` or ``while`` that is given its broadcasts from outside.

    Parameters
    ----------
    equation, operands
        The loop, and values of its operands.
    rewrite
        Applied to the equations inside.

    Returns
    -------
    list or None
        ``None`` where nothing is broadcast alike at every step.
    """
    loop = _scan if equation.primitive.name == "scan" else _while
    return loop(equation, operands, rewrite)


def _scan(equation: Any, operands: list[Any], rewrite: Rewrite) -> list[Any] | None:
    constants, carries = scan_counts(equation)
    program = _flat(equation.params["jaxpr"], rewrite)
    invariant = _invariant(program, constants)
    if not invariant:
        return None
    known = _values(program, invariant, operands[:constants])

    def step(carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _run(program, [*operands[:constants], *carried, *slices], known)
        return outputs[:carries], outputs[carries:]

    carried, stacked = jax.lax.scan(
        step,
        operands[constants : constants + carries],
        operands[constants + carries :],
        length=equation.params["length"],
        reverse=equation.params["reverse"],
        unroll=equation.params["unroll"],
    )
    return [*carried, *stacked]


def _while(equation: Any, operands: list[Any], rewrite: Rewrite) -> list[Any] | None:
    conditions = equation.params["cond_nconsts"]
    constants = equation.params["body_nconsts"]
    program = _flat(equation.params["body_jaxpr"], rewrite)
    invariant = _invariant(program, constants)
    if not invariant:
        return None
    fixed = operands[conditions : conditions + constants]
    known = _values(program, invariant, fixed)

    def goes_on(carried: list[Any]) -> Any:
        values = [*operands[:conditions], *carried]
        return evaluate_inlined(equation.params["cond_jaxpr"], values, rewrite)[0]

    def step(carried: list[Any]) -> list[Any]:
        return _run(program, [*fixed, *carried], known)

    return list(jax.lax.while_loop(goes_on, step, operands[conditions + constants :]))


def _flat(body: Any, rewrite: Rewrite) -> Program:
    avals = [var.aval for var in open_jaxpr(body)[0].invars]
    return program_of(trace_to_jaxpr(lambda *v: evaluate_inlined(body, v, rewrite), avals))


def _invariant(program: Program, constants: int) -> list[int]:
    """Return the equations that read nothing that changes, if any of them is a broadcast."""
    varying = program.dependents_of(program.in_vars[constants:])
    fixed = program.dependents_of(program.in_vars[:constants])
    found = [
        index
        for index, equation in enumerate(program.equations)
        if not equation.effects
        and all(var in fixed and var not in varying for var in equation.outvars)
    ]
    names = {program.equations[index].primitive.name for index in found}
    return found if "broadcast_in_dim" in names else []


def _values(program: Program, invariant: list[int], fixed: list[Any]) -> dict[Any, Any]:
    made = [var for index in invariant for var in program.equations[index].outvars]
    inputs = dict(zip(program.in_vars, fixed, strict=False))
    return dict(zip(made, evaluate(program, made, inputs), strict=True))


def _run(program: Program, values: list[Any], known: dict[Any, Any]) -> list[Any]:
    inputs = dict(zip(program.in_vars, values, strict=True))
    return evaluate(program, program.out_atoms, inputs, overrides=known, effects=True)

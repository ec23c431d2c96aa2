"""The step again with some of its equations run in another way."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .._graph.traced_model import TracedModel
from .._jax import at_source_of, is_var, trace_to_jaxpr
from .._jaxpr import Program, program_of

Run = Callable[[int, Any, list[Any]], list[Any]]
"""``(index, equation, operand values) -> output values``."""


def rewritten(traced: TracedModel, run: Run) -> TracedModel:
    """Return the model with every equation as a function runs it."""
    old = traced.program
    avals = [var.aval for var in old.in_vars]
    new = program_of(trace_to_jaxpr(lambda *values: _outputs(old, run, values), avals))
    before, after = ((*program.in_vars, *program.out_atoms, None) for program in (old, new))
    renamed = {id(atom): other for atom, other in zip(before, after, strict=True)}
    leaves = tuple(
        dataclasses.replace(
            leaf,
            in_var=renamed[id(leaf.in_var)],
            out_var=renamed[id(leaf.out_var)],
            joined_var=renamed[id(leaf.joined_var)],
        )
        for leaf in traced.leaves
    )
    arguments = len(traced.argument_vars)
    return dataclasses.replace(
        traced,
        program=new,
        leaves=leaves,
        argument_vars=new.in_vars[:arguments],
        output_atoms=new.out_atoms[: len(traced.output_atoms)],
    )


def _outputs(program: Program, run: Run, values: Sequence[Any]) -> list[Any]:
    known = {**program.constants, **dict(zip(program.in_vars, values, strict=True))}

    def read(atom: Any) -> Any:
        return known[atom] if is_var(atom) else atom.val

    for index, equation in enumerate(program.equations):
        operands = [read(atom) for atom in equation.invars]
        with at_source_of(equation):
            results = run(index, equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.out_atoms]

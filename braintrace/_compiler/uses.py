"""A variable of its own for every use of a value whose uses reach different positions.

In ``h = y + y[::-1]`` an element of ``y`` reaches two positions, each by another use. With
a copy per use, each copy reaches one position, as after a broadcast.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .._jax import Var, at_source_of, bind, is_var, trace_to_jaxpr
from .._jaxpr import Program, program_of
from .beyond import where_differentiated
from .derivative import Derivatives
from .home import Constants, pure_origin
from .positions import Walk
from .relations import MarkedOperation
from .trace import TracedModel


def uses_apart(
    traced: TracedModel,
    operations: Sequence[MarkedOperation],
    walks: Iterable[Sequence[Walk]],
    derivatives: Derivatives,
) -> TracedModel | None:
    """Return the model with copies where marked outputs are shared; ``None``: there is none."""
    shared = {var for group_walks in walks for walk in group_walks for var in walk.shared}
    if not shared:
        return None
    program = traced.program
    constant, beyond = Constants(program), where_differentiated(derivatives)
    last = max(program.producer.get(var, -1) for var in shared)
    split = frozenset(
        var
        for operation in operations
        for var in pure_origin(program, operation.y_var, constant, last, beyond)
        if var in shared
    )
    return _with_copies(traced, split) if split else None


def _with_copies(traced: TracedModel, variables: frozenset[Var]) -> TracedModel:
    old = traced.program
    new = program_of(
        trace_to_jaxpr(lambda *v: _copying(old, variables, v), [var.aval for var in old.in_vars])
    )
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


def _copying(program: Program, variables: frozenset[Var], values: Sequence[Any]) -> list[Any]:
    known = {**program.constants, **dict(zip(program.in_vars, values, strict=True))}

    def read(atom: Any) -> Any:
        return known[atom] if is_var(atom) else atom.val

    for equation in program.equations:
        operands = [read(atom) for atom in equation.invars]
        with at_source_of(equation):
            operands = [
                jnp.copy(value) if is_var(atom) and atom in variables else value
                for atom, value in zip(equation.invars, operands, strict=True)
            ]
        known.update(zip(equation.outvars, bind(equation, operands), strict=True))
    return [read(atom) for atom in program.out_atoms]

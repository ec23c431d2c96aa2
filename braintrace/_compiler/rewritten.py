"""Rewriting of a step: rules run some of its equations in another way."""

import dataclasses
from typing import Any

from .._graph.traced_model import TracedModel
from .._jax import trace_to_jaxpr
from .._jaxpr import Program, Rules, evaluate_all, program_of


def rewritten(traced: TracedModel, rules: Rules) -> TracedModel:
    """Return the model with its equations run by rules."""
    return with_program(traced, by_rules(traced.program, rules))


def by_rules(program: Program, rules: Rules) -> Program:
    """Return a program with its equations run by rules."""
    avals = [var.aval for var in program.in_vars]
    return program_of(
        trace_to_jaxpr(lambda *values: evaluate_all(program.jaxpr, values, rules), avals)
    )


def with_program(traced: TracedModel, new: Program) -> TracedModel:
    """Replace the program of a model.

    The first inputs and outputs of the new program correspond to the old ones, in order.
    """
    old = traced.program
    renamed: dict[int, Any] = {id(None): None}
    for before, after in ((old.in_vars, new.in_vars), (old.out_atoms, new.out_atoms)):
        renamed.update((id(atom), other) for atom, other in zip(before, after, strict=False))
    leaves = tuple(
        dataclasses.replace(
            leaf,
            in_var=renamed[id(leaf.in_var)],
            out_var=renamed[id(leaf.out_var)],
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

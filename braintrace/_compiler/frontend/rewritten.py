"""The step again with some of its equations run in another way."""

import dataclasses
from typing import Any

from ..._graph.traced_model import TracedModel
from ..._jax import trace_to_jaxpr
from ..._jaxpr import Program, Rules, evaluate_all, program_of


def rewritten(traced: TracedModel, rules: Rules) -> TracedModel:
    """Return the model with its equations as rules run them."""
    old = traced.program
    avals = [var.aval for var in old.in_vars]
    run = trace_to_jaxpr(lambda *values: evaluate_all(old.jaxpr, values, rules), avals)
    return with_program(traced, program_of(run))


def with_program(traced: TracedModel, new: Program) -> TracedModel:
    """Return the model by another program, whose inputs and outputs begin with the same."""
    old = traced.program
    renamed: dict[int, Any] = {id(None): None}
    for before, after in ((old.in_vars, new.in_vars), (old.out_atoms, new.out_atoms)):
        renamed.update((id(atom), other) for atom, other in zip(before, after, strict=False))
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
        answers=tuple(renamed[id(var)] for var in traced.answers),
        output_atoms=new.out_atoms[: len(traced.output_atoms)],
    )

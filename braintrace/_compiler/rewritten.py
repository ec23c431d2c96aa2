"""The step again with some of its equations run in another way."""

import dataclasses

from .._graph.traced_model import TracedModel
from .._jax import trace_to_jaxpr
from .._jaxpr import Rules, evaluate_all, program_of


def rewritten(traced: TracedModel, rules: Rules) -> TracedModel:
    """Return the model with its equations as rules run them."""
    old = traced.program
    avals = [var.aval for var in old.in_vars]
    new = program_of(trace_to_jaxpr(lambda *values: evaluate_all(old.jaxpr, values, rules), avals))
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

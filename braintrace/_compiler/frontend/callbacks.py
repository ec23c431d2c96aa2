"""Hoisting of callbacks: a step takes callback results as inputs.

A step is evaluated several times: for its outputs, for the value of each state, and for
derivatives. Each callback must run once, and all evaluations must read the same result. After this
pass, callback results are inputs of the step, like its arguments. A separate program runs the
callbacks first. The dataflow analyses treat such an input as the result of a callback.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..._graph import TracedModel
from ..._jax import trace_to_jaxpr
from ..._jaxpr import can_be_replayed, program_of, recorded, replayed
from .rewritten import with_program


def hoist_callbacks(traced: TracedModel) -> TracedModel:
    """Hoist a step's callbacks to `TracedModel.callbacks` if it reads their results.

    A step is returned unchanged if no value depends on its effects (such as prints), or if it has
    effects of other kinds.
    """
    old = traced.program
    used = old.depends_on(old.out_atoms)
    acting = [equation for equation in old.equations if equation.effects]
    if all(used.isdisjoint(e.outvars) for e in acting) or not can_be_replayed(old.jaxpr):
        return traced
    avals = [var.aval for var in old.in_vars]
    trees = []

    def run_callbacks(*values: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(recorded(old.jaxpr, values)[1])
        trees.append(tree)
        return leaves or [jnp.zeros(())]  # a step that has an input is one whose callbacks ran

    callbacks = trace_to_jaxpr(run_callbacks, avals)

    def step(*values: Any) -> list[Any]:
        given = values[len(avals) :][: trees[0].num_leaves]
        results = jax.tree.unflatten(trees[0], given)
        return replayed(old.jaxpr, values[: len(avals)], results)

    program = program_of(trace_to_jaxpr(step, [*avals, *callbacks.out_avals]))
    results = program.in_vars[len(avals) :]
    again = with_program(traced, program)
    return dataclasses.replace(again, callback_results=results, callbacks=program_of(callbacks))

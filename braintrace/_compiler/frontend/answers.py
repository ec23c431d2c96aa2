"""A step that calls back as one that is given the answers, and what asks for them.

A step is evaluated several times over: for its outputs, for the value of each state, for
derivatives. A callback is to be called once, and everybody is to read the same answer. So answers
are inputs of the step from here on, like those of its arguments; a program of its own asks for them
before. To whoever follows positions, a callback stays what it is.
"""

import dataclasses
from typing import Any

import jax

from ..._graph import TracedModel
from ..._jax import trace_to_jaxpr
from ..._jaxpr import can_be_replayed, program_of, recorded, replayed
from .rewritten import with_program


def with_answers(traced: TracedModel) -> TracedModel:
    """Return a step whose callbacks are in `TracedModel.asking`, if it reads their answers.

    A step with effects that no value depends on, such as prints, stays as it is; so does one with
    effects of other kinds.
    """
    old = traced.program
    used = old.depends_on(old.out_atoms)
    acting = [equation for equation in old.equations if equation.effects]
    if all(used.isdisjoint(e.outvars) for e in acting) or not can_be_replayed(old.jaxpr):
        return traced
    avals = [var.aval for var in old.in_vars]
    trees = []

    def ask(*values: Any) -> list[Any]:
        answers = recorded(old.jaxpr, values)[1]
        trees.append(jax.tree.structure(answers))
        return [*jax.tree.leaves(answers)]

    asking = trace_to_jaxpr(ask, avals)

    def step(*values: Any) -> list[Any]:
        answers = jax.tree.unflatten(trees[0], values[len(avals) :])
        return replayed(old.jaxpr, values[: len(avals)], answers)

    program = program_of(trace_to_jaxpr(step, [*avals, *asking.out_avals]))
    answers = program.in_vars[len(avals) :]
    again = with_program(traced, program)
    return dataclasses.replace(again, answers=answers, asking=program_of(asking))

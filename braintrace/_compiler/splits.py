"""Equations that are split because they hide what reaches a unit: loops, and shared outputs.

A loop is a single equation, and a walk truncates an operand of it as a whole. After unrolling, its
steps are equations of the program (for example, small time steps of a cable with coupled
compartments). Only the coupling is then truncated, and the path of each unit to itself is kept.

In ``h = y + y[::-1]`` an element of ``y`` reaches two units, each by another use. With a copy per
use, each copy reaches one unit, as after a broadcast.
"""

from typing import Any

import jax.numpy as jnp

from .._graph.traced_model import TracedModel
from .._jax import Equation, Var, bind, is_var
from .canonicalize import spell_out_broadcasts, unrolled
from .grouped_step import GroupedStep
from .rewritten import rewritten


def split_loops(step: GroupedStep, longest: int) -> TracedModel | None:
    """Unroll the loops that couple elements; ``None`` if there are none.

    Parameters
    ----------
    step
        The step, and the walks back from its hidden states.
    longest
        Largest number of steps of a loop that is unrolled.
    """
    cuts = {cut.equation for walks in step.walks for walk in walks for cut in walk.cuts}
    loops = {i for i in cuts if _is_short(step.analysis.program.equations[i], longest)}
    if not loops:
        return None

    def unroll(equation: Equation, operands: list[Any]) -> list[Any]:
        return unrolled(equation, operands, spell_out_broadcasts)

    return rewritten(step.traced, dict.fromkeys(loops, unroll))


def _is_short(equation: Equation, longest: int) -> bool:
    return equation.primitive.name == "scan" and bool(equation.params["length"] <= longest)


def split_shared_uses(step: GroupedStep) -> TracedModel | None:
    """Copy shared ETP outputs, one copy per use; ``None`` if there are none."""
    shared = {var for walks in step.walks for walk in walks for var in walk.shared}
    if not shared:
        return None
    producer = step.analysis.program.producer
    last = max(producer.get(var, -1) for var in shared)
    split = frozenset(
        var
        for operation in step.operations
        for var in step.analysis.elements_of(operation.y_var, last)
        if var in shared
    )
    return _with_copies(step.traced, split) if split else None


def _with_copies(traced: TracedModel, variables: frozenset[Var]) -> TracedModel:
    def with_copies(equation: Equation, operands: list[Any]) -> list[Any]:
        copied = [
            jnp.copy(value) if is_var(atom) and atom in variables else value
            for atom, value in zip(equation.invars, operands, strict=True)
        ]
        return bind(equation, copied)

    return rewritten(traced, with_copies)

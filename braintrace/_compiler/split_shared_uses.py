"""Copies of ETP outputs whose uses reach different units, one copy per use.

In ``h = y + y[::-1]`` an element of ``y`` reaches two units, each by another use. With a copy per
use, each copy reaches one unit, as after a broadcast.
"""

from typing import Any

import jax.numpy as jnp

from .._graph.traced_model import TracedModel
from .._jax import Equation, Var, bind, is_var
from .grouped_step import GroupedStep
from .rewritten import rewritten


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

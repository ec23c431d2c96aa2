"""A variable of its own for every use of a value whose uses reach different positions.

In ``h = y + y[::-1]`` an element of ``y`` reaches two positions, each by another use. With
a copy per use, each copy reaches one position, as after a broadcast.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from .._graph.traced_model import TracedModel
from .._jax import Var, bind, is_var
from .derivative import Derivatives
from .opaque_calls import opaque_where_differentiated
from .origin_position import Constants, pure_origin
from .positions import Walk
from .relations import MarkedOperation
from .rewritten import rewritten


def split_shared_uses(
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
    constant, opaque_rule = Constants(program), opaque_where_differentiated(derivatives)
    last = max(program.producer.get(var, -1) for var in shared)
    split = frozenset(
        var
        for operation in operations
        for var in pure_origin(program, operation.y_var, constant, last, opaque_rule)
        if var in shared
    )
    return _with_copies(traced, split) if split else None


def _with_copies(traced: TracedModel, variables: frozenset[Var]) -> TracedModel:
    def run(_: int, equation: Any, operands: list[Any]) -> list[Any]:
        copied = [
            jnp.copy(value) if is_var(atom) and atom in variables else value
            for atom, value in zip(equation.invars, operands, strict=True)
        ]
        return bind(equation, copied)

    return rewritten(traced, run)

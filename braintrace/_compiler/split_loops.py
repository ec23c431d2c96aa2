"""Loops in which positions mix, step by step: only the mixing is cut, not what is beside it.

A loop is one equation, of which an operand is cut as a whole. Its steps as equations of the
program (small time steps of a cable whose compartments are coupled) are cut like any others: the
coupling is held constant, and the way of each position to itself is kept.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._graph.hidden_group import HiddenGroup
from .._graph.traced_model import TracedModel
from .._jax import bind
from .canonicalize import spell_out_broadcasts, unrolled
from .positions import Walk
from .relations import MarkedOperation
from .rewritten import rewritten
from .transfer import MANY


def split_loops(
    traced: TracedModel, walks: Sequence[Sequence[Walk]], longest: int
) -> TracedModel | None:
    """Return the model with its mixing loops unrolled; ``None``: there is none.

    Parameters
    ----------
    traced, walks
        The model, and the walks back from its hidden states.
    longest
        Number of steps up to which a loop is unrolled.
    """
    cuts = {cut.equation for group_walks in walks for walk in group_walks for cut in walk.cuts}
    loops = {index for index in cuts if _is_short(traced.program.equations[index], longest)}
    if not loops:
        return None

    def run(index: int, equation: Any, operands: list[Any]) -> list[Any]:
        if index in loops:
            return unrolled(equation, operands, spell_out_broadcasts)
        return bind(equation, operands)

    return rewritten(traced, run)


def _is_short(equation: Any, longest: int) -> bool:
    return equation.primitive.name == "scan" and equation.params["length"] <= longest


def num_traced(
    operations: Sequence[MarkedOperation],
    groups: Sequence[HiddenGroup],
    walks: Sequence[Sequence[Walk]],
) -> int:
    """Count the elements of old states and marked outputs that reach states without mixing."""
    ends = [operation.y_var for operation in operations]
    ends += [state.in_var for group in groups for state in group.states]
    found = [walk.ids[var] for each in walks for walk in each for var in ends if var in walk.ids]
    return sum(int(np.count_nonzero((ids >= 0) | (ids == MANY))) for ids in found)

"""Loops in which elements are coupled, step by step: only the mixing is cut, not what is beside it.

A loop is one equation, of which an operand is cut as a whole. Its steps as equations of the
program (small time steps of a cable whose compartments are coupled) are cut like any others: the
coupling is held constant, and the way of each position to itself is kept.
"""

from typing import Any

from ..._graph.traced_model import TracedModel
from ..._jax import Equation
from ..core.grouped_step import GroupedStep
from .canonicalize import spell_out_broadcasts, unrolled
from .rewritten import rewritten


def split_loops(step: GroupedStep, longest: int) -> TracedModel | None:
    """Return the step with its mixing loops unrolled; ``None``: there is none.

    Parameters
    ----------
    step
        The step, and the walks back from its hidden states.
    longest
        Number of steps up to which a loop is unrolled.
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

"""Unrolling of loops whose steps couple elements.

A loop is a single equation, and a walk truncates an operand of it as a whole. After unrolling, its
steps are equations of the program (for example, small time steps of a cable with coupled
compartments). Only the coupling is then truncated, and the path of each unit to itself is kept.
"""

from typing import Any

from .._graph.traced_model import TracedModel
from .._jax import Equation
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

"""The role of an ETP operation in a backward walk, from its registration."""

from typing import Literal

from .._jax import Equation, equations_inside
from .registry import ETP_PRIMITIVES

MarkedRole = Literal["opaque", "transparent"]
"""The role of an ETP operation in a walk back from a hidden state: the walk ends at an opaque one,
and continues through the first operand of a transparent one."""


def is_marked(equation: Equation) -> bool:
    """Test whether an equation is an ETP operation."""
    return equation.primitive in ETP_PRIMITIVES


def holds_marked(equation: Equation) -> bool:
    """Test whether a body of an equation (branch, loop, call) has an ETP operation."""
    return any(map(is_marked, equations_inside(equation)))


def role(equation: Equation) -> MarkedRole | None:
    """Return the role of an ETP operation in a walk; ``None`` for any other equation.

    Most ETP operations are opaque: the rules of an operation cannot express nested weights.
    """
    if not is_marked(equation):
        return None
    return "transparent" if equation.primitive.gradient_enabled else "opaque"

"""What an ETP operation is to the compiler, read from its registration."""

from typing import Literal

from .._etrace_op import ETP_PRIMITIVES
from .._jax import Equation, equations_inside

MarkedRole = Literal["opaque", "transparent"]
"""What an ETP operation is to a walk back from a hidden state, which ends at an opaque one and
passes a transparent one on its first operand."""


def is_marked(equation: Equation) -> bool:
    """Tell whether an equation is an ETP operation."""
    return equation.primitive in ETP_PRIMITIVES


def holds_marked(equation: Equation) -> bool:
    """Tell whether a body of an equation (a branch, a loop, a call) has an ETP operation."""
    return any(map(is_marked, equations_inside(equation)))


def role(equation: Equation) -> MarkedRole | None:
    """Return what an ETP operation is to a walk, and ``None`` for any other equation.

    Most are opaque: the rules of an operation cannot express a weight behind another weight.
    """
    if not is_marked(equation):
        return None
    return "transparent" if equation.primitive.gradient_enabled else "opaque"

"""What a marked operation is to the compiler, read from its registration."""

from typing import Any

from .._etrace_op import ETP_PRIMITIVES
from .._jax import open_jaxpr, sub_jaxprs


def is_marked(equation: Any) -> bool:
    """Tell whether an equation is a marked operation."""
    return equation.primitive in ETP_PRIMITIVES


def holds_marked(equation: Any) -> bool:
    """Tell whether a body of an equation (a branch, a loop, a call) has a marked operation."""
    return any(
        is_marked(inner) or holds_marked(inner)
        for body in sub_jaxprs(equation)
        for inner in open_jaxpr(body)[0].eqns
    )


def role(equation: Any) -> str | None:
    """Return ``'transparent'`` or ``'opaque'`` for a marked operation, else ``None``.

    A walk back from a hidden state passes what is transparent, and ends at the opaque: the rules of
    an operation cannot express a weight behind another weight.
    """
    if not is_marked(equation):
        return None
    return "transparent" if equation.primitive.gradient_enabled else "opaque"

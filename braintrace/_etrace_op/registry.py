"""Registries of the ETP operations and their rules.

The four rule dictionaries map a primitive to its rule, derived from its declaration (``derive``) or
written by hand. Everything else about a primitive (abstract evaluation, lowering, derivatives,
batching) follows from its implementation. A derived ``init_drtrl`` takes the static parameters as
well. In all rules ``static_params`` are the keyword arguments of the equation, and the keys of
dictionaries are the names from ``trainable_invars_fn``.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax

from .._jax import Equation, Primitive, equations_inside
from .spec import ETPPrimitiveSpec

Arrays: TypeAlias = dict[str, jax.Array]
"""Weights, their gradients or their traces, by the name of a trainable operand."""

Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of the input and the output of one sample."""

Pick: TypeAlias = Callable[[jax.Array], jax.Array]
"""Selects some entries of the last axis of an array."""

ETP_PRIMITIVES: set[Primitive] = set()
"""Every ETP primitive."""

BATCHED_PRIMITIVES: set[Primitive] = set()
"""The primitives whose input and output have a leading batch axis."""

ETP_RULES_YW_TO_W: dict[Primitive, Callable[..., dict[str, Any]]] = {}
"""``yw_to_w(hidden_dim, trace, **static_params) -> trace``.

It multiplies a trace elementwise by a factor ``hidden_dim`` shaped like the output. The trace
has no state axis here. It must include no other factor: a constant of the forward equation
belongs to ``xy_to_dw`` alone, otherwise it would be applied again at every step."""

ETP_RULES_XY_TO_DW: dict[Primitive, Callable[..., dict[str, Any]]] = {}
"""``xy_to_dw(x, hidden_dim, weights, **static_params) -> gradients``.

It pulls ``hidden_dim`` (shaped like the output) back to every trainable operand, as a VJP does:
the batch axis of a batched primitive is summed, and each gradient has the shape and dtype of its
operand. It is linear in ``hidden_dim``."""

ETP_RULES_INIT_DRTRL: dict[Primitive, Callable[..., dict[str, Any]]] = {}
"""``init_drtrl(x_var, y_var, weight_vars, num_hidden_state) -> traces``.

Zeros for the parameter-dimension trace: the batch axis first (batched primitives), the
state axis last. The variables have an ``aval`` with ``shape`` and ``dtype``.
"""

ETP_RULES_INIT_PP: dict[Primitive, Callable[..., Any]] = {}
"""``init_pp(x_var, y_var, weight_vars, num_hidden_state) -> array``.

Zeros for the output-dimension trace: one array shaped like the output, state axis last.
"""

RULES: dict[str, dict[Primitive, Any]] = {
    "yw_to_w": ETP_RULES_YW_TO_W,
    "xy_to_dw": ETP_RULES_XY_TO_DW,
    "init_drtrl": ETP_RULES_INIT_DRTRL,
    "init_pp": ETP_RULES_INIT_PP,
}
"""The four rules that a primitive needs, by name."""

ETP_PRIMITIVE_SPECS: dict[Primitive, ETPPrimitiveSpec] = {}
"""The complete declaration of each primitive that the compiler may use."""


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

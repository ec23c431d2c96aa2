"""Operation counts of a program."""

import jax.numpy as jnp

from .._etrace_op import ETPPrimitive
from .._jax import AnyJaxpr, Equation, open_jaxpr, sub_jaxprs
from .._jaxpr.dataflow import IN_ORDER, PRODUCTS, moved_operands
from .._learner.calls.chunk_costs import flops_of

MOVES = IN_ORDER | {"iota", "optimization_barrier"}
"""Primitives without arithmetic, besides the moves of elements."""


def arithmetic(jaxpr: AnyJaxpr) -> int:
    """Return the number of arithmetic operations of a program.

    An elementwise function counts as one operation per element, and the body of a loop of unknown
    length counts once.
    """
    return sum(map(_of_equation, open_jaxpr(jaxpr)[0].eqns))


def _of_equation(equation: Equation) -> int:
    if equation.primitive.name in PRODUCTS or isinstance(equation.primitive, ETPPrimitive):
        return flops_of(equation)
    bodies = [arithmetic(body) for body in sub_jaxprs(equation)]
    if equation.primitive.name == "scan":
        times: int = equation.params["length"]
        return times * sum(bodies)
    if equation.primitive.name == "cond":
        return max(bodies)
    if bodies:
        return bodies[-1]
    if equation.primitive.name in MOVES or moved_operands(equation):
        return 0
    is_sum = equation.primitive.name.startswith(("reduce_", "cum", "arg"))
    counted = equation.invars[:1] if is_sum else equation.outvars
    return sum(
        int(atom.aval.size) for atom in counted if jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    )

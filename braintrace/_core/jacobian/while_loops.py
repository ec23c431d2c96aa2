"""Clear errors for reverse mode through ``while`` loops.

A loop of unknown length has only forward-mode derivatives. JAX refuses it when a gradient is
backpropagated, possibly in a `grad` of the user, and names neither the model nor the states before
the loop. The rules of this module raise an error with these names first.
"""

from collections.abc import Mapping
from typing import Any

from ..._errors import CompilationError
from ..._graph import TracedModel
from ..._jax import (
    OWN_DERIVATIVE,
    AnyJaxpr,
    Equation,
    bind,
    equations_inside,
    one_way,
    source_line,
)
from ..._jaxpr import Rule, carries_derivative, evaluate_all, rebuilt
from ..._jaxpr.dataflow import CONSTANT


def contains_while(equation: Equation) -> bool:
    """Test whether an equation is a ``while`` loop, or contains one."""
    every = (equation, *equations_inside(equation))
    return any(inner.primitive.name == "while" for inner in every)


def while_loop_rules(traced: TracedModel) -> Mapping[int, Rule]:
    """Return rules with which loops of unknown length refuse reverse mode."""
    equations = enumerate(traced.program.equations)
    return {index: _rule(traced, e) for index, e in equations if contains_while(e)}


def _rule(traced: TracedModel, equation: Equation) -> Rule:
    behind = traced.program.depends_on(
        equation.invars, blocked=CONSTANT, through=carries_derivative
    )
    leaves = [leaf for leaf in traced.leaves if leaf.in_var in behind]
    names = sorted({f"'{leaf.name}'" for leaf in leaves if leaf.kind in ("hidden", "parameter")})
    before = f"Before the loop are {', '.join(names)}. " if names else ""

    def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
        if equation.primitive.name == "while":
            message = (
                f"A gradient goes back through a `while` loop of `update` "
                f"({source_line(equation)}): a loop of unknown length has no derivative in that "
                f"direction. {before}Use a loop of known length (`scan`, `for_loop`, or "
                "`fori_loop` with static bounds), or `jax.lax.stop_gradient` on what enters it."
            )
            results = bind(equation, operands)
            return [one_way(y, CompilationError, message) for y in results]
        if not contains_while(equation) or equation.primitive.name in OWN_DERIVATIVE:
            return None
        return rebuilt(equation, operands, run)

    def run(body: AnyJaxpr, values: list[Any]) -> list[Any]:
        return evaluate_all(body, values, rule)

    return rule

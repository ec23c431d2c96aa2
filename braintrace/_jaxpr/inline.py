"""Evaluate a jaxpr so that calls leave no trace of themselves.

Evaluated under ``jax.make_jaxpr``, the result is a flat jaxpr: JAX writes the new
equations, and no variable ever has to be substituted by hand.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._jax import TRANSPARENT_CALLS, at_source_of, bind, call_body, is_var, open_jaxpr

Rewrite = Callable[[Any, list[Any]], list[Any] | None]
"""``(equation, operand values) -> output values``, or ``None`` to evaluate it as it is."""


def evaluate_inlined(jaxpr: Any, values: Sequence[Any], rewrite: Rewrite) -> list[Any]:
    """Evaluate a (closed or open) jaxpr, inlining calls and rewriting equations.

    Parameters
    ----------
    jaxpr
        The jaxpr. An open one must have no constants.
    values
        One value per input.
    rewrite
        Tried on every equation that is not a plain call.
    """
    opened, constants = open_jaxpr(jaxpr)
    environment = dict(zip(opened.constvars, constants, strict=True))
    environment.update(zip(opened.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return environment[atom] if is_var(atom) else atom.val

    for equation in opened.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in TRANSPARENT_CALLS:
            results = evaluate_inlined(call_body(equation), operands, rewrite)
        else:
            with at_source_of(equation):
                rewritten = rewrite(equation, operands)
            results = bind(equation, operands) if rewritten is None else rewritten
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]

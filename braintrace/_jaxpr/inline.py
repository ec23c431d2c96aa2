"""Evaluate a jaxpr so that calls leave no trace of themselves.

Evaluated under ``jax.make_jaxpr``, the result is a flat jaxpr: JAX writes the new
equations, and no variable ever has to be substituted by hand.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._jax import (
    TRANSPARENT_CALLS,
    at_source_of,
    bind,
    call_body,
    is_var,
    open_jaxpr,
    runs_library_code,
)

Rewrite = Callable[[Any, list[Any]], list[Any] | None]
"""``(equation, operand values) -> output values``, or ``None`` to evaluate it as it is."""


def evaluate_inlined(
    jaxpr: Any, values: Sequence[Any], rewrite: Rewrite, caller: Any = None
) -> list[Any]:
    """Evaluate a (closed or open) jaxpr, inlining calls and rewriting equations.

    Parameters
    ----------
    jaxpr
        The jaxpr. An open one must have no constants.
    values
        One value per input.
    rewrite
        Tried on every equation that is not a plain call.
    caller
        The equation whose source line all of these get; ``None``: each keeps its own.
    """
    opened, constants = open_jaxpr(jaxpr)
    environment = dict(zip(opened.constvars, constants, strict=True))
    environment.update(zip(opened.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return environment[atom] if is_var(atom) else atom.val

    for equation in opened.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in TRANSPARENT_CALLS:
            # JAX traces a function of its own once, wherever it is called first.
            inside = equation if caller is None and runs_library_code(equation) else caller
            results = evaluate_inlined(call_body(equation), operands, rewrite, inside)
        else:
            source = equation if caller is None else caller
            with at_source_of(source):
                rewritten = rewrite(equation, operands)
            results = bind(equation, operands, source) if rewritten is None else rewritten
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]

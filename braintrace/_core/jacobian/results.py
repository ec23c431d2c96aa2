"""Derivatives from known results, where JAX computes the derivative from the result."""

from typing import Any

import jax

from ..._jax import Equation, bind
from ..._jaxpr import evaluate, program_of

FROM_RESULT = frozenset({"exp", "exp2", "logistic", "rsqrt", "sqrt", "tan", "tanh"})
"""Operations whose derivative JAX computes from their result."""


def from_result(equation: Equation, x: jax.Array, known: jax.Array) -> jax.Array:
    """Return the known result of an operation; its derivative is computed from that."""

    def derivative(primals: Any, tangents: Any) -> Any:
        def both(x: Any, dx: Any) -> Any:
            return jax.jvp(lambda x: bind(equation, [x])[0], (x,), (dx,))

        x, known = primals
        program = program_of(jax.make_jaxpr(both)(x, tangents[0]))
        result, change = program.out_atoms
        inputs = dict(zip(program.in_vars, (x, tangents[0]), strict=True))
        return known, evaluate(program, [change], inputs, {result: known})[0]

    around = jax.custom_jvp(lambda x, known: known)
    around.defjvp(derivative)
    found: jax.Array = around(x, known)
    return found

"""Steps whose loss does not count, differentiated in full.

Such a step passes on what later steps make of its states, and nothing else. Its inputs may be
anything, NaN among them, and so may the states of samples that have read them: what goes back
through those is zero, and ``0 * NaN`` is not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""``(parameters, states, inputs) -> (new states, results)``."""


def without_loss(step: Step) -> Step:
    """Return the same step, through which the derivative of the new states alone goes back.

    It goes back through finite numbers: what is not finite counts as zero there. Where no later
    step reads the states, nothing goes back at all.
    """

    @jax.custom_vjp
    def run(parameters: Any, states: Any, inputs: Any) -> Any:
        return step(parameters, states, inputs)

    def forward(*arguments: Any) -> Any:
        return step(*arguments), arguments

    def backward(arguments: Any, cotangents: tuple[Any, Any]) -> Any:
        (parameters, states, inputs), (new, _) = arguments, cotangents
        read = [cotangent for cotangent in jax.tree.leaves(new) if _is_inexact(cotangent)]
        leaves, tree = jax.tree.flatten((parameters, states))
        moving = [leaf for leaf in leaves if _is_inexact(leaf)]

        def new_states(moving: list[Any]) -> list[Any]:
            rest = iter(moving)
            merged = [next(rest) if _is_inexact(leaf) else leaf for leaf in leaves]
            now, before = jax.tree.unflatten(tree, merged)
            found, _ = step(now, before, jax.tree.map(_finite, inputs))
            return [leaf for leaf in jax.tree.leaves(found) if _is_inexact(leaf)]

        def pulled_back() -> list[Any]:
            _, pull_back = jax.vjp(new_states, jax.tree.map(_finite, moving))
            return pull_back(read)[0]

        def nothing() -> list[Any]:
            return [jnp.zeros_like(leaf) for leaf in moving]

        is_read = jnp.any(jnp.stack([jnp.any(cotangent != 0) for cotangent in read]))
        found = iter(jax.lax.cond(is_read, pulled_back, nothing))
        gradients = [next(found) if _is_inexact(leaf) else None for leaf in leaves]
        return *jax.tree.unflatten(tree, gradients), None

    run.defvjp(forward, backward)
    return run


def _is_inexact(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _finite(leaf: Any) -> Any:
    if not _is_inexact(leaf):
        return leaf
    return jnp.where(jnp.isfinite(leaf), leaf, 0)

"""Steps whose loss does not count, differentiated in full.

Such a step passes on what later steps make of its states, and nothing else. Its inputs may be
anything, NaN among them, and so may the states of samples that have read them: what goes back
through those is zero, and ``0 * NaN`` is not.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._typing import PyTree

Step: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, tuple[Any, ...]]]
"""``(parameters, states, inputs) -> (new states, (loss, *results))``."""

Kept: TypeAlias = tuple[Callable[..., Any], jax.Array, PyTree, PyTree, PyTree]
"""The derivative of a step that counts, and the arguments."""


def leaving_gradients_alone(step: Step) -> Callable[..., Any]:
    """Return a function of ``(counts, parameters, states, inputs)`` that runs the same step.

    Where the step does not count, the derivative of the new states alone goes back. It goes back
    through finite numbers: what is not finite counts as zero there. Where no later step reads the
    states, nothing goes back at all. Results besides the loss have no derivative.
    """

    def run(counts: jax.Array, *arguments: PyTree) -> Any:
        return step(*arguments)

    padded = jax.custom_vjp(run)
    padded.defvjp(functools.partial(_forward, step), functools.partial(_backward, step))
    result: Callable[..., Any] = padded
    return result


def _forward(
    step: Step, counts: jax.Array, parameters: PyTree, states: PyTree, inputs: PyTree
) -> tuple[Any, Kept]:
    leaves, tree = jax.tree.flatten((parameters, states))

    def of_inexact(inexact: list[jax.Array]) -> Any:
        now, before = jax.tree.unflatten(tree, _merged(leaves, inexact))
        new, (loss, *results) = step(now, before, inputs)
        return (_inexact(new), loss), (new, results)

    (_, loss), pull_back, (new, results) = jax.vjp(of_inexact, _inexact(leaves), has_aux=True)
    return (new, (loss, *results)), (pull_back, counts, parameters, states, inputs)


def _backward(step: Step, kept: Kept, cotangents: Any) -> tuple[None, PyTree, PyTree, None]:
    pull_back, counts, parameters, states, inputs = kept
    leaves, tree = jax.tree.flatten((parameters, states))
    new, loss = _inexact(cotangents[0]), cotangents[1][0]

    def new_states(inexact: list[jax.Array]) -> list[jax.Array]:
        now, before = jax.tree.unflatten(tree, _merged(leaves, inexact))
        return _inexact(step(now, before, jax.tree.map(_finite, inputs))[0])

    def ordinary() -> Any:
        return pull_back((new, loss))[0]

    def through_finite_numbers() -> Any:
        _, of_states = jax.vjp(new_states, list(map(_finite, _inexact(leaves))))
        return of_states(new)[0]

    def nothing() -> Any:
        return [jnp.zeros_like(leaf) for leaf in _inexact(leaves)]

    is_read = jnp.any(jnp.stack([jnp.any(cotangent != 0) for cotangent in new]))
    kind = jnp.where(counts, 0, jnp.where(is_read, 1, 2))
    found = iter(jax.lax.switch(kind, [ordinary, through_finite_numbers, nothing]))
    gradients = [next(found) if _is_inexact(leaf) else None for leaf in leaves]
    of_parameters, of_states = jax.tree.unflatten(tree, gradients)
    return None, of_parameters, of_states, None


def _inexact(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]


def _merged(leaves: list[Any], inexact: list[jax.Array]) -> list[Any]:
    """Return leaves with others in the place of those that have a derivative."""
    rest = iter(inexact)
    return [next(rest) if _is_inexact(leaf) else leaf for leaf in leaves]


def _is_inexact(leaf: ArrayLike) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _finite(leaf: ArrayLike) -> ArrayLike:
    return jnp.where(jnp.isfinite(leaf), leaf, 0) if _is_inexact(leaf) else leaf

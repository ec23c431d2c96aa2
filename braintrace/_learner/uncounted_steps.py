"""Backpropagation through masked steps.

The gradient of a masked step consists only of the gradient of later losses with respect to its new
states. Its inputs may be NaN, and so may the states of samples that have read them: the cotangents
of these values are zero, but ``0 * NaN`` is NaN.
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
"""The vjp of an unmasked step, and the arguments."""


def leaving_gradients_alone(step: Step) -> Callable[..., Any]:
    """Return a function of ``(counts, parameters, states, inputs)`` that runs the same step.

    If the step is masked, only the cotangents of the new states are pulled back, with non-finite
    values replaced by zero. If no later step reads the states, all gradients are zero. Results
    besides the loss have no derivative.
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
    """Return leaves with new values of the differentiable ones."""
    rest = iter(inexact)
    return [next(rest) if _is_inexact(leaf) else leaf for leaf in leaves]


def _is_inexact(leaf: ArrayLike) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _finite(leaf: ArrayLike) -> ArrayLike:
    return jnp.where(jnp.isfinite(leaf), leaf, 0) if _is_inexact(leaf) else leaf

"""Derivatives of old states in a user's gradient.

Within one gradient, a step reads states that the user differentiates, or states that an earlier
step of the learner has written. A derivative with respect to parameters stops at old states, since
traces contain how these depend on parameters. A derivative with respect to the user's states
continues through all steps. JAX adds the two in one array, so both at once are refused.

A step mark tells the two kinds of old states apart. It is a zero that passes from step to step
next to the states, and it is differentiated from the first step on that has a derivative with
respect to something else than old states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from ..._errors import OptionError
from ..._jax import holds_tracers, is_tracer
from ..._typing import PyTree


def new_step_mark() -> brainstate.State:
    """Return the State of a learner's mark."""
    with jax.ensure_compile_time_eval():
        return brainstate.State(jnp.zeros(()))


def entered(
    old: Mapping[str, PyTree], others: PyTree, mark: Any, through_steps: bool = True
) -> tuple[dict[str, PyTree], Any]:
    """Return old states as a step may differentiate them, and the mark after it.

    Parameters
    ----------
    old
        Values of the States before the step, by name.
    others
        All other inputs of the step.
    mark
        The mark before it.
    through_steps
        Whether derivatives with respect to old states may pass through the step.

    Raises
    ------
    OptionError
        When a gradient is differentiated with respect to both old states and other inputs.
    """
    if not holds_tracers((list(old.values()), others, mark)):
        return dict(old), mark
    leaves, tree = jax.tree.flatten(list(old.values()))
    names = [name for name, value in old.items() for _ in jax.tree.leaves(value)]
    floats = [index for index, leaf in enumerate(leaves) if _is_float(leaf)]
    rest = [leaf for leaf in jax.tree.leaves(others) if _is_float(leaf)]
    inputs = jax.tree.map(_computed, ([leaves[i] for i in floats], rest, mark))
    held, mark = _held([names[i] for i in floats], through_steps)(*inputs)
    for index, leaf in zip(floats, held, strict=True):
        leaves[index] = leaf
    return dict(zip(old, jax.tree.unflatten(tree, leaves), strict=True)), mark


def _computed(leaf: Any) -> Any:
    """Return a value as a result of JAX.

    When brainstate searches for mapped States, tracers contain NumPy arrays, which `jax.custom_jvp`
    does not accept.
    """
    return jnp.copy(leaf) if is_tracer(leaf) else leaf


def _held(names: Sequence[str], through_steps: bool) -> Any:
    """Return ``(old, others, mark) -> (old, mark)`` with the derivative of `entered`."""

    def itself(old: Any, others: Any, mark: Any) -> Any:
        return old, mark

    def derivative(primals: Any, tangents: Any) -> Any:
        (old, _, mark), (change, changes, past) = primals, tangents
        asked = [name for name, one in zip(names, change, strict=True) if not _is_zero(one)]
        goes_on = not _is_zero(past)
        is_joint = not (goes_on or all(map(_is_zero, changes)))
        if asked and not goes_on and (is_joint or not through_steps):
            raise _refusal(asked[0], is_joint)
        if not (is_joint or goes_on):
            return (old, mark), (change, past)
        zeros = [zero_from_primal(leaf, symbolic_zeros=True) for leaf in old]
        moved = next(one for one in (past, *changes) if not _is_zero(one))
        return (old, mark), (zeros, _zero_of(moved, mark))

    result: Any = jax.custom_jvp(itself)
    result.defjvp(derivative, symbolic_zeros=True)
    return result


def _zero_of(tangent: Any, like: Any) -> Any:
    """Return a zero that depends on a tangent: an empty sum of its entries.

    A constant zero would not reach the next step.
    """
    none = jax.lax.slice_in_dim(jnp.atleast_1d(tangent), 0, 0)
    return jnp.sum(none).real.astype(like.dtype)


def _refusal(name: str, is_joint: bool) -> OptionError:
    if not is_joint:
        return OptionError(
            f"The hidden State '{name}' is differentiated through a method that runs a whole "
            "sequence, which has no derivative with respect to earlier states. Call the learner "
            "step by step, or use `functional().step`; or pass the state through "
            "`jax.lax.stop_gradient`."
        )
    return OptionError(
        f"One gradient differentiates the State '{name}' from before the learner's first step "
        "together with parameters or arguments of the step. The online gradient holds earlier "
        "states constant, so the derivative of the State would be lost. Take two gradients, one "
        "with respect to hidden states alone and one with respect to parameters; if you do not "
        "need the derivative of the State, pass its value through `jax.lax.stop_gradient`."
    )


def started(fresh: PyTree, mark: Any) -> PyTree:
    """Return initial values of a sequence that starts within a gradient.

    Raises
    ------
    OptionError
        When a gradient is differentiated, if the values depend on its variables and its earlier
        steps belong to an online gradient.
    """

    def itself(leaves: Any, mark: Any) -> Any:
        return leaves

    def derivative(primals: Any, tangents: Any) -> Any:
        (leaves, _), (change, past) = primals, tangents
        if not (_is_zero(past) or all(map(_is_zero, change))):
            raise OptionError(
                "A sequence starts inside a gradient from initial values that depend on the "
                "differentiated values, and the online gradient has no derivative with respect "
                "to these. Take two gradients, one with respect to the initial values alone and "
                "one with respect to parameters; or pass them through `jax.lax.stop_gradient` in "
                "`init_state`."
            )
        return leaves, change

    leaves, tree = jax.tree.flatten(fresh)
    floats = [index for index, leaf in enumerate(leaves) if _is_float(leaf)]
    if not any(is_tracer(leaves[index]) for index in floats):
        return fresh
    result: Any = jax.custom_jvp(itself)
    result.defjvp(derivative, symbolic_zeros=True)
    for index, leaf in zip(floats, result([leaves[i] for i in floats], mark), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(tree, leaves)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))

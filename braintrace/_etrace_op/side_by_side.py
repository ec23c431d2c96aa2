r"""Inputs that are joined of parts: ``[x, h]`` need not be written where each part will do.

With the rows of a weight divided like its input, :math:`x = [x_1, x_2]`, a gradient is joined of
those of the parts, :math:`dW = [x_1^\top f;\, x_2^\top f]`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import divided_dependent
from .registry import Arrays
from .spec import ETPPrimitiveSpec


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """An array that is joined of others along their last axis."""

    parts: tuple[Any, ...]

    def joined(self) -> jax.Array:
        """Return it as one array."""
        return jnp.concatenate(self.parts, axis=-1)


jax.tree_util.register_dataclass(SideBySide, ["parts"], [])


def as_one(array: Any) -> Any:
    """Return an array that may be given in parts as one."""
    return array.joined() if isinstance(array, SideBySide) else array


def part_by_part(
    gradients_of: Callable[[Any, Arrays], Arrays],
    spec: ETPPrimitiveSpec,
    x: SideBySide,
    weights: Arrays,
) -> Arrays:
    """Return the gradients ``(x, weights) -> gradients`` of an operation, of each part on its own.

    All parts are joined for an operation of which it is not known that one operand is a matrix of
    inputs by outputs, and all others have outputs alone.
    """
    axes = spec.trace_axes or {}
    rows = [name for name in weights if "input" in axes.get(name, ("input",))]
    edges = [0, *itertools.accumulate(part.shape[-1] for part in x.parts)]
    if len(rows) != 1 or axes.get(rows[0]) != ("input", "output"):
        return gradients_of(x.joined(), weights)
    (name,) = rows
    weight = weights[name]
    slices = [weight[first:last] for first, last in itertools.pairwise(edges)]
    found = [
        gradients_of(part, {**weights, name: own})
        for part, own in zip(x.parts, slices, strict=True)
    ]
    return {**found[0], name: _joined_apart([gradients[name] for gradients in found])}


def _joined_apart(parts: list[jax.Array]) -> jax.Array:
    """Join arrays along their first axis, in an operation of its own.

    A CPU would join them number by number within whatever is added to them. Nothing is fused with
    what depends on a condition; this one, a number equal to and different from itself, never holds.
    """

    def apart(parts: list[jax.Array]) -> jax.Array:
        number = parts[0][0, 0]
        never = (number == number) & (number != number)
        return jax.lax.cond(never, lambda whole: jnp.zeros_like(joined(whole)), joined, parts)

    def joined(parts: list[jax.Array]) -> jax.Array:
        return jnp.concatenate(parts)

    on_cpu = functools.partial(divided_dependent, divided=joined, whole=apart)
    found: jax.Array = jax.lax.platform_dependent(parts, cpu=on_cpu, default=joined)
    return found

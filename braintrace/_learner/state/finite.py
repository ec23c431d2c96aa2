"""Tests of losses, gradients and States for non-finite numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import NonFiniteError, OptionError
from ..._jax import is_tracer
from ..._typing import PyTree
from ...sharding import on_host


def first_not_finite(losses: jax.Array, gradients: PyTree) -> jax.Array:
    """Return the index of the first non-finite leaf, the number of leaves for a loss, -1 for none.

    Parameters
    ----------
    losses
        One loss, or several.
    gradients
        A pytree; its leaves are counted.
    """
    leaves = [*jax.tree.leaves(gradients), losses]
    result = jnp.stack([~jnp.isfinite(_zero(leaf)) for leaf in leaves])
    return jnp.where(jnp.any(result), jnp.argmax(result), -1).astype(jnp.int32)


def any_not_finite(losses: jax.Array, gradients: PyTree) -> jax.Array:
    """Test losses and gradients together for non-finite numbers."""
    leaves = jax.tree.leaves((losses, gradients))
    return ~jnp.all(jnp.stack([jnp.isfinite(_zero(leaf)) for leaf in leaves]))


def _zero(leaf: jax.Array) -> jax.Array:
    """Return 0, or NaN for a leaf with non-finite numbers: times zero, all other numbers are zero.

    A product with a vector of zeros takes a CPU a third of the time of a sum.
    """
    if leaf.ndim > 1:
        leaf = jnp.tensordot(jnp.zeros(leaf.shape[:-1], leaf.dtype), leaf, leaf.ndim - 1)
    return jnp.sum(leaf * jnp.zeros((), leaf.dtype))


def is_any_nan(leaves: list[jax.Array]) -> jax.Array:
    """Test arrays for NaN."""
    return jnp.any(jnp.stack([jnp.zeros((), bool), *(jnp.any(jnp.isnan(x)) for x in leaves)]))


def inexact(tree: PyTree) -> list[jax.Array]:
    """Return the leaves that can be non-finite."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def check_finite(losses: jax.Array, verdicts: jax.Array, names: list[str], every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    losses
        Losses of every step.
    verdicts
        Result of `first_not_finite` for every step, or for its block.
    names
        Names of the leaves of the gradients.
    every
        Length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    OptionError
        Inside a transformation, where the numbers are unknown.
    """
    if is_tracer(verdicts):
        raise OptionError(
            "`nonfinite='raise'` cannot check values inside a transformation. Use 'skip' there, "
            "or call `etrace_online` outside."
        )
    by_step = on_host(verdicts)
    (bad,) = np.nonzero(by_step >= 0)
    if not bad.size:
        return
    start = int(bad[0])
    values = on_host(losses)
    block = values[start : start + every]
    (of_block,) = np.nonzero(~np.isfinite(block))
    step = start + int(of_block[0]) if of_block.size else start
    index = int(by_step[start])
    raise NonFiniteError(
        step, float(values[step]), names[index] if index < len(names) else None, len(block)
    )

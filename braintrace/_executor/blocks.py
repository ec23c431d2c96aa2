"""Chunk gradients accumulated over blocks of steps.

If the arrays that the steps of a chunk write are larger than the caches, the chunk is split into
blocks, so each block is read while it is still in the caches.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._graph import Weights
from .recursion import scan_block, scan_records
from .zero import widened

Carry = TypeVar("Carry")
Kept = TypeVar("Kept")

BLOCK_BYTES = 2**23
"""Maximum bytes that a block of steps writes, to stay in the caches."""
SHORTEST_BLOCK = 16


def in_blocks(
    run: Callable[[Carry, Callable[..., Any]], tuple[Carry, Weights, Kept]],
    start: Carry,
    weights: Weights,
    steps: int,
) -> tuple[Carry, Weights, Kept]:
    """Return the final carry of a chunk, and the sum of the gradients of its steps.

    Parameters
    ----------
    run
        ``(carry, scan) -> (carry, gradients, kept)`` of some steps, by ``scan(step, carry,
        records)``; the stacked results ``kept`` have time as their first axis.
    start
        Initial carry. A step writes about the same number of bytes.
    weights
        Example of the gradients.
    steps
        Length of the chunk.
    """
    length = _length(steps, start)
    if length == steps:
        return run(start, functools.partial(scan_records, steps=steps))

    def add_block(
        carry: tuple[Carry, Weights], first: jax.Array | int, size: int
    ) -> tuple[tuple[Carry, Weights], Kept]:
        scan = functools.partial(scan_block, first=first, length=size)
        after, gradients, kept = run(carry[0], scan)
        return (after, jax.tree.map(jnp.add, carry[1], gradients)), kept

    # Sums in half precision would stop growing.
    carry = (start, widened(jax.tree.map(jnp.zeros_like, weights), jnp.float32))
    rest = steps % length
    firsts = jnp.arange(0, steps - rest, length)
    carry, kept = jax.lax.scan(lambda c, first: add_block(c, first, length), carry, firsts)
    kept = jax.tree.map(lambda leaf: leaf.reshape(steps - rest, *leaf.shape[2:]), kept)
    if rest:
        carry, last = add_block(carry, steps - rest, rest)
        kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), kept, last)
    return *carry, kept


def _length(steps: int, carry: Any) -> int:
    """Return the length of blocks of about equal size whose arrays fit into the caches."""
    written = sum(int(leaf.size * leaf.dtype.itemsize) for leaf in jax.tree.leaves(carry))
    fitting = max(SHORTEST_BLOCK, BLOCK_BYTES // max(1, written))
    return math.ceil(steps / math.ceil(steps / fitting))

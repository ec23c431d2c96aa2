"""How a sequence is cut into chunks."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._graph import ETraceGraph
from .._typing import PyTree

LONGEST_CHUNK = 128
SHORTEST_CHUNK = 64
"""Below, what a chunk costs once weighs more than what it saves, whatever the traces take: 64 steps
of a small convolution took 4 times as long as BPTT in chunks of 16, and as long in one chunk."""


def steps_of(sequences: PyTree) -> int:
    """Return the number of steps of sequences, which all have as many."""
    steps: int = jax.tree.leaves(sequences)[0].shape[0]
    return steps


def chunk_length(graph: ETraceGraph, chunk_size: int | str, steps: int, recorded: int) -> int:
    """Return the number of steps of a chunk.

    ``'auto'`` is the largest chunk whose records stay below the size of what it reads and writes
    once, within `SHORTEST_CHUNK` and `LONGEST_CHUNK`; a sequence is cut into equal parts.

    Parameters
    ----------
    graph
        The compiled model.
    chunk_size
        What the user asks for.
    steps
        Length of the sequence.
    recorded
        Bytes that one step of a chunk records.
    """
    if chunk_size != "auto":
        return min(steps, int(chunk_size))
    fitting = graph.bytes_per_chunk // max(1, recorded)
    longest = min(LONGEST_CHUNK, max(SHORTEST_CHUNK, fitting))
    return math.ceil(steps / math.ceil(steps / longest))


def over_chunks(
    run: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    run_last: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    sequences: PyTree,
    steps: int,
    chunk: int,
) -> tuple[PyTree, PyTree]:
    """Run one function over all chunks of sequences but the last, another over the last.

    Parameters
    ----------
    run, run_last
        ``(carry, chunk of the sequences) -> (carry, results stacked over time)``.
    carry, sequences
        Where it starts, and what it runs over.
    steps, chunk
        Length of the sequences and of a chunk; the last chunk has what is left.
    """
    full = (steps - 1) // chunk

    def part(start: PyTree, length: int) -> PyTree:
        def of_leaf(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, start, length)

        return jax.tree.map(of_leaf, sequences)

    if not full:
        return run_last(carry, sequences)
    # Chunks are cut out one by one: a scan over them would first copy the sequences.
    starts = jnp.arange(full) * chunk
    carry, results = jax.lax.scan(lambda c, start: run(c, part(start, chunk)), carry, starts)
    results = jax.tree.map(lambda leaf: leaf.reshape(full * chunk, *leaf.shape[2:]), results)
    carry, rest = run_last(carry, part(full * chunk, steps - full * chunk))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, rest)

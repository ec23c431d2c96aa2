"""Chunks: the length of a sequence's parts, and loops over them."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .._core.traces import as_arrays, size_in_bytes
from .._graph.graph import ETraceGraph, specs_of
from .._typing import PyTree
from .arguments import Options

DEFAULT_BUDGET = 2**30
"""Default limit of the bytes of residuals."""

LONGEST_CARRIED, LONGEST_IN_CACHE = 128, 16
"""Maximum number of steps of a chunk that continues a sequence: longer chunks are no faster.
Filters, and products of convolutions over time and places, leave the caches in longer ones."""

CACHED_BYTES = 2**20
"""Residuals that stay in the caches with filters: fewer need no second chunk, and no loop."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence.

    Attributes
    ----------
    steps, length
        Length of the sequence, and of a chunk; the last chunk may be shorter.
    record_bytes
        Bytes of the residuals of a chunk.
    """

    steps: int
    length: int
    record_bytes: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return math.ceil(self.steps / self.length)


# ``(carry, part of the sequences) -> (carry, results stacked over time)``
OverTime: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def steps_of(sequences: PyTree) -> int:
    """Return the common number of steps of sequences."""
    return jax.tree.leaves(sequences)[0].shape[0]


def cut_sequence(
    graph: ETraceGraph,
    options: Options,
    window: int | None,
    record_bytes: int,
    state_bytes: int,
    steps: int,
    from_zero: bool,
) -> Chunks:
    """Return the chunks of a sequence.

    Parameters
    ----------
    graph
        The compiled model.
    options, window
        Options of the call, and the steps that are differentiated in full: a chunk is a whole
        number of windows. Full-Jacobian rules read their traces before each window, so their chunks
        are single windows.
    record_bytes, state_bytes
        Bytes of the residuals of a step, and of the States.
    steps, from_zero
        Length of the sequence, and whether its traces start from zero, and are deferred after its
        last chunk.
    """
    given = None if options.chunk_size in (None, "auto") else int(options.chunk_size)
    unit = window or 1
    trace_bytes, flat = size_in_bytes(graph.trace_specs), graph.flat_state
    has_filters = trace_bytes < 2 * record_bytes  # a chunk reads and writes them once
    step_bytes = record_bytes
    if flat is not None and graph.passes_weights and not from_zero:
        step_bytes += flat.update_bytes(graph.traced.program)
    if options.checkpoint and given is None:
        # The least sum of the States before each part and of the residuals of one part.
        given = max(1, math.ceil(math.sqrt(steps * state_bytes / max(1, record_bytes))))
    if graph.passes_weights or has_filters if window else "traces" in graph.needs:
        longest = unit
    elif given is not None:
        longest = given
    else:
        most = max(options.memory_budget or DEFAULT_BUDGET, trace_bytes)
        longest = max(1, most // max(1, step_bytes))
        if not from_zero:
            has_places = any("spatial" in spec.axes for spec in specs_of(graph.trace_specs))
            longest = min(longest, LONGEST_IN_CACHE if has_places else LONGEST_CARRIED)
        if has_filters:
            weights = [leaf.in_var.aval for leaf in graph.traced.parameters]
            # Each chunk adds up gradients of the size of the weights, large for a sparse matrix.
            least = max(CACHED_BYTES, 4 * sum(w.size * w.dtype.itemsize for w in weights))
            longest = min(longest, max(LONGEST_IN_CACHE, least // max(1, record_bytes)))
        longest = math.ceil(steps / math.ceil(steps / longest))
    length = steps if longest >= steps else min(steps, unit * max(1, longest // unit))
    return Chunks(steps, length, length * step_bytes)


def over_blocks(
    of_length: Callable[[int], OverTime], carry: PyTree, sequences: PyTree, steps: int, block: int
) -> tuple[PyTree, PyTree]:
    """Run blocks of one length, and a shorter one at the end if steps are left.

    Parameters
    ----------
    of_length
        Returns for a number of steps ``(carry, block of the sequences) -> (carry, results stacked
        over time)``.
    carry, sequences
        Initial carry, and the sequences.
    steps, block
        Length of the sequences and of a block.
    """
    if not steps % block:
        return _over_parts(of_length(block), carry, sequences, steps // block, block)
    last = of_length(steps % block)
    return over_chunks(of_length(block), last, carry, sequences, steps, block)


def over_chunks(
    run: OverTime, run_last: OverTime, carry: PyTree, sequences: PyTree, steps: int, chunk: int
) -> tuple[PyTree, PyTree]:
    """Run one function over all chunks of sequences but the last, another over the last.

    Parameters
    ----------
    run, run_last
        ``(carry, chunk of the sequences) -> (carry, results stacked over time)``.
    carry, sequences
        Initial carry, and the sequences.
    steps, chunk
        Length of the sequences and of a chunk; the last chunk may be shorter.
    """
    full = (steps - 1) // chunk
    if not full:
        return run_last(carry, sequences)
    carry, results = _over_parts(run, carry, sequences, full, chunk)
    carry, rest = run_last(carry, _part(sequences, full * chunk, steps - full * chunk))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, rest)


def backward_over_chunks(
    forward: Callable[[PyTree, PyTree], PyTree],
    backward: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    start: PyTree,
    carry: PyTree,
    sequences: PyTree,
    chunks: Chunks,
) -> tuple[PyTree, PyTree, PyTree]:
    """Run chunks forward, of which only the first States are kept, then from the last to the first.

    Parameters
    ----------
    forward
        ``(States before, chunk of the sequences) -> States after``.
    backward
        ``(carry, States before, chunk) -> (carry, results stacked over time)``.
    start, carry
        States before the sequence, and the carry of the last chunk.
    sequences, chunks
        The sequences, and how they are cut.

    Returns
    -------
    after, carry, results
        States after the sequence, the carry before it, and the results in the order of time.
    """
    length, (full, rest) = chunks.length, divmod(chunks.steps, chunks.length)
    starts, results = jnp.arange(full) * length, []

    def forward_from(states: PyTree, time: jax.Array) -> tuple[PyTree, PyTree]:
        return forward(states, _part(sequences, time, length)), states

    after, kept = jax.lax.scan(forward_from, start, starts)
    if rest:
        last = _part(sequences, full * length, rest)
        carry, of_rest = backward(carry, after, last)
        after, results = forward(after, last), [of_rest]

    def backward_from(carry: PyTree, now: PyTree) -> tuple[PyTree, PyTree]:
        return backward(carry, now[0], _part(sequences, now[1], length))

    carry, of_full = jax.lax.scan(backward_from, carry, (kept, starts), reverse=True)
    of_full = jax.tree.map(lambda x: x.reshape(full * length, *x.shape[2:]), of_full)
    return after, carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), of_full, *results)


def _over_parts(
    run: OverTime, carry: PyTree, sequences: PyTree, count: int, length: int
) -> tuple[PyTree, PyTree]:
    """Run a function over the first parts of sequences, and concatenate its results over time.

    A loop carries arrays. Without a loop, the initial carry may be known to be zero.
    """
    if count == 1:
        return run(carry, _part(sequences, 0, length))
    starts = jnp.arange(count) * length
    carry, results = jax.lax.scan(
        lambda c, start: run(c, _part(sequences, start, length)), as_arrays(carry), starts
    )
    return carry, jax.tree.map(lambda x: x.reshape(count * length, *x.shape[2:]), results)


def _part(sequences: PyTree, start: PyTree, length: int) -> PyTree:
    """Return some steps as a slice; a scan over all parts would first copy the sequences."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, length)

    return jax.tree.map(of_leaf, sequences)

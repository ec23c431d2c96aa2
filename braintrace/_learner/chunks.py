"""Chunks: the length of a sequence's parts, and loops over them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

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


def over_chunks(
    run: OverTime, carry: PyTree, sequences: PyTree, length: int, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Run a function over chunks of sequences, of which the last may be shorter.

    Parameters
    ----------
    run
        ``(carry, chunk of the sequences) -> (carry, results stacked over time)``.
    carry, sequences
        Initial carry, and the sequences. A loop carries arrays; without a loop, the initial carry
        may be known to be zero.
    length
        Length of a chunk.
    reverse
        Start with the last chunk. Results are in the order of time.
    """
    steps = steps_of(sequences)
    full, rest = divmod(steps, length)
    found = list[PyTree]()

    def part(start: Any, size: int) -> PyTree:
        # A scan over all parts would first copy the sequences.
        take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return sequences if size == steps else jax.tree.map(take, sequences)

    def run_full(carry: PyTree) -> tuple[PyTree, PyTree]:
        if full == 1:
            return run(carry, part(0, length))
        carry, results = jax.lax.scan(
            lambda c, index: run(c, part(index * length, length)),
            as_arrays(carry),
            jnp.arange(full),
            reverse=reverse,
        )
        return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def run_rest(carry: PyTree) -> tuple[PyTree, PyTree]:
        return run(carry, part(full * length, rest))

    parts = [run_full] * (full > 0) + [run_rest] * (rest > 0)
    for run_part in reversed(parts) if reverse else parts:
        carry, results = run_part(carry)
        found.append(results)
    in_order = reversed(found) if reverse else found
    return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *in_order)

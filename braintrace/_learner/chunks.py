"""How a sequence is cut into chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, trace_shapes
from .._errors import OptionError, ShapeError

LONGEST_CHUNK = 128


def check_sequences(sequences: tuple[Any, ...]) -> int:
    """Return the number of steps of the sequences.

    Raises
    ------
    ShapeError
        If there are none, they have no steps, or they differ in length.
    """
    shapes = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(sequences)]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        raise ShapeError(
            "Every sequence needs the same leading time axis; the shapes given are "
            f"{', '.join(map(str, shapes)) or 'none'}."
        )
    (steps,) = lengths
    if steps == 0:
        raise ShapeError(f"The sequences have no time steps: shapes {', '.join(map(str, shapes))}.")
    assert steps is not None
    return steps


def chunk_length(graph: ETraceGraph, chunk_size: int | str, steps: int) -> int:
    """Return the number of steps of a chunk.

    ``'auto'`` is the largest chunk whose records stay below the size of the traces that it
    saves, and at most `LONGEST_CHUNK`.

    Raises
    ------
    OptionError
        For anything but a positive integer or ``'auto'``.
    """
    if chunk_size == "auto":
        return min(steps, LONGEST_CHUNK, max(1, _traces(graph) // max(1, _records(graph))))
    if isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size >= 1:
        return min(steps, chunk_size)
    raise OptionError(f"`chunk_size` is {chunk_size!r}; expected a positive integer or 'auto'.")


def _traces(graph: ETraceGraph) -> int:
    return sum(shape.nbytes for shape in trace_shapes(graph))


def _records(graph: ETraceGraph) -> int:
    """Return the bytes that one step of a chunk records."""
    inputs = {r.x_var: r.x_var.aval for r in graph.hidden_param_op_relations if r.x_var is not None}
    total = sum(aval.size * aval.dtype.itemsize for aval in inputs.values())
    for relation in graph.hidden_param_op_relations:
        size = relation.y_var.aval.dtype.itemsize
        total += sum(r.positions.size * len(r.states) * size for r in relation.reaches)
    for group in graph.traced_groups:
        blocks = len(group.transition) + group.num_states
        total += group.num_positions * blocks * group.states[0].dtype.itemsize
    return int(total)


def over_chunks(
    run: Callable[[Any, Any], tuple[Any, Any]], carry: Any, sequences: Any, steps: int, chunk: int
) -> tuple[Any, Any]:
    """Run a function over the full chunks of sequences and over what is left.

    Parameters
    ----------
    run
        ``(carry, chunk of the sequences) -> (carry, results stacked over time)``.
    carry, sequences
        Where it starts, and what it runs over.
    steps, chunk
        Length of the sequences and of a chunk.
    """
    full = steps // chunk
    head = jax.tree.map(lambda leaf: leaf[: full * chunk], sequences)
    if full == 1:
        carry, results = run(carry, head)
    else:
        cut = jax.tree.map(lambda leaf: leaf.reshape(full, chunk, *leaf.shape[1:]), head)
        carry, results = jax.lax.scan(run, carry, cut)
        results = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)
    if full * chunk == steps:
        return carry, results
    tail = jax.tree.map(lambda leaf: leaf[full * chunk :], sequences)
    carry, rest = run(carry, tail)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, rest)
    return carry, joined

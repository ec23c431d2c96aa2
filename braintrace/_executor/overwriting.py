"""Traces are read once and written once, where they are.

XLA overwrites an array in place only where every other use of it is known to come before; otherwise
it copies it. By the time that it decides, optimization barriers are gone: what has to come before
is made an operand (`never`).

On a CPU the traces of several steps are updated by blocks of samples. A block's inputs and factors
are gathered from all steps into the caches, samples first: the products over time then run at the
rate of one large product, and their results are added to the traces before they leave the caches.
All samples at once, XLA rearranges whole records, and writes and reads a second array of the size
of the traces. On a GPU, that is one kernel. Where the program runs on several devices, samples may
lie on different ones, and stay there.

Where the trace of one state is computed from another's before the step, and not the other way
round, it is computed first (`readers_first`): that of a filter, before the two of the neurons that
it filters (a streaming step of adaptive neurons with a leaky readout, over one without filters,
64 x 1024 weights, 32 samples: 2.6 after them, 1.8 before).

The traces of two states as one complex array are updated at once on a CPU too: what multiplies
them element by element outweighs the products, and a loop runs it on one core (LRU x 4, carrying
on, over BPTT: 1.45 in blocks, 1.01 at once).
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .._etrace_op import SideBySide, as_one
from .._graph import Traces
from .._jax import divided_dependent
from .._typing import PyTree

BLOCK_BYTES = 2**20
"""What a block takes of the traces: about what a core's own cache holds."""

Keys: TypeAlias = tuple[str, ...]
"""The keys of the traces in one array."""

Update: TypeAlias = Callable[[PyTree, PyTree, Traces], Traces]
"""``(over time, of samples, traces) -> traces``, which keeps samples apart: arrays with the steps,
then the samples as first axes; arrays with the samples first; and traces, samples first as well."""


def never(first: PyTree) -> jax.Array | None:
    """Return a flag that is not set, and not known before some arrays are.

    It would be set if some number were equal to itself and different from itself. On several
    devices, where it would have to be sent to all of them, it is known at once.
    """
    found = [leaf for leaf in jax.tree.leaves(first) if leaf.size]
    if not found:
        return None
    flag: jax.Array = divided_dependent(*found, divided=lambda *_: jnp.asarray(False), whole=_never)
    return flag


def _never(*first: jax.Array) -> jax.Array:
    return jnp.any(jnp.stack([(n != n) & (n == n) for n in map(_one_number, first)]))


def _one_number(array: jax.Array) -> jax.Array:
    """Return the first element of an array, of which no axis is folded: it may be divided."""
    corner = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    return corner.reshape(())


def readers_first(
    arrays: Iterable[Keys], reads: Collection[tuple[str, str]]
) -> Iterator[tuple[Keys, list[str]]]:
    """Yield arrays in an order in which those that read another one come before it.

    Where two read each other, there is no such order, and one of them comes first.

    Parameters
    ----------
    arrays
        The keys of the traces that are in each.
    reads
        Pairs of keys: of a trace, and of one that it is computed from.

    Yields
    ------
    keys, readers
        Of an array, and of the traces before it that read it.
    """
    left, done = list(arrays), list[str]()
    while left:
        free = (keys for keys in left if not _readers(keys, reads, chain(*left)))
        keys = next(free, left[0])
        left.remove(keys)
        yield keys, _readers(keys, reads, done)
        done += keys


def _readers(keys: Keys, reads: Collection[tuple[str, str]], among: Iterable[str]) -> list[str]:
    """Return those of some traces, not in an array itself, that read one in it."""
    return [key for key in among if key not in keys and any((key, own) in reads for own in keys)]


def not_before(first: Sequence[PyTree], traces: Traces) -> Traces:
    """Return traces as they are, but not before other arrays are there; see `never`."""
    return known_after(never(first), traces)


def overwritten(
    update: Update, over_time: PyTree, of_samples: PyTree, traces: Traces, flag: jax.Array | None
) -> Traces:
    """Return updated traces, not before a flag is known.

    Parameters
    ----------
    update
        What is to be computed.
    over_time, of_samples, traces
        Its arguments.
    flag
        See `never`; ``None``: nothing has to come before.
    """

    def at_once(over_time: PyTree, of_samples: PyTree, traces: Traces, flag: PyTree) -> Traces:
        return update(over_time, of_samples, known_after(flag, traces))

    samples = jax.tree.leaves(traces)[0].shape[0]
    size = _block_size(samples, traces)
    is_complex = any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(traces))
    if size == samples or is_complex:
        return at_once(over_time, of_samples, traces, flag)
    by_block = functools.partial(_in_blocks, update, samples, size)
    on_cpu = functools.partial(divided_dependent, divided=at_once, whole=by_block)
    found: Traces = jax.lax.platform_dependent(
        over_time, of_samples, traces, flag, cpu=on_cpu, default=at_once
    )
    return found


def known_after(flag: jax.Array | None, traces: Traces) -> Traces:
    """Return traces as they are, but not before a flag is known."""
    if flag is None:
        return traces
    kept: Traces = jax.tree.map(lambda leaf: jnp.where(flag, jnp.zeros_like(leaf), leaf), traces)
    return kept


def _block_size(samples: int, traces: Traces) -> int:
    """Return the largest divisor of the number of samples whose traces fit into a block."""
    total = sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(traces))
    most = max(1, BLOCK_BYTES * samples // max(1, total))
    return next((n for n in range(min(most, samples), 1, -1) if samples % n == 0), 1)


def _in_blocks(
    update: Update,
    samples: int,
    size: int,
    over_time: PyTree,
    of_samples: PyTree,
    traces: Traces,
    flag: jax.Array | None,
) -> Traces:
    def add_block(traces: Traces, start: jax.Array) -> tuple[Traces, None]:
        def cut(leaf: jax.Array, axis: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)

        def gathered(array: jax.Array | SideBySide) -> jax.Array:
            block = as_one(jax.tree.map(lambda leaf: jnp.swapaxes(cut(leaf, 1), 0, 1), array))
            return jnp.swapaxes(jax.lax.optimization_barrier(block), 0, 1)

        def put(leaf: jax.Array, block: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, block, start, 0)

        recorded = jax.tree.map(gathered, over_time, is_leaf=lambda n: isinstance(n, SideBySide))
        block = update(recorded, *jax.tree.map(cut, (of_samples, traces)))
        return jax.tree.map(put, traces, block), None

    starts = jnp.arange(0, samples, size)
    if flag is not None:
        starts = starts + flag
    after: Traces = jax.lax.scan(add_block, traces, starts)[0]
    return after

"""Checksums of arrays, independent of how devices and processes shard them.

The bits of an array are words ``w`` of at most 32 bits, and ``p`` is the index of a word. The
checksum is

    sum_p (2 p + 1) w_p    modulo 2**64.

It detects every change of a single word, since an odd factor has an inverse, and every pair of
flipped bits. Each process adds up the words of its shards, without a second array of their size:
with ``p = sum_a n_a i_a`` for indices ``i_a`` along the axes and strides ``n_a``, it needs only
sums over all axes but one, block by block.
"""

import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

MODULUS = 2**64
BLOCK = 2**16

_Part = tuple[tuple[int, ...], Any]
"""Start indices of a part of an array, and the part."""


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return checksums of arrays by name; if processes share arrays, all processes must call it."""
    own = {name: _of_parts(np.shape(array), _parts(array)) for name, array in arrays.items()}
    shared = [name for name, array in arrays.items() if not _is_whole(array)]
    if shared:
        mine = np.array([own[name] for name in shared], np.uint64)
        # Without `jax_enable_x64`, JAX has no integers of 64 bits.
        halves = multihost_utils.process_allgather(mine.view(np.uint32))
        total = np.ascontiguousarray(halves).view(np.uint64).sum(axis=0, dtype=np.uint64)
        own |= zip(shared, total.tolist(), strict=True)
    return own


def checksums_of_format_1(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of format 1, for arrays that this process has in full."""
    return {
        name: zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, array in arrays.items()
        if _is_whole(array)
    }


def _is_whole(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _parts(array: Any) -> Iterable[_Part]:
    """Yield the parts of an array that this process counts, each element once in total."""
    if _is_whole(array):
        yield (0,) * np.ndim(array), array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(i.start or 0 for i in shard.index), shard.data


def _of_parts(shape: tuple[int, ...], parts: Iterable[_Part]) -> int:
    return sum(_of_part(shape, *part) for part in parts) % MODULUS


def _of_part(shape: tuple[int, ...], start: tuple[int, ...], part: Any) -> int:
    array = np.ascontiguousarray(part)
    each = max(1, array.itemsize // 4)
    words = array.reshape(-1).view(f"u{min(4, array.itemsize)}")
    if array.size == math.prod(shape):  # one axis: sums over short axes are slow
        shape, start = (words.size,), (0,)
    else:
        shape, start = (*shape, each), (*start, 0)
        words = words.reshape(*np.shape(part), each)
    total, stride = int(np.sum(words, dtype=np.uint64)), 1
    for axis in reversed(range(words.ndim)):
        others = tuple(other for other in range(words.ndim) if other != axis)
        along = np.sum(words, axis=others, dtype=np.uint64) if others else words
        total += 2 * stride * _by_place(along, start[axis])
        stride *= shape[axis]
    return total


def _by_place(words: Any, start: int) -> int:
    """Return the sum of words, each times its index."""
    places, total = np.arange(min(BLOCK, words.size), dtype=np.uint64), 0
    for begin in range(0, words.size, BLOCK):
        block = words[begin : begin + BLOCK]
        before = (start + begin) * int(np.sum(block, dtype=np.uint64))
        total += before + int(np.dot(block, places[: block.size]))
    return total

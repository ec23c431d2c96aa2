"""Sums of products over samples, in the fastest form for each device.

On a CPU, XLA reduces over a leading axis column by column, 10 to 70 times slower than memory. The
same sum as one addition per sample is a loop over contiguous numbers.

On a GPU, XLA fuses a reduction over 32 or more elements into the kernel that updates a trace, which
is then read once. A chain of additions, or a shorter reduction, is a separate kernel that reads the
trace again. On a TPU, XLA fuses a reduction of any length.

In a program on several devices, samples may be on different ones. The sum is then one reduction,
since each addition of two samples would be a collective.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax_kernels import runs_on_several_devices

UNROLLED = 32
BLOCK = 8


def sum_over_samples(products: Callable[[Any], Any], operands: Any, axes: int = 1) -> Any:
    """Return the sum over the first axes of ``products(operands)``.

    Parameters
    ----------
    products
        A function that treats samples independently. It is called on any part of the first axes,
        and on all of them folded into one.
    operands
        A pytree of arrays that share their first axes.
    axes
        Number of axes to sum over; 0 for one sample without such an axis.
    """
    if axes == 0:
        return products(operands)
    at_once = functools.partial(reduced, products, axes=axes)
    if 0 in jax.tree.leaves(operands)[0].shape[:axes]:
        return at_once(operands)
    by_addition = functools.partial(added_up, products, axes=axes)
    on_cpu = at_once if runs_on_several_devices() else by_addition
    return jax.lax.platform_dependent(operands, cpu=on_cpu, default=at_once)


def reduced(products: Callable[[Any], Any], operands: Any, axes: int) -> Any:
    """Return the sum as two reductions: of all axes but the last, and of the last.

    A reduction over several axes reshapes its operand, so that XLA cannot fuse it with the update
    of a trace. Without a barrier, XLA merges two consecutive reductions into one.
    """

    def reduce(product: jax.Array) -> jax.Array:
        if axes == 1:
            return product.sum(0)
        return jax.lax.optimization_barrier(product.sum(range(axes - 1))).sum(0)

    return jax.tree.map(reduce, products(operands))


def added_up(products: Callable[[Any], Any], operands: Any, axes: int) -> Any:
    """Return the sum as one addition per sample, in blocks if there are many."""
    samples = math.prod(jax.tree.leaves(operands)[0].shape[:axes])
    operands = jax.tree.map(lambda leaf: leaf.reshape(samples, *leaf.shape[axes:]), operands)

    def of_sample(index: Any) -> Any:
        # Each sample is read in place: a block that is sliced as a whole would be copied first.
        sample = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), operands)
        return jax.tree.map(lambda product: product[0], products(sample))

    def add(first: Any, second: Any) -> Any:
        return jax.tree.map(jnp.add, first, second)

    def of_block(start: Any, size: int) -> Any:
        return functools.reduce(add, (of_sample(start + i) for i in range(size)))

    first = samples if samples <= UNROLLED else samples % BLOCK or BLOCK
    total = of_block(0, first)
    if first == samples:
        return total
    starts = jnp.arange(first, samples, BLOCK)
    return jax.lax.scan(
        lambda sum_, start: (add(sum_, of_block(start, BLOCK)), None), total, starts
    )[0]

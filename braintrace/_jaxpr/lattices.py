r"""Lattices: the facts that an analysis knows about the sources of each element.

A *flow* is a NumPy array with the shape of a variable, followed by the axes of the lattice. Its
entries have a partial order with a least upper bound :math:`a \vee b` (`join`) and a least entry
(`empty`), for which :math:`a \vee a = a`. ``None`` means an array of least entries. An element that
depends on several others has the least upper bound of their entries. A flow that is too large is
therefore safe, and one that is too small is wrong.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

# The sources of the elements of an array; ``None``: no source is followed.
Flow: TypeAlias = np.ndarray | None

# The label of an element without a labelled source.
BOTTOM = -1

# The label of an element with sources of several labels.
TOP = -2


class Lattice(Protocol):
    """The operations of a lattice.

    Attributes
    ----------
    rank
        Number of axes that a flow has after the axes of the variable.
    """

    @property
    def rank(self) -> int: ...

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        """Return a flow of least entries, for a variable of this shape."""
        ...

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the least upper bound of two flows, elementwise."""
        ...

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        """Return the least upper bound along some axes, which are removed."""
        ...

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        """Join each element of a flow into the element of ``base`` at ``targets``.

        Elements are counted in order; -1 means no element.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Labels:
    """One label for each element: a number, `BOTTOM`, or `TOP` for several labels."""

    rank = 0

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.full(shape, BOTTOM, np.int32)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return merge(first, second)

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        axes = tuple(axes)
        if not axes:
            return flow
        # As unsigned numbers, `BOTTOM` is the largest.
        unsigned = flow.view(np.uint32).min(axes, initial=2**32 - 1, keepdims=True)
        low = unsigned.view(np.int32)
        is_one = ((flow == low) | (flow == BOTTOM)).all(axes)
        return np.where(is_one, low.squeeze(axes), np.int32(TOP))

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        used = (targets >= 0) & (flow != BOTTOM)
        places, values = (targets, flow) if used.all() else (targets[used], flow[used])
        added = self.empty([base.size])
        added[places] = values
        differ = added[places] != values
        if differ.any():
            added[places[differ]] = TOP
        return merge(base, added.reshape(base.shape))


def merge(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the labels of elements that come from two sources."""
    if first is second:
        return first
    differ = first != second
    if not differ.any():
        return first
    merged = np.where(first == BOTTOM, second, first)
    merged[differ & (first != BOTTOM) & (second != BOTTOM)] = TOP
    return merged


@dataclasses.dataclass(frozen=True)
class Sets:
    """A subset of ``count`` numbers for each element, as booleans along a last axis."""

    count: int
    rank = 1

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.zeros((*shape, self.count), bool)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.asarray(first | second)

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        return np.asarray(flow.any(tuple(axes)))

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        rows = np.concatenate([base.reshape(-1, self.count), self.empty([1])])
        np.logical_or.at(rows, targets.ravel(), flow.reshape(-1, self.count))
        return rows[:-1].reshape(base.shape)


def filled(lattice: Lattice, flow: Flow, shape: Sequence[int]) -> np.ndarray:
    """Return the flow of a variable as an array, also if it is ``None``."""
    return lattice.empty(shape) if flow is None else flow


def spread(lattice: Lattice, flow: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Broadcast a flow to the shape of another variable."""
    every = (*shape, *flow.shape[flow.ndim - lattice.rank :])
    return flow if flow.shape == every else np.broadcast_to(flow, every)


def joined(lattice: Lattice, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of several flows of one shape."""
    present = [flow for flow in flows if flow is not None]
    return functools.reduce(lattice.join, present) if present else None


def along(lattice: Lattice, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the least upper bound along some axes, at all elements of these axes."""
    if not axes:
        return flow
    one = np.expand_dims(lattice.over(flow, axes), tuple(axes))
    return spread(lattice, one, flow.shape[: flow.ndim - lattice.rank])


def everything(lattice: Lattice, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of all elements of some flows, as one entry."""
    every = [lattice.over(f, range(f.ndim - lattice.rank)) for f in flows if f is not None]
    return joined(lattice, every)

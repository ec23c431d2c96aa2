r"""Lattices: the facts that an analysis knows about the sources of each element.

A *flow* is a NumPy array with the shape of a variable, followed by the axes of the lattice. Its
entries have a partial order with a least upper bound :math:`a \vee b` (`join`) and a least entry
(`empty`), for which :math:`a \vee a = a`. ``None`` means an array of least entries. An element that
depends on several others has the least upper bound of their entries. A flow that is too large is
therefore safe, and one that is too small is wrong.

If a lattice is `PerVariable`, a flow is a single entry for a variable of any shape.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from jax.typing import ArrayLike

from ..._jax import Equation

Flow: TypeAlias = np.ndarray | None
"""The sources of the elements of an array; ``None``: no source is followed."""

BOTTOM = -1
"""The label of an element without a labelled source."""

TOP = -2
"""The label of an element with sources of several labels."""

_HIGHEST = np.iinfo(np.int32).max


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

    def moved(self, flow: np.ndarray) -> np.ndarray:
        """Return the flow of elements that have been moved."""
        ...


class PerVariable(abc.ABC):
    """A lattice with one entry for each variable, constants included.

    Its entries are immutable values. It does not use the table of primitives: `through` is the rule
    of all equations without bodies.
    """

    @abc.abstractmethod
    def of_value(self, value: ArrayLike) -> Any:
        """Return the entry of a literal or of a constant."""

    @abc.abstractmethod
    def join(self, first: Any, second: Any) -> Any:
        """Return the least upper bound of two entries."""

    @abc.abstractmethod
    def through(self, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the entries of an equation's results, given the entries of its operands."""

    @abc.abstractmethod
    def decided(self, choice: Any) -> Any:
        """Return the entry that a choice adds to all results of a branch or loop, if any."""

    def branch(self, choice: Any) -> int | None:
        """Return the index of the taken branch, if the entry of the index determines it."""
        return None


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
        top = np.max(flow, axis=axes, initial=BOTTOM)
        low = np.min(np.where(flow == BOTTOM, _HIGHEST, flow), axis=axes, initial=_HIGHEST)
        return _one_of(low, top)

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        used = (targets >= 0) & (flow != BOTTOM)
        places, values = targets[used], flow[used]
        added = self.empty([base.size])
        added[places] = values
        added[places[added[places] != values]] = TOP
        return merge(base, added.reshape(base.shape))

    def moved(self, flow: np.ndarray) -> np.ndarray:
        return flow


def _one_of(low: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Return the label if the lowest is the highest one, without counting `BOTTOM`."""
    labels = np.where(low == top, top, TOP)
    return np.where(low == _HIGHEST, BOTTOM, labels).astype(np.int32)


def merge(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the labels of elements that come from two sources."""
    if first is second or np.array_equal(first, second):
        return first
    merged = np.where(first == BOTTOM, second, first)
    conflict = (first != BOTTOM) & (second != BOTTOM) & (first != second)
    return np.where(conflict, TOP, merged).astype(np.int32)


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
        shape = base.shape[:-1]
        rows = np.concatenate([base.reshape(-1, self.count), self.empty([1])])
        np.logical_or.at(rows, targets.ravel(), flow.reshape(-1, self.count))
        return rows[:-1].reshape(*shape, self.count)

    def moved(self, flow: np.ndarray) -> np.ndarray:
        return flow


@dataclasses.dataclass(frozen=True)
class First:
    """The old element that each element is; of several, the one moved least.

    An entry contains the number of moves of the element, in the bits above its number. The highest
    number means several elements with equally many moves. An element that is reduced from several
    elements is none of them, so for coupled elements this is a guess, not a bound.
    """

    count: int
    rank = 0

    @property
    def _once(self) -> int:
        """The value of one move; numbers are in the lower bits, with one bit for several."""
        return 2 << self.count.bit_length()

    @property
    def _several(self) -> int:
        return self._once - 1

    def numbered(self, numbers: np.ndarray) -> np.ndarray:
        """Return the flow of elements that have numbers, or `BOTTOM`."""
        return np.where(numbers == BOTTOM, _HIGHEST, numbers).astype(np.int32)

    def numbers(self, flow: np.ndarray) -> np.ndarray:
        """Return the numbers of elements; `BOTTOM` for no element, or for several."""
        above = np.int32(32 - self._several.bit_length())
        numbers: np.ndarray = np.left_shift(flow, above)
        numbers >>= above  # the number for several has all bits set, which makes it -1
        return numbers

    def empty(self, shape: Sequence[int]) -> np.ndarray:
        return np.full(shape, _HIGHEST, np.int32)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        if first is second or not np.any(differ := first != second):
            return first
        several = ((first ^ second) < self._once) & differ
        return np.where(several, first | np.int32(self._several), np.minimum(first, second))

    def over(self, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        low = np.min(flow, axis=tuple(axes), initial=_HIGHEST)
        high = np.max(np.where(flow == _HIGHEST, 0, flow), axis=tuple(axes), initial=0)
        return np.where(low == high, low, _HIGHEST).astype(np.int32)

    def put(self, base: np.ndarray, targets: np.ndarray, flow: np.ndarray) -> np.ndarray:
        used = (targets >= 0) & (flow != _HIGHEST)
        places, values = targets[used], flow[used]
        added = self.empty([base.size])
        added[places] = values
        added[places[added[places] != values]] = _HIGHEST
        return self.join(base, added.reshape(base.shape))

    def moved(self, flow: np.ndarray) -> np.ndarray:
        """Count one more move, up to the largest count."""
        has_room = flow < _HIGHEST - 2 * self._once
        result: np.ndarray = flow + has_room.view(np.int8) * np.int32(self._once)
        return result


# --- functions of any lattice


def cells(lattice: Lattice, flow: np.ndarray) -> tuple[int, ...]:
    """Return the shape of one entry: the axes of the lattice."""
    return flow.shape[flow.ndim - lattice.rank :]


def filled(lattice: Lattice, flow: Flow, shape: Sequence[int]) -> np.ndarray:
    """Return the flow of a variable as an array, also if it is ``None``."""
    return lattice.empty(shape) if flow is None else flow


def spread(lattice: Lattice, flow: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Broadcast a flow to the shape of another variable."""
    return np.broadcast_to(flow, (*shape, *cells(lattice, flow)))


def joined(lattice: Lattice | PerVariable, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of several flows of one shape."""
    present = [flow for flow in flows if flow is not None]
    return functools.reduce(lattice.join, present) if present else None


def along(lattice: Lattice, flow: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the least upper bound along some axes, which keep one element each."""
    return np.expand_dims(lattice.over(flow, axes), tuple(axes)) if axes else flow


def everything(lattice: Lattice, flows: Sequence[Flow]) -> Flow:
    """Return the least upper bound of all elements of some flows, as one entry."""
    return joined(
        lattice,
        [lattice.over(f, range(f.ndim - lattice.rank)) for f in flows if f is not None],
    )


def taken(lattice: Lattice, flows: Sequence[np.ndarray], sources: np.ndarray) -> np.ndarray:
    """Return the entries of elements, counted through all flows; -1: no element."""
    rows = [f.reshape(-1, *cells(lattice, f)) for f in flows]
    return np.asarray(np.concatenate([*rows, lattice.empty([1])])[sources])


def same(first: Flow, second: Flow) -> bool:
    """Test whether two flows are equal."""
    if first is None or second is None:
        return first is second
    return first is second or np.array_equal(first, second)

"""Axis along which an array is sharded with its group elements.

A hidden group is sharded along one axis of its elements. An array whose elements each reach one
group element (a state, the output of an operation, a parameter) can be sharded along an axis if
every element is then in the part of its group element: no communication is needed between the two.
Part numbers represent the elements; `ANYWHERE` marks elements that reach no group element.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from .._jax import Atom, Var
from .._jaxpr import Program
from .._jaxpr.dataflow import Constants, Labels, Question, flows_to

ANYWHERE = -1

Parts = np.ndarray
"""Part number of each element, as an array of the same shape."""


def parts_along(shape: tuple[int, ...], axis: int, count: int) -> Parts:
    """Return the part of every element of an array that is sharded along an axis."""
    size = shape[axis]
    along = np.arange(size) * count // max(1, size)
    aligned = [1] * len(shape)
    aligned[axis] = size
    return np.broadcast_to(along.reshape(aligned), shape)


def parts_of(positions: np.ndarray, of_positions: Parts) -> Parts:
    """Return the parts of array elements, given the parts of the group elements that they reach."""
    found: Parts = of_positions.ravel()[np.maximum(positions, 0)]
    return np.where(positions >= 0, found, ANYWHERE)


def is_sharded_along(axis: int, parts: Parts, count: int) -> bool:
    """Test whether sharding an array along an axis places every element in its part."""
    if parts.size == 0 or parts.shape[axis] % count:
        return False
    own = parts_along(parts.shape, axis, count)
    is_free = parts == ANYWHERE
    return bool(np.all(is_free | (parts == own)) and not is_free.all())


def sharded_axis(parts: Parts, count: int) -> int | None:
    """Return the axis along which an array is sharded; ``None`` if there is none."""
    axes = reversed(range(parts.ndim))
    return next((axis for axis in axes if is_sharded_along(axis, parts, count)), None)


def axes_before(
    program: Program, variables: Iterable[Var], target: Atom, parts: Parts | None, count: int
) -> Iterator[tuple[Var, int | None]]:
    """Yield the inputs that a variable depends on, and the axes along which they are sharded.

    Parameters
    ----------
    program, variables
        A program, and the inputs to consider (parameters).
    target, parts
        A variable computed from them, and its parts; ``None``: it is not sharded.
    count
        Number of parts.

    Yields
    ------
    var, axis
        The axis is ``None`` if elements of several parts are coupled.
    """
    behind, constants = program.depends_on([target]), Constants(program)
    for var in variables:
        if var in behind and parts is None:
            yield var, None
        elif var in behind:
            assert parts is not None
            axes = (axis for axis, size in enumerate(var.aval.shape) if size % count == 0)
            found = (a for a in axes if _leads_to(constants, var, a, target, parts, count))
            yield var, next(found, None)


def _leads_to(
    constants: Constants, var: Var, axis: int, target: Atom, parts: Parts, count: int
) -> bool:
    """Test whether each part of a variable along an axis determines the same part of a target."""
    start = {var: parts_along(var.aval.shape, axis, count)}
    (labels,) = flows_to(Question(Labels()), constants, start, [target])
    return labels is not None and np.array_equal(labels, parts)

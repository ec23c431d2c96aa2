"""Data movement: the source of each output element of a reshape, slice or gather.

For every output of such an equation, `source_map` returns an integer array of the output's shape.
An entry is the index of an element among all elements of all operands, counted in order. It is
``NOWHERE`` for an element that comes from no operand.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from .._jax import Atom, Equation, bind

NOWHERE = -1

_Sources = list[np.ndarray]


def moved(equation: Equation, operands: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Run a move on other arrays instead of its operands.

    ``None`` for a move with index operands.
    """
    move = _MOVES.get(equation.primitive.name)
    return None if move is None else move(equation, *operands)


def _reshape(equation: Equation, x: np.ndarray) -> _Sources:
    return [x.reshape(equation.outvars[0].aval.shape)]


def _reshape_in_order(equation: Equation, x: np.ndarray) -> _Sources:
    order = equation.params["dimensions"]  # for example, `order="F"` of `jax.numpy.reshape`
    return _reshape(equation, x if order is None else x.transpose(order))


def _transpose(equation: Equation, x: np.ndarray) -> _Sources:
    return [x.transpose(equation.params["permutation"])]


def _broadcast_in_dim(equation: Equation, x: np.ndarray) -> _Sources:
    shape = equation.outvars[0].aval.shape
    aligned = [1] * len(shape)
    for axis, size in zip(equation.params["broadcast_dimensions"], x.shape, strict=True):
        aligned[axis] = size
    return [np.broadcast_to(x.reshape(aligned), shape)]


def _slice(equation: Equation, x: np.ndarray) -> _Sources:
    params = equation.params
    steps = params["strides"] or (1,) * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [x[tuple(slice(*limit) for limit in limits)]]


def _rev(equation: Equation, x: np.ndarray) -> _Sources:
    return [np.flip(x, equation.params["dimensions"])]


def _concatenate(equation: Equation, *parts: np.ndarray) -> _Sources:
    return [np.concatenate(parts, axis=equation.params["dimension"])]


def _split(equation: Equation, x: np.ndarray) -> _Sources:
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return list(np.split(x, ends, axis=equation.params["axis"]))


def _stack(equation: Equation, *parts: np.ndarray) -> _Sources:
    return [np.stack(parts, axis=equation.params["axis"])]


def _unstack(equation: Equation, x: np.ndarray) -> _Sources:
    axis = equation.params["axis"]
    return [np.take(x, index, axis=axis) for index in range(x.shape[axis])]


def _tile(equation: Equation, x: np.ndarray) -> _Sources:
    return [np.tile(x, equation.params["reps"])]


def _pad(equation: Equation, x: np.ndarray, value: np.ndarray) -> _Sources:
    """Fill the gaps; negative padding leaves elements out."""
    shape = equation.outvars[0].aval.shape
    padded = np.full(shape, value, x.dtype)
    taken, places = [], []
    for old, new, (low, _, gap) in zip(
        x.shape, shape, equation.params["padding_config"], strict=True
    ):
        step = gap + 1
        first, last = max(0, -(low // step)), min(old, -((low - new) // step))
        taken.append(slice(first, max(first, last)))
        places.append(slice(low + first * step, low + max(first, last) * step, step))
    padded[tuple(places)] = x[tuple(taken)]
    return [padded]


_MOVES: dict[str, Callable[..., _Sources]] = {
    "reshape": _reshape_in_order,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "rev": _rev,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
}


# Operands that contain elements; the other operands are indices.
_INDEXED_MOVES = {
    "gather": (0,),
    "scatter": (0, 2),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
}


MOVES = frozenset(_MOVES)
"""Names of the moves without index operands."""


def is_data_movement(equation: Equation) -> bool:
    """Test whether an equation only moves elements."""
    name = equation.primitive.name
    is_applied = equation.params.get("update_jaxpr") is not None  # `.at[...].apply(function)`
    return name in _MOVES or (name in _INDEXED_MOVES and not is_applied)


def moved_operands(equation: Equation) -> tuple[int, ...]:
    """Return the operands whose elements a move copies to its outputs."""
    carried = _INDEXED_MOVES.get(equation.primitive.name)
    return tuple(range(len(equation.invars))) if carried is None else carried


def source_map(
    equation: Equation, constant: Callable[[Atom], np.ndarray | None]
) -> list[np.ndarray] | None:
    """Return the source of each output element of a move.

    Parameters
    ----------
    equation
        An equation for which `is_data_movement` holds.
    constant
        Returns the value of an operand that depends on no input of the program, else ``None``.

    Returns
    -------
    list of integer arrays or None
        ``None`` if the move depends on data.
    """
    carried = moved_operands(equation)
    shapes = [equation.invars[operand].aval.shape for operand in carried]
    offsets = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    indices = [
        np.arange(start, stop, dtype=np.int32).reshape(shape)
        for start, stop, shape in zip(offsets[:-1], offsets[1:], shapes, strict=True)
    ]
    move = _MOVES.get(equation.primitive.name)
    if move is not None:
        return move(equation, *indices)
    if equation.primitive.name == "gather":
        places = constant(equation.invars[1])
        return None if places is None else [elements_of_slices(equation, places)]
    return _run_on_indices(equation, carried, indices, constant)


def _run_on_indices(
    equation: Equation,
    carried: Sequence[int],
    indices: Sequence[np.ndarray],
    constant: Callable[[Atom], np.ndarray | None],
) -> list[np.ndarray] | None:
    """Run the primitive itself on the numbers of elements."""
    operands: list[np.ndarray] = []
    for operand, atom in enumerate(equation.invars):
        value = indices[carried.index(operand)] if operand in carried else constant(atom)
        if value is None:
            return None
        operands.append(value)
    with jax.ensure_compile_time_eval():
        return [np.asarray(value) for value in bind(equation, operands)]


_OF_GATHER = (
    "offset_dims",
    "collapsed_slice_dims",
    "start_index_map",
    "start_indices_batching_dims",
)
_OF_SCATTER = (
    "update_window_dims",
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
)
"""Dimension numbers of a scatter, and of a gather that reads where the scatter writes.

In order: the axes of the slices within one slice; the axes of the array that slices do not have;
the axes of the array that an index counts along; and the batch axes of the indices."""


def elements_of_slices(equation: Equation, places: np.ndarray) -> np.ndarray:
    """Return the elements of operand 0 that a gather reads or a scatter writes.

    Parameters
    ----------
    equation
        The gather or scatter.
    places
        The value of its indices.

    Returns
    -------
    numpy.ndarray
        A number for each element of a gather's result, or of a scatter's updates. It is `NOWHERE`
        for slices that extend out of the array, unless these are clipped (``CLIP``).
    """
    is_gather = equation.primitive.name == "gather"
    array, slices = equation.invars[0], equation.outvars[0] if is_gather else equation.invars[2]
    shape, sizes, numbers = (
        array.aval.shape,
        slices.aval.shape,
        equation.params["dimension_numbers"],
    )
    names = _OF_GATHER if is_gather else _OF_SCATTER
    window, removed, indexed, batch = (getattr(numbers, name) for name in names)
    grid = np.indices(sizes, sparse=True)
    alone = tuple(grid[axis] for axis in range(len(sizes)) if axis not in window)
    removed = (*removed, *numbers.operand_batching_dims)
    sliced = [axis for axis in range(len(shape)) if axis not in removed]
    at: dict[int, np.ndarray] = {a: grid[w] for a, w in zip(sliced, window, strict=True)}
    at.update({a: alone[i] for a, i in zip(numbers.operand_batching_dims, batch, strict=True)})
    inside = np.ones(sizes, bool)
    for number, axis in enumerate(indexed):
        last = shape[axis] - (sizes[window[sliced.index(axis)]] if axis in sliced else 1)
        start = places[(*alone, number)].astype(np.int64)
        if equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            start = np.clip(start, 0, last)
        is_inside = (start >= 0) & (start <= last)
        inside &= is_inside
        at[axis] = at.get(axis, 0) + np.where(is_inside, start, 0)
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    elements = sum(at.get(axis, 0) * stride for axis, stride in enumerate(strides))
    return np.where(inside, elements, NOWHERE).astype(np.int32)

"""Moves: the source of each element of a reshape, slice, gather or scatter.

A move without index operands runs with NumPy, on the flows of its operands or on the numbers of
their elements. With constant indices, each element is followed to its position. With data-dependent
indices, an element may be at any position along the indexed axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.lax import GatherScatterMode

from ..._jax import Atom, Equation
from .constants import Constants, Sources
from .lattices import Flow, Lattice, along, everything, filled, joined, spread, taken

NOWHERE = -1
"""Number of an element that has no source in any operand."""

Take: TypeAlias = Callable[..., list[np.ndarray]]
"""``(equation, *operands) -> results``: a move of any arrays."""

Value: TypeAlias = Callable[[Atom], np.ndarray | None]
"""Return the value of an operand that depends on no input of the program, else ``None``."""


# --- moves without index operands


def reshape(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``squeeze`` or ``expand_dims`` on NumPy arrays."""
    return [x.reshape(equation.outvars[0].aval.shape)]


def reshape_in_order(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``reshape`` on NumPy arrays."""
    order = equation.params["dimensions"]  # for example, `order="F"` of `jax.numpy.reshape`
    return reshape(equation, x if order is None else x.transpose(order))


def transpose(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``transpose`` on NumPy arrays."""
    return [x.transpose(equation.params["permutation"])]


def broadcast_in_dim(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``broadcast_in_dim`` on NumPy arrays."""
    shape = equation.outvars[0].aval.shape
    aligned = [1] * len(shape)
    for axis, size in zip(equation.params["broadcast_dimensions"], x.shape, strict=True):
        aligned[axis] = size
    return [np.broadcast_to(x.reshape(aligned), shape)]


def strided_slice(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``slice`` on NumPy arrays."""
    params = equation.params
    steps = params["strides"] or (1,) * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [x[tuple(slice(*limit) for limit in limits)]]


def rev(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``rev`` on NumPy arrays."""
    return [np.flip(x, equation.params["dimensions"])]


def concatenate(equation: Equation, *parts: np.ndarray) -> list[np.ndarray]:
    """Run ``concatenate`` on NumPy arrays."""
    return [np.concatenate(parts, axis=equation.params["dimension"])]


def split(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``split`` on NumPy arrays."""
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return list(np.split(x, ends, axis=equation.params["axis"]))


def stack(equation: Equation, *parts: np.ndarray) -> list[np.ndarray]:
    """Run ``stack`` on NumPy arrays."""
    return [np.stack(parts, axis=equation.params["axis"])]


def unstack(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``unstack`` on NumPy arrays."""
    axis = equation.params["axis"]
    return [np.take(x, index, axis=axis) for index in range(x.shape[axis])]


def tile(equation: Equation, x: np.ndarray) -> list[np.ndarray]:
    """Run ``tile`` on NumPy arrays."""
    return [np.tile(x, equation.params["reps"])]


def pad(equation: Equation, x: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Fill the gaps; negative padding leaves elements out."""
    shape = equation.outvars[0].aval.shape
    padded = np.full(shape, value, x.dtype)
    read, places = [], []
    for old, new, (low, _, gap) in zip(
        x.shape, shape, equation.params["padding_config"], strict=True
    ):
        step = gap + 1
        first, last = max(0, -(low // step)), min(old, -((low - new) // step))
        read.append(slice(first, max(first, last)))
        places.append(slice(low + first * step, low + max(first, last) * step, step))
    padded[tuple(places)] = x[tuple(read)]
    return [padded]


def numbered(take: Take, equation: Equation, _: object) -> list[np.ndarray]:
    """Return the sources of the results of a move without index operands."""
    return take(equation, *_numbers(equation, range(len(equation.invars))))


def moved(
    take: Take,
    lattice: Lattice,
    equation: Equation,
    operands: Sequence[Flow],
    constants: Constants,
) -> list[Flow]:
    """Follow a move without index operands."""
    pairs = zip(operands, equation.invars, strict=True)
    flows = [filled(lattice, flow, atom.aval.shape) for flow, atom in pairs]
    if not lattice.rank:
        return [*map(lattice.moved, take(equation, *flows))]
    sources = constants.sources(equation, functools.partial(numbered, take))
    return [lattice.moved(taken(lattice, flows, source)) for source in sources or ()]


# --- moves with index operands


def _numbers(equation: Equation, operands: Sequence[int]) -> list[np.ndarray]:
    """Return the numbers of the elements of some operands."""
    shapes = [equation.invars[operand].aval.shape for operand in operands]
    edges = np.cumsum([0, *map(math.prod, shapes)])
    return [
        np.arange(start, stop, dtype=np.int32).reshape(shape)
        for start, stop, shape in zip(edges[:-1], edges[1:], shapes, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of an array that an equation reads or writes.

    A slice that starts at operands is the one slice of a gather in mode ``CLIP``, and the write of
    such a slice is a scatter of one.

    Attributes
    ----------
    atom
        The slices.
    indices
        The operands that are indices.
    window
        The axes of ``atom`` within one slice.
    removed
        The axes of the array that slices do not have.
    indexed
        For each column of the indices, the axis of the array that it counts along.
    aligned
        Axes of the array that correspond to an axis of the indices.
    clips
        Whether slices that extend out of the array are moved into it.
    """

    atom: Atom
    indices: Sequence[int]
    window: tuple[int, ...]
    removed: tuple[int, ...]
    indexed: tuple[int, ...]
    aligned: Mapping[int, int]
    clips: bool

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the axes of ``atom`` that count slices."""
        return tuple(n for a, n in enumerate(self.atom.aval.shape) if a not in self.window)


def slices_of(equation: Equation) -> Slices:
    """Return the slices of a gather or scatter, or of a slice with its start as an operand."""
    (array, *others), params = equation.invars, equation.params
    is_read = equation.primitive.name in ("gather", "dynamic_slice")
    if "dimension_numbers" not in params:
        axes, slices = tuple(range(len(array.aval.shape))), others[0]
        indices = range(1 if is_read else 2, len(equation.invars))
        return Slices(equation.outvars[0] if is_read else slices, indices, axes, (), axes, {}, True)
    numbers, clips = params["dimension_numbers"], params["mode"] == GatherScatterMode.CLIP
    if is_read:
        slices, window, indexed = equation.outvars[0], numbers.offset_dims, numbers.start_index_map
        removed, batch = numbers.collapsed_slice_dims, numbers.start_indices_batching_dims
    else:
        slices, window = others[1], numbers.update_window_dims
        indexed, removed = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        batch = numbers.scatter_indices_batching_dims
    aligned = dict(zip(numbers.operand_batching_dims, batch, strict=True))
    return Slices(slices, [1], window, (*removed, *aligned), indexed, aligned, clips)


def elements_of_slices(equation: Equation, places: np.ndarray) -> np.ndarray:
    """Return the elements of operand 0 that an equation reads or writes.

    Parameters
    ----------
    equation
        The equation; see `slices_of`.
    places
        The value of its indices.

    Returns
    -------
    numpy.ndarray
        A number for each element of the slices. It is `NOWHERE` for slices that extend out of the
        array, unless these are clipped.
    """
    slices = slices_of(equation)
    shape, sizes = equation.invars[0].aval.shape, slices.atom.aval.shape
    grid = np.indices(sizes, sparse=True)
    alone = tuple(grid[axis] for axis in range(len(sizes)) if axis not in slices.window)
    sliced = [axis for axis in range(len(shape)) if axis not in slices.removed]
    at: dict[int, np.ndarray] = {a: grid[w] for a, w in zip(sliced, slices.window, strict=True)}
    at.update({a: alone[i] for a, i in slices.aligned.items()})
    inside = np.ones(sizes, bool)
    for number, axis in enumerate(slices.indexed):
        last = shape[axis] - (sizes[slices.window[sliced.index(axis)]] if axis in sliced else 1)
        start = places[(*alone, number)].astype(np.int64)
        if slices.clips:
            start = np.clip(start, 0, last)
        is_inside = (start >= 0) & (start <= last)
        inside &= is_inside
        at[axis] = at.get(axis, 0) + np.where(is_inside, start, 0)
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    elements = sum(at.get(axis, 0) * stride for axis, stride in enumerate(strides))
    return np.where(inside, elements, NOWHERE).astype(np.int32)


def _first_elements(equation: Equation) -> np.ndarray:
    """Return the elements of slices whose indices are all zero."""
    slices = slices_of(equation)
    return elements_of_slices(equation, np.zeros((*slices.batch, len(slices.indexed)), np.int32))


def axes_of_places(equation: Equation) -> tuple[int, ...]:
    """Return the axes of operand 0 along which slices may be at several places."""
    slices, shape = slices_of(equation), equation.invars[0].aval.shape
    sliced = [axis for axis in range(len(shape)) if axis not in slices.removed]
    widths = {a: slices.atom.aval.shape[w] for a, w in zip(sliced, slices.window, strict=True)}
    return tuple(axis for axis in slices.indexed if widths.get(axis) != shape[axis])


def _places(equation: Equation, constant: Value) -> np.ndarray | None:
    """Return the value of the indices of an equation, if it depends on no input."""
    values = [constant(equation.invars[operand]) for operand in slices_of(equation).indices]
    if any(value is None for value in values):
        return None
    return values[0] if "dimension_numbers" in equation.params else np.asarray(values)


def sources_of_read(equation: Equation, constant: Value) -> Sources:
    """Return the sources of the elements of slices that are read."""
    places = _places(equation, constant)
    return None if places is None else [elements_of_slices(equation, places)]


def sources_of_write(equation: Equation, constant: Value) -> Sources:
    """Return the sources of the elements of an array after slices of it are written."""
    places = _places(equation, constant)
    if places is None:
        return None
    written = next(i for i in (1, 2) if i not in slices_of(equation).indices)
    base, updates = _numbers(equation, (0, written))
    targets, after = elements_of_slices(equation, places), base.ravel()
    after[targets[targets != NOWHERE]] = updates[targets != NOWHERE]
    return [after.reshape(base.shape)]


# --- rules of moves with index operands


def read(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a gather or a slice; each slice depends on its indices."""
    (flow, *places), shape = operands, equation.outvars[0].aval.shape
    if flow is not None:
        sources = constants.sources(equation, sources_of_read)
        if sources is None:
            anywhere = along(lattice, flow, axes_of_places(equation))
            flow = spread(lattice, anywhere, equation.invars[0].aval.shape)
            sources = [_first_elements(equation)]
        flow = lattice.moved(taken(lattice, [flow], sources[0]))
    of_slices = everything(lattice, places)
    if equation.primitive.name == "gather" and places[0] is not None:
        of_slices = lattice.over(places[0], [len(equation.invars[1].aval.shape) - 1])
        of_slices = np.expand_dims(of_slices, tuple(slices_of(equation).window))
    spread_out = None if of_slices is None else spread(lattice, of_slices, shape)
    return [joined(lattice, [flow, spread_out])]


def write(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow updates to their positions; every element depends on all indices."""
    shape, indices = equation.invars[0].aval.shape, slices_of(equation).indices
    flow = filled(lattice, operands[0], shape)
    if equation.params.get("update_jaxpr") is None or equation.primitive.name != "scatter":
        (updates,) = (f for i, f in enumerate(operands) if i not in (0, *indices))
        flow = _updated(lattice, equation, flow, updates, constants)
    one = everything(lattice, [operands[i] for i in indices])
    return [flow if one is None else lattice.join(flow, spread(lattice, one, shape))]


def _updated(
    lattice: Lattice, equation: Equation, flow: np.ndarray, updates: Flow, constants: Constants
) -> np.ndarray:
    """Return the flow of an array after a write; unless it adds, old elements are overwritten."""
    name, shape = equation.primitive.name, equation.invars[0].aval.shape
    places = _places(equation, constants.value)
    targets = _first_elements(equation) if places is None else elements_of_slices(equation, places)
    if places is not None and name in ("scatter", "dynamic_update_slice"):
        flow = _cleared(lattice, flow, targets)
    if updates is None:
        return flow
    put = lattice.put(lattice.empty(shape), targets, lattice.moved(updates))
    if places is None:
        put = spread(lattice, along(lattice, put, axes_of_places(equation)), shape)
    return lattice.join(flow, put)


def _cleared(lattice: Lattice, base: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a flow without some elements, which are overwritten."""
    shape = base.shape[: base.ndim - lattice.rank]
    sources = np.arange(int(np.prod(shape)))
    sources[targets[targets != NOWHERE]] = NOWHERE
    return taken(lattice, [base], sources.reshape(shape))

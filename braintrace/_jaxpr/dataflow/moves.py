"""Moves: the source of each element of a reshape, slice, gather or scatter.

A move without index operands runs with NumPy, on the flows of its operands or on the numbers of
their elements. With constant indices, each element is followed to its position. With data-dependent
indices, an element may be at any position along the indexed axes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from ..._jax import Atom, Equation, bind
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


def run_on_numbers(carried: Sequence[int], equation: Equation, constant: Value) -> Sources:
    """Return the sources of the results of a move with index operands, by running it.

    ``carried`` are the operands that contain elements; the others are indices.
    """
    numbers = dict(zip(carried, _numbers(equation, carried), strict=True))
    atoms = enumerate(equation.invars)
    operands = [numbers[i] if i in numbers else constant(atom) for i, atom in atoms]
    if any(operand is None for operand in operands):
        return None
    with jax.ensure_compile_time_eval():
        return [np.asarray(value) for value in bind(equation, operands)]


def _numbers(equation: Equation, operands: Sequence[int]) -> list[np.ndarray]:
    """Return the numbers of the elements of some operands."""
    shapes = [equation.invars[operand].aval.shape for operand in operands]
    edges = np.cumsum([0, *map(math.prod, shapes)])
    return [
        np.arange(start, stop, dtype=np.int32).reshape(shape)
        for start, stop, shape in zip(edges[:-1], edges[1:], shapes, strict=True)
    ]


def sources_of_gather(equation: Equation, constant: Value) -> Sources:
    """Return the sources of the elements of a gather."""
    places = constant(equation.invars[1])
    return None if places is None else [elements_of_slices(equation, places)]


sources_of_slice = functools.partial(run_on_numbers, [0])
sources_of_update = functools.partial(run_on_numbers, [0, 1])
sources_of_scatter = functools.partial(run_on_numbers, [0, 2])


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


# --- rules of moves with index operands


def _with_places(
    lattice: Lattice, equation: Equation, flow: Flow, places: Sequence[Flow]
) -> list[Flow]:
    """Return the flow of a result whose elements all depend on some indices as well."""
    shape = equation.outvars[0].aval.shape
    one = everything(lattice, places)
    return [joined(lattice, [flow, None if one is None else spread(lattice, one, shape)])]


def _first_places(atom: Atom) -> np.ndarray:
    return np.zeros(atom.aval.shape, atom.aval.dtype)


def gather(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a gather; each slice depends on one index."""
    flow, places = operands
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    if flow is not None:
        sources = constants.sources(equation, sources_of_gather)
        if sources is None:
            looked_up = tuple(numbers.start_index_map)
            size = equation.invars[0].aval.shape
            flow = spread(lattice, along(lattice, flow, looked_up), size)
            sources = [elements_of_slices(equation, _first_places(equation.invars[1]))]
        flow = lattice.moved(taken(lattice, [flow], sources[0]))
    if places is not None:
        of_slices = lattice.over(places, [len(equation.invars[1].aval.shape) - 1])
        places = spread(lattice, np.expand_dims(of_slices, tuple(numbers.offset_dims)), shape)
    return [joined(lattice, [flow, places])]


def scatter(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow] | None:
    """Follow updates to their positions; a plain ``scatter`` overwrites old elements."""
    base, places, updates = operands
    if places is not None:
        return None
    shape = equation.invars[0].aval.shape
    base = filled(lattice, base, shape)
    updates = None if updates is None else lattice.moved(updates)
    is_plain = equation.primitive.name == "scatter"
    if is_plain and equation.params["update_jaxpr"] is not None:  # `.at[...].apply`
        return [base]
    indices = constants.value(equation.invars[1])
    if indices is not None:
        targets = elements_of_slices(equation, indices)
        base = _cleared(lattice, base, targets) if is_plain else base
        return [base if updates is None else lattice.put(base, targets, updates)]
    if updates is None:
        return [base]
    looked_up = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    targets = elements_of_slices(equation, _first_places(equation.invars[1]))
    put = lattice.put(lattice.empty(shape), targets, updates)
    return [lattice.join(base, spread(lattice, along(lattice, put, tuple(looked_up)), shape))]


def _cleared(lattice: Lattice, base: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a flow without some elements, which are overwritten."""
    shape = base.shape[: base.ndim - lattice.rank]
    sources = np.arange(int(np.prod(shape)))
    sources[targets[targets != NOWHERE]] = NOWHERE
    return taken(lattice, [base], sources.reshape(shape))


def dynamic_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a slice with a data-dependent start along the axes that it shortens."""
    flow, *places = operands
    if flow is not None:
        whole, cut = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        sources = constants.sources(equation, sources_of_slice)
        if sources is None:
            flow = spread(lattice, along(lattice, flow, _shortened(whole, cut)), cut)
        else:
            flow = lattice.moved(taken(lattice, [flow], sources[0]))
    return _with_places(lattice, equation, flow, places)


def dynamic_update_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a write to a slice with a data-dependent start."""
    base, update, *places = operands
    shape, cut = (equation.invars[i].aval.shape for i in range(2))
    sources = None
    if base is not None or update is not None:
        sources = constants.sources(equation, sources_of_update)
    if sources is not None:
        flows = [filled(lattice, base, shape), filled(lattice, update, cut)]
        flow: Flow = lattice.moved(taken(lattice, flows, sources[0]))
    elif update is not None:
        written = spread(lattice, along(lattice, update, _shortened(shape, cut)), shape)
        flow = joined(lattice, [base, written])
    else:
        flow = base
    return _with_places(lattice, equation, flow, places)


def _shortened(whole: Sequence[int], cut: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(cut) if size != whole[axis])

"""Primitives that an analysis follows element by element.

For any other primitive, every element of every result depends on all elements of all operands.
Rules are about values: a result may depend on an element and have no derivative with respect to it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.lax import GatherScatterMode

from .._jax import Atom, Equation
from .evaluate import Constants
from .lattices import Flow, Lattice, along, everything, filled, joined, spread

# --- moves
#
# Moves without index operands run with NumPy, on the numbers of the elements of their operands.
# Reads and writes at indices follow each column of the indices: a constant column selects, and
# along the axes of a column that data choose (the write index of a ring buffer), an element may be
# anywhere. A write at a chosen index is a selection: each element is kept or replaced.

# Number of an element that has no source in any operand.
NOWHERE = -1

Params: TypeAlias = Mapping[str, Any]
Moved: TypeAlias = list[np.ndarray]

# ``(params, shape of the first result, *operands) -> results``: a move of any arrays.
Take: TypeAlias = Callable[..., Moved]


def _reshape(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    order = params.get("dimensions") if "new_sizes" in params else None  # `order="F"` of NumPy
    return [(x if order is None else x.transpose(order)).reshape(shape)]


def _broadcast(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    aligned = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        aligned[axis] = size
    return [np.broadcast_to(x.reshape(aligned), shape)]


def _slice(params: Params, shape: tuple[int, ...], x: np.ndarray) -> Moved:
    steps = params["strides"] or (1,) * x.ndim
    limits = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [x[tuple(slice(*limit) for limit in limits)]]


def _pad(params: Params, shape: tuple[int, ...], x: np.ndarray, value: np.ndarray) -> Moved:
    padded, read, places = np.full(shape, value, x.dtype), [], []
    for old, new, (low, _, gap) in zip(x.shape, shape, params["padding_config"], strict=True):
        step = gap + 1
        first, last = max(0, -(low // step)), min(old, -((low - new) // step))
        read.append(slice(first, max(first, last)))
        places.append(slice(low + first * step, low + max(first, last) * step, step))
    padded[tuple(places)] = x[tuple(read)]
    return [padded]


# Moves without index operands.
TAKE: Mapping[str, Take] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "transpose": lambda params, shape, x: [x.transpose(params["permutation"])],
    "rev": lambda params, shape, x: [np.flip(x, params["dimensions"])],
    "tile": lambda params, shape, x: [np.tile(x, params["reps"])],
    "concatenate": lambda params, shape, *xs: [np.concatenate(xs, params["dimension"])],
    "stack": lambda params, shape, *xs: [np.stack(xs, params["axis"])],
    "split": lambda p, shape, x: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "unstack": lambda params, shape, x: [*np.moveaxis(x, params["axis"], 0)],
}

PLAIN_MOVES = frozenset(TAKE)
READS = frozenset({"gather", "dynamic_slice"})
WRITES = frozenset({"scatter", "dynamic_update_slice"})


def moved_operands(equation: Equation) -> Sequence[int]:
    """Return the operands whose elements an equation moves to its results, if it only moves.

    For any other equation, the result is empty.
    """
    name = equation.primitive.name
    if equation.params.get("update_jaxpr") is not None:  # `.at[...].apply(function)`
        return ()
    if name in TAKE:
        return range(len(equation.invars))
    return (0,) if name in READS else (0, _update(equation)) if name in WRITES else ()


def sources_of(constants: Constants, equation: Equation) -> list[np.ndarray] | None:
    """Return the number of the operand element that each result element is.

    Elements are counted through the operands that `moved_operands` returns; `NOWHERE`: none of
    them. ``None``: the equation moves elements to places that depend on data.
    """
    parts, name = moved_operands(equation), equation.primitive.name
    numbers = [*_numbers([equation.invars[part].aval.shape for part in parts])]
    if name in TAKE:
        return TAKE[name](equation.params, equation.outvars[0].aval.shape, *numbers)
    columns = columns_of(equation, constants) if parts else [None]
    if any(column is None for column in columns):
        return None
    targets = elements_of_slices(equation, columns)
    if name in READS:
        return [targets]
    base, updates = numbers
    after = base.ravel().copy()
    after[targets[targets != NOWHERE]] = updates[targets != NOWHERE]
    return [after.reshape(base.shape)]


def _numbers(shapes: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    start = 0
    for shape in shapes:
        yield np.arange(start, start + math.prod(shape), dtype=np.int32).reshape(shape)
        start += math.prod(shape)


def through_move(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Follow a move without index operands."""
    take, shape = TAKE[equation.primitive.name], equation.outvars[0].aval.shape
    pairs = zip(operands, equation.invars, strict=True)
    flows = [filled(lattice, flow, atom.aval.shape) for flow, atom in pairs]
    if not lattice.rank:
        return [*take(equation.params, shape, *flows)]
    sources = take(equation.params, shape, *_numbers([a.aval.shape for a in equation.invars]))
    return [_taken(lattice, flows, source) for source in sources]


def _taken(lattice: Lattice, flows: Sequence[np.ndarray], sources: np.ndarray) -> np.ndarray:
    rows = [f.reshape(-1, *f.shape[f.ndim - lattice.rank :]) for f in flows]
    return np.asarray(np.concatenate([*rows, lattice.empty([1])])[sources])


# --- reads and writes at indices


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


def slices_of(equation: Equation) -> Slices:
    """Return the slices of a gather or scatter, or of a slice with its start as an operand."""
    (array, *others), params = equation.invars, equation.params
    is_read = equation.primitive.name in READS
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


def _update(equation: Equation) -> int:
    return 1 if equation.primitive.name == "dynamic_update_slice" else 2


def columns_of(equation: Equation, constants: Constants) -> list[np.ndarray | None]:
    """Return the values of the columns of the indices; ``None``: data choose them."""
    operands = [equation.invars[operand] for operand in slices_of(equation).indices]
    if "dimension_numbers" in equation.params:
        return _columns(constants, operands[0])
    return [*map(constants.value, operands)]


def _columns(constants: Constants, indices: Atom) -> list[np.ndarray | None]:
    value, count = constants.value(indices), indices.aval.shape[-1]
    if value is not None:
        return [value[..., column] for column in range(count)]
    outer = constants.outside(indices)
    if outer is not None:
        return _columns(*outer)
    maker = constants.program.maker(indices)
    if maker is None:
        return [None] * count
    name = maker.primitive.name
    if name == "concatenate" and maker.params["dimension"] == len(indices.aval.shape) - 1:
        return [column for part in maker.invars for column in _columns(constants, part)]
    is_copy = name in ("convert_element_type", "copy")
    return _columns(constants, maker.invars[0]) if is_copy else [None] * count


def elements_of_slices(equation: Equation, columns: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return the elements of operand 0 that an equation reads or writes.

    Parameters
    ----------
    equation
        The equation; see `slices_of`.
    columns
        The columns of its indices; ``None`` counts as zero.

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
    batch = tuple(n for axis, n in enumerate(sizes) if axis not in slices.window)
    sliced = [axis for axis in range(len(shape)) if axis not in slices.removed]
    at: dict[int, np.ndarray] = {a: grid[w] for a, w in zip(sliced, slices.window, strict=True)}
    at.update({a: alone[i] for a, i in slices.aligned.items()})
    inside = np.ones(sizes, bool)
    for axis, column in zip(slices.indexed, columns, strict=True):
        last = shape[axis] - (sizes[slices.window[sliced.index(axis)]] if axis in sliced else 1)
        start = np.broadcast_to(0 if column is None else column, batch)[alone].astype(np.int64)
        if slices.clips:
            start = np.clip(start, 0, last)
        is_inside = (start >= 0) & (start <= last)
        inside &= is_inside
        at[axis] = at.get(axis, 0) + np.where(is_inside, start, 0)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    elements = sum(at.get(axis, 0) * stride for axis, stride in enumerate(strides))
    return np.where(inside, elements, NOWHERE).astype(np.int32)


def chosen_axes(equation: Equation, columns: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    """Return the axes of operand 0 along which data choose the place of a slice."""
    slices, shape = slices_of(equation), equation.invars[0].aval.shape
    sliced = [axis for axis in range(len(shape)) if axis not in slices.removed]
    widths = {a: slices.atom.aval.shape[w] for a, w in zip(sliced, slices.window, strict=True)}
    pairs = zip(slices.indexed, columns, strict=True)
    return tuple(a for a, column in pairs if column is None and widths.get(a) != shape[a])


def read(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a gather or a slice; each slice depends on its indices."""
    (flow, *places), shape = operands, equation.outvars[0].aval.shape
    if flow is not None:
        columns = columns_of(equation, constants)
        anywhere = along(lattice, flow, chosen_axes(equation, columns))
        flow = _taken(lattice, [anywhere], elements_of_slices(equation, columns))
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
    shape, name = equation.invars[0].aval.shape, equation.primitive.name
    flow, update = filled(lattice, operands[0], shape), operands[_update(equation)]
    columns = columns_of(equation, constants)
    targets, axes = elements_of_slices(equation, columns), chosen_axes(equation, columns)
    if name in WRITES and not axes and equation.params.get("update_jaxpr") is None:
        kept = np.arange(math.prod(shape))  # other elements than those that are overwritten
        kept[targets[targets != NOWHERE]] = NOWHERE
        flow = _taken(lattice, [flow], kept.reshape(shape))
    if update is not None:
        put = lattice.put(lattice.empty(shape), targets, update)
        flow = lattice.join(flow, along(lattice, put, axes))
    one = everything(lattice, [operands[i] for i in slices_of(equation).indices])
    return [flow if one is None else lattice.join(flow, spread(lattice, one, shape))]


# --- all primitives


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A result element depends on the operand elements at the same index (scalars aside).
ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le lgamma log log1p log2 logistic lt max min mul mulhi name ne neg nextafter not
    one_minus_square optimization_barrier or pcast polygamma population_count pow pvary
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh with_derivative_of xor zeta
    """
)

# Identities without a derivative.
CONSTANT = frozenset({"stop_gradient"})

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
DRAWS = frozenset({"rng_uniform"})

# Primitives whose result has the elements of the only operand, in order.
IN_ORDER = _names("convert_element_type copy copy_p expand_dims name reshape squeeze stop_gradient")


def _from_last(count: int) -> Callable[[Equation], Sequence[int]]:
    return lambda equation: range(len(equation.invars[0].aval.shape) - count, 99)


_CUMULATIVE = "cumlogsumexp cummax cummin cumprod cumsum"
_OF_MATRICES = "cholesky eig eigh hessenberg lu qr schur svd triangular_solve tridiagonal"

# Operations that couple the elements along some axes, and keep all others apart: samples, mostly.
JOINED_ALONG: Mapping[str, Callable[[Equation], Sequence[int]]] = {
    **dict.fromkeys(_names(_CUMULATIVE), lambda e: [e.params["axis"]]),
    **dict.fromkeys(_names(_OF_MATRICES), _from_last(2)),
    "tridiagonal_solve": _from_last(1),
    "fft": lambda e: _from_last(len(e.params["fft_lengths"]))(e),
    "sort": lambda e: [e.params["dimension"]],
    "top_k": lambda e: [e.params.get("axis", -1) % len(e.outvars[0].aval.shape)],
}


# Solvers of linear equations, with the number of operands that make up the matrix: columns of the
# right-hand side are independent.
SOLVES: Mapping[str, int] = {"triangular_solve": 1, "tridiagonal_solve": 3}


def through_primitive(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow]:
    """Return the flows of an equation's results; at least one operand has a flow."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name in ELEMENTWISE | CONSTANT:
        return [joined(lattice, [f if f is None else spread(lattice, f, shape) for f in operands])]
    if name in TAKE:
        return through_move(lattice, equation, operands)
    if name in READS:
        return read(lattice, equation, operands, constants)
    if name in WRITES or name.startswith("scatter-"):
        return write(lattice, equation, operands, constants)
    if name in SOLVES and all(flow is None for flow in operands[: SOLVES[name]]):
        axis = -2 if equation.params.get("left_side", True) else -1
        return [along(lattice, filled(lattice, operands[-1], shape), [axis % len(shape)])]
    if name in JOINED_ALONG:
        return _joined_along(lattice, equation, operands)
    if name == "dot_general":
        return _dot(lattice, equation, operands)
    if name == "conv_general_dilated" and operands[1] is None:
        return _conv(lattice, equation, operands)
    if name in _WINDOWS:
        return [_WINDOWS[name](lattice, equation, operands)]
    if name.startswith(("reduce", "arg")) and ("axes" in equation.params or name == "reduce"):
        return _reduction(lattice, equation, operands)
    if name == "zeros_mapped_like":
        return [None] * len(equation.outvars)
    return coupled(lattice, equation, operands)


def coupled(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Return the flows of results whose every element depends on all elements."""
    one = everything(lattice, operands)
    return [None if one is None else spread(lattice, one, v.aval.shape) for v in equation.outvars]


def _joined_along(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    every = JOINED_ALONG[equation.primitive.name](equation)

    def own(rank: int) -> list[int]:
        return [axis for axis in every if axis < rank]

    found = [f for f in operands if f is not None]
    one = joined(lattice, [lattice.over(f, own(f.ndim - lattice.rank)) for f in found])
    shapes = [var.aval.shape for var in equation.outvars]
    return [spread(lattice, np.expand_dims(one, own(len(shape))), shape) for shape in shapes]


def _reduction(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Join along axes; ``reduce`` joins all of its operands, and the start values."""
    axes = equation.params.get("axes", equation.params.get("dimensions"))
    shape, count = equation.outvars[0].aval.shape, len(equation.outvars)
    flows = [f if f is None else lattice.over(f, axes) for f in operands[:count]]
    starts = [f if f is None else spread(lattice, f, shape) for f in operands[count:]]
    return [joined(lattice, [*flows, *starts])] * count


def dot_letters(equation: Equation) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the letters of a ``dot_general`` as an einsum: of its operands, and of its result.

    Axes with the same letter correspond. The letters that the result does not have are summed over.
    """
    summed, batch = equation.params["dimension_numbers"]
    first, second = (
        [f"{name}{axis}" for axis in range(len(atom.aval.shape))]
        for name, atom in zip("ab", equation.invars, strict=True)
    )
    for a, b in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
        second[b] = first[a]
    shared = [first[axis] for axis in batch[0]]
    free = [a for a in first if a not in second] + [b for b in second if b not in first]
    return tuple(first), tuple(second), (*shared, *free)


def _dot(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Join along contracted axes, and broadcast along the axes of the other factor."""
    (*letters, result), flows = dot_letters(equation), []
    for names, flow in zip(letters, operands, strict=True):
        if flow is None:
            continue
        kept = [names.index(a) for a in result if a in names]
        order = (*kept, *(i for i, a in enumerate(names) if a not in result))
        flow = flow.transpose(*order, *range(len(order), flow.ndim))
        flow = lattice.over(flow, range(len(kept), len(order)))
        missing = tuple(i for i, a in enumerate(result) if a not in names)
        flows.append(spread(lattice, np.expand_dims(flow, missing), equation.outvars[0].aval.shape))
    return [joined(lattice, flows)]


def _conv(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Keep samples apart, and couple everything else."""
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    if equation.params["batch_group_count"] != 1:
        return coupled(lattice, equation, operands)
    one = lattice.over(filled(lattice, operands[0], ()), numbers.lhs_spec[1:])
    others = tuple(axis for axis in range(len(shape)) if axis != numbers.out_spec[0])
    return [spread(lattice, np.expand_dims(one, others), shape)]


def _reduce_window(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> Flow:
    """Join the elements of each window, tap by tap."""
    params, made = equation.params, equation.outvars[0].aval.shape
    if min(min(sides) for sides in params["padding"]) < 0:
        return coupled(lattice, equation, operands)[0]
    flow: np.ndarray = joined(lattice, operands)
    gaps = (1,) * len(made)
    places = _window_places(
        params["padding"], params.get("base_dilation") or gaps, flow.shape[: len(made)]
    )
    padded = np.array(lattice.empty([total for _, total in places]))
    padded[tuple(place for place, _ in places)] = flow
    rates = params.get("window_dilation") or gaps
    parts = []
    for tap in np.ndindex(*params["window_dimensions"]):
        offsets = [t * rate for t, rate in zip(tap, rates, strict=True)]
        parts.append(padded[_at_tap(params["window_strides"], made, offsets)])
    one: Flow = joined(lattice, parts)
    return one


def _at_tap(strides: Sequence[int], count: Sequence[int], tap: Sequence[int]) -> tuple[slice, ...]:
    """Return the places that all windows read at one tap."""
    sides = zip(tap, strides, count, strict=True)
    return tuple(slice(t, t + (n - 1) * s + 1, s) for t, s, n in sides)


def _window_places(
    padding: Sequence[tuple[int, int]], dilation: Sequence[int], shape: Sequence[int]
) -> list[tuple[slice, int]]:
    """Return along each axis the places of elements after padding, and their number."""
    sides = zip(shape, dilation, padding, strict=True)
    ends = [(low, low + (n - 1) * d + 1, d, high) for n, d, (low, high) in sides]
    return [(slice(low, end, d), end + high) for low, end, d, high in ends]


def _scatter_windows(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> Flow:
    """Add the element of each window to all elements of the window, tap by tap."""
    params, shape = equation.params, equation.outvars[0].aval.shape
    is_cropped = min(min(sides) for sides in params["padding"]) < 0
    if operands[1] is not None or lattice.rank or is_cropped:
        return coupled(lattice, equation, operands)[0]
    source = filled(lattice, operands[0], ())
    places = _window_places(params["padding"], (1,) * len(shape), shape)
    total = lattice.empty([size for _, size in places])
    for tap in np.ndindex(*params["window_dimensions"]):
        at = _at_tap(params["window_strides"], source.shape, tap)
        total[at] = lattice.join(total[at], source)
    return total[tuple(place for place, _ in places)]


_WINDOWS: Mapping[str, Callable[[Lattice, Equation, Sequence[Flow]], Flow]] = {
    **dict.fromkeys(
        ("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add"),
        _reduce_window,
    ),
    "select_and_scatter_add": _scatter_windows,
}

"""Primitives that an analysis follows element by element.

For any primitive without a rule, every element of every result depends on all elements of all
operands. Rules are about values: a result may depend on an element and have no derivative with
respect to it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jax import Atom, Equation
from .constants import NOWHERE, TAKE, Constants
from .lattices import Flow, Lattice, along, everything, filled, joined, spread
from .program import CONSTANT


def names_in(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# A result element depends on the operand elements at the same index (scalars aside).
ELEMENTWISE = names_in(
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

PRODUCTS = names_in("dot_general conv_general_dilated")
DRAWS = names_in("rng_uniform")

# Primitives whose result has the elements of the only operand, in order.
IN_ORDER = names_in(
    "convert_element_type copy copy_p expand_dims name reshape squeeze stop_gradient"
)

COPIES = names_in("copy copy_p")
READS = names_in("gather dynamic_slice")
WRITES = names_in("scatter dynamic_update_slice")
UPDATES = names_in("scatter-add scatter-sub scatter-mul scatter-min scatter-max")
WINDOWS = names_in("reduce_window_max reduce_window_min reduce_window_sum")
SUMS = names_in("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")

# --- moves

PLAIN_MOVES = frozenset(TAKE)


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


class Through(NamedTuple):
    """An equation with the flows of its operands, of which at least one is not ``None``."""

    lattice: Lattice
    equation: Equation
    flows: Sequence[Flow]
    constants: Constants

    @property
    def shape(self) -> tuple[int, ...]:
        return self.equation.outvars[0].aval.shape

    def filled(self, operand: int) -> np.ndarray:
        """Return the flow of an operand as an array, also if it is ``None``."""
        shape = self.equation.invars[operand].aval.shape
        return filled(self.lattice, self.flows[operand], shape)


def _move(at: Through) -> list[Flow]:
    take, params = TAKE[at.equation.primitive.name], at.equation.params
    flows = [*map(at.filled, range(len(at.flows)))]
    if not at.lattice.rank:
        return [*take(params, at.shape, *flows)]
    sources = take(params, at.shape, *_numbers([a.aval.shape for a in at.equation.invars]))
    return [_taken(at.lattice, flows, source) for source in sources]


def _taken(lattice: Lattice, flows: Sequence[np.ndarray], sources: np.ndarray) -> np.ndarray:
    rows = [f.reshape(-1, *f.shape[f.ndim - lattice.rank :]) for f in flows]
    return np.asarray(np.concatenate([*rows, lattice.empty([1])])[sources])


# --- reads and writes at indices
#
# These follow each column of the indices. A constant column selects. Along the axes of a column
# that data choose (the write index of a ring buffer), an element may be anywhere. A write at a
# chosen index is a selection: each element is kept or replaced.


class Slices(NamedTuple):
    """The slices of an array that an equation reads or writes.

    Attributes
    ----------
    sizes
        The shape of all slices together.
    window
        The axes of these within one slice.
    indices
        The operands that are indices.
    indexed
        For each column of the indices, the axis of the array that it counts along.
    aligned
        Axes of the array that correspond to an axis of the indices.
    widths
        The number of elements of a slice along each axis of the array that it keeps.
    clips
        Whether slices that extend out of the array are moved into it.
    """

    sizes: tuple[int, ...]
    window: tuple[int, ...]
    indices: Sequence[int]
    indexed: tuple[int, ...]
    aligned: Mapping[int, int]
    widths: Mapping[int, int]
    clips: bool


def slices_of(equation: Equation) -> Slices:
    """Return the slices of a gather or scatter, or of a slice with its start as an operand."""
    axes, params = tuple(range(len(equation.invars[0].aval.shape))), equation.params
    is_read = equation.primitive.name in READS
    part = equation.outvars[0] if is_read else equation.invars[_update(equation)]
    sizes = part.aval.shape
    if "dimension_numbers" not in params:
        indices = range(1 if is_read else 2, len(equation.invars))
        return Slices(sizes, axes, indices, axes, {}, dict(zip(axes, sizes, strict=True)), True)
    numbers = params["dimension_numbers"]
    if is_read:
        window, indexed = numbers.offset_dims, numbers.start_index_map
        removed, batch = numbers.collapsed_slice_dims, numbers.start_indices_batching_dims
    else:
        window, indexed = numbers.update_window_dims, numbers.scatter_dims_to_operand_dims
        removed, batch = numbers.inserted_window_dims, numbers.scatter_indices_batching_dims
    aligned = dict(zip(numbers.operand_batching_dims, batch, strict=True))
    kept = [axis for axis in axes if axis not in (*removed, *aligned)]
    widths = {axis: sizes[w] for axis, w in zip(kept, window, strict=True)}
    return Slices(sizes, window, [1], indexed, aligned, widths, params["mode"].name == "CLIP")


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
        return [*np.moveaxis(value, -1, 0)]
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
    slices, shape = slices_of(equation), equation.invars[0].aval.shape
    grid = np.indices(slices.sizes, sparse=True)
    alone = tuple(along for axis, along in enumerate(grid) if axis not in slices.window)
    at: dict[int, Any] = dict.fromkeys(range(len(shape)), 0)
    at |= {axis: grid[w] for axis, w in zip(slices.widths, slices.window, strict=True)}
    at |= {axis: alone[i] for axis, i in slices.aligned.items()}
    inside = np.ones(slices.sizes, bool)
    for axis, column in zip(slices.indexed, columns, strict=True):
        last = shape[axis] - slices.widths.get(axis, 1)
        start = 0 if column is None else np.asarray(column, np.int64)[alone]
        inside &= slices.clips | ((start >= 0) & (start <= last))
        at[axis] = at[axis] + np.clip(start, 0, last)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    elements = sum(at[axis] * stride for axis, stride in enumerate(strides))
    return np.where(inside, elements, NOWHERE).astype(np.int32)


def chosen_axes(equation: Equation, columns: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    """Return the axes of operand 0 along which data choose the place of a slice."""
    slices, shape = slices_of(equation), equation.invars[0].aval.shape
    pairs = zip(slices.indexed, columns, strict=True)
    return tuple(a for a, column in pairs if column is None and slices.widths.get(a) != shape[a])


def _read(at: Through) -> list[Flow]:
    """Follow a gather or a slice; each slice depends on its indices."""
    lattice, equation, (flow, *places), constants = at
    if flow is not None:
        columns = columns_of(equation, constants)
        anywhere = along(lattice, flow, chosen_axes(equation, columns))
        flow = _taken(lattice, [anywhere], elements_of_slices(equation, columns))
    of_slices = everything(lattice, places)
    if equation.primitive.name == "gather" and places[0] is not None:
        of_slices = lattice.over(places[0], [len(equation.invars[1].aval.shape) - 1])
        of_slices = np.expand_dims(of_slices, tuple(slices_of(equation).window))
    return [joined(lattice, [flow, _spread(at, of_slices)])]


def _write(at: Through) -> list[Flow]:
    """Follow updates to their positions; every element depends on all indices."""
    lattice, equation, flows, constants = at
    flow, update = at.filled(0), flows[_update(equation)]
    columns = columns_of(equation, constants)
    targets, axes = elements_of_slices(equation, columns), chosen_axes(equation, columns)
    if moved_operands(equation) and not axes:
        kept = np.arange(math.prod(at.shape))  # other elements than those that are overwritten
        kept[targets[targets != NOWHERE]] = NOWHERE
        flow = _taken(lattice, [flow], kept.reshape(at.shape))
    if update is not None:
        put = lattice.put(lattice.empty(at.shape), targets, update)
        flow = lattice.join(flow, along(lattice, put, axes))
    places = everything(lattice, [flows[i] for i in slices_of(equation).indices])
    return [joined(lattice, [flow, _spread(at, places)])]


def _spread(at: Through, flow: Flow) -> Flow:
    return None if flow is None else spread(at.lattice, flow, at.shape)


# --- axes, products and windows


def coupled(at: Through) -> list[Flow]:
    """Return the flows of results whose every element depends on all elements."""
    one = filled(at.lattice, everything(at.lattice, at.flows), ())
    return [spread(at.lattice, one, var.aval.shape) for var in at.equation.outvars]


def _elementwise(at: Through) -> list[Flow]:
    return [joined(at.lattice, [_spread(at, flow) for flow in at.flows])]


def _solve(at: Through) -> list[Flow]:
    """Couple the equations of each right-hand side."""
    if any(flow is not None for flow in at.flows[:-1]):  # of the matrix
        return coupled(at)
    axis = -2 if at.equation.params.get("left_side", True) else -1
    return [along(at.lattice, at.filled(-1), [axis % len(at.shape)])]


def _reduce(at: Through) -> list[Flow]:
    return [at.lattice.over(at.filled(0), at.equation.params["axes"])]


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


def by_letters(
    lattice: Lattice, flow: np.ndarray, before: Sequence[str], after: Sequence[str], shape: Any
) -> np.ndarray:
    """Join along the letters that are only before, and broadcast along those only after."""
    kept = [before.index(a) for a in after if a in before]
    order = (*kept, *(i for i, a in enumerate(before) if a not in after))
    flow = flow.transpose(*order, *range(len(order), flow.ndim))
    flow = lattice.over(flow, range(len(kept), len(order)))
    missing = tuple(i for i, a in enumerate(after) if a not in before)
    return spread(lattice, np.expand_dims(flow, missing), shape)


def _dot(at: Through) -> list[Flow]:
    *letters, result = dot_letters(at.equation)
    pairs = zip(at.flows, letters, strict=True)
    flows = [by_letters(at.lattice, f, own, result, at.shape) for f, own in pairs if f is not None]
    return [joined(at.lattice, flows)]


def _conv(at: Through) -> list[Flow]:
    """Keep samples apart, and couple everything else."""
    numbers, params = at.equation.params["dimension_numbers"], at.equation.params
    if params["batch_group_count"] != 1 or at.flows[1] is not None:
        return coupled(at)
    one = at.lattice.over(at.filled(0), numbers.lhs_spec[1:])
    others = tuple(axis for axis in range(len(at.shape)) if axis != numbers.out_spec[0])
    return [_spread(at, np.expand_dims(one, others))]


def elements_of_windows(equation: Equation) -> np.ndarray:
    """Return the elements that each window reads, ``(places of a window, *result)``."""
    params, made = equation.params, equation.outvars[0].aval.shape
    shape, gaps = equation.invars[0].aval.shape, (1,) * len(made)
    sides = [*zip(shape, params["padding"], params.get("base_dilation") or gaps, strict=True)]
    config = [(low, high, step - 1) for _, (low, high), step in sides]
    sizes = tuple(low + (n - 1) * step + 1 + high for n, (low, high), step in sides)
    (numbers,) = _numbers([shape])
    (padded,) = TAKE["pad"]({"padding_config": config}, sizes, numbers, np.asarray(NOWHERE))
    strides, rates = params["window_strides"], params.get("window_dilation") or gaps
    places = []
    for tap in np.ndindex(*params["window_dimensions"]):
        axes = zip(tap, rates, strides, made, strict=True)
        at = tuple(slice(t * rate, t * rate + (n - 1) * s + 1, s) for t, rate, s, n in axes)
        places.append(padded[at])
    return np.stack(places)


def _window(at: Through) -> list[Flow]:
    taken = _taken(at.lattice, [at.filled(0)], elements_of_windows(at.equation))
    return [at.lattice.over(taken, [0])]


def _join_along(at: Through) -> list[Flow]:
    params, rank = at.equation.params, len(at.shape)
    is_fft = at.equation.primitive.name == "fft"
    axes = tuple(range(rank - len(params["fft_lengths"]), rank)) if is_fft else (params["axis"],)
    flows = [flow if flow is None else at.lattice.over(flow, axes) for flow in at.flows]
    one = np.expand_dims(filled(at.lattice, joined(at.lattice, flows), ()), axes)
    return [spread(at.lattice, one, var.aval.shape) for var in at.equation.outvars]


_RULES: Mapping[str, Callable[[Through], list[Flow]]] = {
    **dict.fromkeys(ELEMENTWISE | CONSTANT, _elementwise),
    **dict.fromkeys(PLAIN_MOVES, _move),
    **dict.fromkeys(READS, _read),
    **dict.fromkeys(WRITES | UPDATES, _write),
    **dict.fromkeys(SUMS | {"argmax", "argmin"}, _reduce),
    **dict.fromkeys(names_in("cumlogsumexp cummax cummin cumprod cumsum fft"), _join_along),
    **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(names_in("triangular_solve tridiagonal_solve"), _solve),
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "zeros_mapped_like": lambda at: [None] * len(at.equation.outvars),
}


def through_primitive(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow]:
    """Return the flows of an equation's results; at least one operand has a flow."""
    rule = _RULES.get(equation.primitive.name, coupled)
    return rule(Through(lattice, equation, operands, constants))

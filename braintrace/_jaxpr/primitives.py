"""Primitives that an analysis follows element by element.

For any other primitive, every element of every result depends on all elements of all operands.
Rules are about values: a result may depend on an element and have no derivative with respect to it.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .._jax import Equation
from .constants import Constants
from .lattices import Flow, Lattice, along, everything, filled, joined, spread
from .moves import READS, TAKE, WRITES, read, through_move, write


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


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
"""A result element depends on the operand elements at the same index (scalars aside)."""

CONSTANT = frozenset({"stop_gradient"})
"""Identities without a derivative."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
DRAWS = frozenset({"rng_uniform"})

IN_ORDER = _names("convert_element_type copy copy_p expand_dims name reshape squeeze stop_gradient")
"""Primitives whose result has the elements of the only operand, in order."""


def _last(count: int) -> Callable[[Equation], Sequence[int]]:
    """Return the axes of a matrix or vector along the last axes of the first operand."""
    return lambda equation: range(len(equation.invars[0].aval.shape) - count, 99)


_MATRICES = "cholesky eig eigh hessenberg lu qr schur svd triangular_solve tridiagonal"
_CUMULATIVE = "cumlogsumexp cummax cummin cumprod cumsum"

JOINED_ALONG: Mapping[str, Callable[[Equation], Sequence[int]]] = {
    **dict.fromkeys(_names(_CUMULATIVE), lambda e: [e.params["axis"]]),
    **dict.fromkeys(_names(_MATRICES), _last(2)),
    **dict.fromkeys(["lu_pivots_to_permutation", "tridiagonal_solve"], _last(1)),
    "fft": lambda e: _last(len(e.params["fft_lengths"]))(e),
    "sort": lambda e: [e.params["dimension"]],
    "top_k": lambda e: [e.params.get("axis", -1) % len(e.outvars[0].aval.shape)],
}
"""Operations that couple the elements along some axes, and keep all others apart."""


SOLVES: Mapping[str, int] = {"triangular_solve": 1, "tridiagonal_solve": 3}
"""Solvers of linear equations, with the number of operands that make up the matrix.

Columns of the right-hand side are independent."""


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
        flow = filled(lattice, operands[-1], shape)
        return [along(lattice, flow, [axis % len(shape)])]
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
    ones = [
        lattice.over(f, [axis for axis in every if axis < f.ndim - lattice.rank])
        for f in operands
        if f is not None
    ]
    one = joined(lattice, ones)
    shapes = [var.aval.shape for var in equation.outvars]
    axes = [tuple(axis for axis in every if axis < len(shape)) for shape in shapes]
    pairs = zip(axes, shapes, strict=True)
    return [spread(lattice, np.expand_dims(one, own), shape) for own, shape in pairs]


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

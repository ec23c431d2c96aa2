"""Primitives: facts about the values of an equation, computed with NumPy.

Moves of elements and the arithmetic of integers run with NumPy: an index needs no program of XLA.
The facts are about values: a result may depend on an element and have no derivative with respect to
it. For a primitive without any, all elements are coupled.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from .._jax import AnyJaxpr, Atom, Equation, Var, is_var
from .program import Program, evaluate, program_of


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
REDUCTIONS = names_in(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)

# --- moves
#
# Moves without index operands run with NumPy, on the numbers of the elements of their operands.

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


MOVES: Mapping[str, Take] = {
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


# --- arithmetic of integers

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{n: getattr(operator, n) for n in names_in("abs add eq ge gt le lt mul ne neg sub xor")},
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": lambda x, y: (x - np.fmod(x, y)) // y,  # toward zero
    "max": np.maximum,
    "min": np.minimum,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "sign": np.sign,
}


def run_with_numpy(equation: Equation, operands: Sequence[ArrayLike]) -> list[np.ndarray] | None:
    """Run a move or arithmetic of integers; ``None`` for any other equation."""
    name, params, out = equation.primitive.name, equation.params, equation.outvars[0].aval
    dtypes = [out.dtype, *(atom.aval.dtype for atom in equation.invars)]
    if not all(isinstance(dtype, np.dtype) for dtype in dtypes):  # a random key
        return None
    if name == "iota":
        numbers = np.indices(out.shape, out.dtype, sparse=True)[params["dimension"]]
        return [np.broadcast_to(numbers, out.shape)]
    values = [*map(np.asarray, operands)]
    if name in MOVES:
        return MOVES[name](params, out.shape, *values)
    if name not in _ARITHMETIC or any(dtype.kind not in "biu" for dtype in dtypes):
        return None
    with np.errstate(all="ignore"):
        return [np.asarray(_ARITHMETIC[name](*values), out.dtype)]


# --- constants


class Constants:
    """Values that depend on no input of a program, each computed once.

    Parameters
    ----------
    program
        The program.
    outer, inputs
        For the body of an equation: the constants of the surrounding program, and its atoms that
        are inputs of the body.
    """

    def __init__(
        self,
        program: Program,
        outer: "Constants | None" = None,
        inputs: Mapping[Var, Atom] | None = None,
    ) -> None:
        self.program = program
        self._outer: Any = outer
        self._inputs = inputs or {}
        self._values: dict[Var, np.ndarray] = {}
        self._bodies: dict[tuple[int, ...], Constants] = {}

    @functools.cached_property
    def _varying(self) -> set[Var]:
        known = {v for v, atom in self._inputs.items() if self._outer.has(atom)}
        return self.program.dependents_of(v for v in self.program.in_vars if v not in known)

    def has(self, atom: Atom) -> bool:
        """Test whether an atom depends on no input."""
        return not is_var(atom) or atom not in self._varying

    def value(self, atom: Atom) -> np.ndarray | None:
        """Return the value of ``atom``, or ``None`` if it depends on an input."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if not self.has(atom):
            return None
        if atom not in self._values:
            needed = self.program.depends_on([atom]) & self._inputs.keys()
            known = {var: self._outer.value(self._inputs[var]) for var in needed}
            with jax.ensure_compile_time_eval():
                (value,) = evaluate(self.program, [atom], known, rules=run_with_numpy)
            self._values[atom] = np.asarray(value)
        return self._values[atom]

    def outside(self, atom: Atom) -> "tuple[Constants, Atom] | None":
        """Return the surrounding program, and its atom that is this input of a body."""
        if self._outer is None or not is_var(atom) or atom not in self._inputs:
            return None
        return self._outer, self._inputs[atom]

    def body(self, jaxpr: AnyJaxpr, inputs: Sequence[Atom]) -> "Constants":
        """Return the constants of a body in the program.

        Parameters
        ----------
        jaxpr
            The body.
        inputs
            Its first inputs, as atoms of the program; the others vary from run to run.
        """
        key = (id(jaxpr), *map(id, inputs))
        if key not in self._bodies:
            program = program_of(jaxpr)
            known = dict(zip(program.in_vars, inputs, strict=False))
            self._bodies[key] = Constants(program, self, known)
        return self._bodies[key]


# --- moves with indices


def moved_operands(equation: Equation) -> Sequence[int]:
    """Return the operands whose elements an equation moves to its results, if it only moves.

    For any other equation, the result is empty.
    """
    name = equation.primitive.name
    if equation.params.get("update_jaxpr") is not None:  # `.at[...].apply(function)`
        return ()
    if name in MOVES:
        return range(len(equation.invars))
    return (0,) if name in READS else (0, update_of(equation)) if name in WRITES else ()


def sources_of(constants: Constants, equation: Equation) -> list[np.ndarray] | None:
    """Return the number of the operand element that each result element is.

    Elements are counted through the operands that `moved_operands` returns; `NOWHERE`: none of
    them. ``None``: the equation moves elements to places that depend on data.
    """
    parts, name = moved_operands(equation), equation.primitive.name
    numbers = [*_numbers([equation.invars[part].aval.shape for part in parts])]
    if name in MOVES:
        return MOVES[name](equation.params, equation.outvars[0].aval.shape, *numbers)
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
    part = equation.outvars[0] if is_read else equation.invars[update_of(equation)]
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


def update_of(equation: Equation) -> int:
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


# --- axes
#
# Sums, products and other equations correspond to an einsum as far as dependence is concerned.

# The axes along which an equation joins the elements of its last operand, by its parameters.
_SWEPT: Mapping[str, Callable[[Params], Sequence[int]]] = {
    **dict.fromkeys(
        names_in("cumlogsumexp cummax cummin cumprod cumsum"), lambda params: [params["axis"]]
    ),
    "fft": lambda params: range(-len(params["fft_lengths"]), 0),
    "triangular_solve": lambda params: [-2 if params["left_side"] else -1],
    "tridiagonal_solve": lambda params: [-2],
}


def letters_of(equation: Equation) -> tuple[tuple[str, ...], ...]:
    """Return the letters of an equation as an einsum: of each operand, and last of its result.

    Axes with the same letter correspond. A result depends on all elements along the letters that it
    does not have, and is the same along those that only it has. Most equations have no letters.
    """
    name, params = equation.primitive.name, equation.params
    if name not in _SWEPT and name not in REDUCTIONS | PRODUCTS:
        return ()
    operands = [
        [f"{operand}.{axis}" for axis in range(len(atom.aval.shape))]
        for operand, atom in enumerate(equation.invars)
    ]
    first, last = operands[0], operands[-1]
    if name in REDUCTIONS:
        result = [letter for axis, letter in enumerate(first) if axis not in params["axes"]]
    elif name in _SWEPT:
        result = [*last]
        for axis in _SWEPT[name](params):
            result[axis] += "'"
    elif name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        result = [f"result {axis}" for axis in range(len(first))]
        if params["batch_group_count"] == 1:  # samples are separate
            result[numbers.out_spec[0]] = first[numbers.lhs_spec[0]]
    else:  # a dot_general
        summed, batch = params["dimension_numbers"]
        for a, b in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
            last[b] = first[a]
        shared = [first[axis] for axis in batch[0]]
        free = [a for a in first if a not in last] + [b for b in last if b not in first]
        result = [*shared, *free]
    return (*map(tuple, operands), tuple(result))


# --- windows


def elements_of_windows(equation: Equation) -> np.ndarray:
    """Return the elements that each window reads, ``(places of a window, *result)``."""
    params, made = equation.params, equation.outvars[0].aval.shape
    shape, gaps = equation.invars[0].aval.shape, (1,) * len(made)
    sides = [*zip(shape, params["padding"], params.get("base_dilation") or gaps, strict=True)]
    config = [(low, high, step - 1) for _, (low, high), step in sides]
    sizes = tuple(low + (n - 1) * step + 1 + high for n, (low, high), step in sides)
    (numbers,) = _numbers([shape])
    (padded,) = _pad({"padding_config": config}, sizes, numbers, np.asarray(NOWHERE))
    sizes = params["window_dimensions"]
    strides, rates = params["window_strides"], params.get("window_dilation") or gaps
    spans = [(size - 1) * rate + 1 for size, rate in zip(sizes, rates, strict=True)]
    every = tuple(slice(None, None, step) for step in (*strides, *rates))
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans)[every]
    return np.moveaxis(windows.reshape(*made, -1), -1, 0)

"""Table of primitives: one entry with all properties that the analyses use.

Only primitives with a rule are followed element by element. For any other primitive, or if a rule
returns ``None``, every element of every result depends on all elements of all operands. Rules are
about values: a result may depend on an element and have no derivative with respect to it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ..._jax import Equation
from . import kinds, moves
from .bilinear import dot_letters
from .constants import Constants, Sources
from .lattices import Flow, Lattice, along, everything, joined, spread
from .windows import conv, prefix, reduce_window, select_and_scatter_add

Rule: TypeAlias = Callable[[Lattice, Equation, Sequence[Flow], Constants], Sequence[Flow] | None]
"""``(lattice, equation, flows of its operands, constants) -> flows of its results``."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Properties of a primitive that the analyses use.

    Attributes
    ----------
    flow
        The rule for elements; ``None``: everything is coupled.
    kind
        The rule for linearity.
    role
        ``"elementwise"``: a result element depends on the operand elements at the same index
        (scalars aside), and so do cotangents. ``"constant"``: an identity without a derivative.
        ``"move"``: the results have the elements of operands. ``"product"``: bilinear.
        ``"draw"``: another result at every run. ``""``: none of these.
    sources, parts
        For a move: the sources of its elements, and the operands that contain elements (``None``:
        all of them).
    in_order
        Whether the result has the elements of the only operand, in order.
    """

    flow: Rule | None = None
    kind: kinds.KindRule = kinds.by_transposition
    role: Literal["elementwise", "constant", "move", "product", "draw", ""] = ""
    sources: Callable[[Equation, moves.Value], Sources] | None = None
    parts: tuple[int, ...] | None = None
    in_order: bool = False


_UNKNOWN = Entry()


def entry_of(equation: Equation) -> Entry:
    """Return the entry of an equation's primitive."""
    return TABLE.get(equation.primitive.name, _UNKNOWN)


def through_primitive(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow]:
    """Return the flows of an equation's results; at least one operand has a flow."""
    rule = entry_of(equation).flow
    flows = None if rule is None else rule(lattice, equation, operands, constants)
    return coupled(lattice, equation, operands) if flows is None else flows


def moved_operands(equation: Equation) -> Sequence[int]:
    """Return the operands whose elements an equation moves to its results, if it only moves.

    For any other equation, the result is empty.
    """
    entry = entry_of(equation)
    is_applied = equation.params.get("update_jaxpr") is not None  # `.at[...].apply(function)`
    if entry.role != "move" or is_applied:
        return ()
    return range(len(equation.invars)) if entry.parts is None else entry.parts


def sources_of(constants: Constants, equation: Equation) -> Sources:
    """Return the source of each result element of a move."""
    find = entry_of(equation).sources
    return None if find is None else constants.sources(equation, find)


def coupled(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Return the flows of results whose every element depends on all elements."""
    one = everything(lattice, operands)
    return [None if one is None else spread(lattice, one, v.aval.shape) for v in equation.outvars]


def _by_element(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    shape = equation.outvars[0].aval.shape
    return [joined(lattice, [f if f is None else spread(lattice, f, shape) for f in operands])]


def _nothing(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    return [None] * len(equation.outvars)


def _reduction(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    """Join along axes; ``reduce`` joins all of its operands, and the start values."""
    axes = equation.params.get("axes", equation.params.get("dimensions"))
    shape, count = equation.outvars[0].aval.shape, len(equation.outvars)
    flows = [f if f is None else lattice.over(f, axes) for f in operands[:count]]
    starts = [f if f is None else spread(lattice, f, shape) for f in operands[count:]]
    return [joined(lattice, [*flows, *starts])] * count


def _cumulative(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    (flow,), params = operands, equation.params
    assert flow is not None
    return [prefix(lattice, flow, params["axis"], params["reverse"])]


def _sort(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    """Join along the sorted axis; every result is in the order of the keys."""
    params, shape = equation.params, equation.outvars[0].aval.shape
    axes = (params["dimension"],)
    flows = [f if f is None else spread(lattice, along(lattice, f, axes), shape) for f in operands]
    keys = joined(lattice, flows[: params["num_keys"]])
    return [joined(lattice, [keys, flow]) for flow in flows]


def _top_k(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
    (flow,), shape = operands, equation.outvars[0].aval.shape
    assert flow is not None
    axis = equation.params.get("axis", -1) % len(shape)
    return [spread(lattice, along(lattice, flow, (axis,)), shape)] * len(equation.outvars)


def _dot(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> list[Flow]:
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


def _of_last_axes(count: int | None = None) -> Rule:
    """Return the rule of an operation on matrices or vectors along the last axes."""

    def rule(
        lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
    ) -> list[Flow]:
        last = len(equation.params["fft_lengths"]) if count is None else count
        lead = len(equation.invars[0].aval.shape) - last
        flows = [
            f if f is None else lattice.over(f, range(lead, f.ndim - lattice.rank))
            for f in operands
        ]
        one = joined(lattice, flows)
        assert one is not None
        shapes = [var.aval.shape for var in equation.outvars]
        axes = [tuple(range(lead, len(shape))) for shape in shapes]
        ends = zip(axes, shapes, strict=True)
        return [spread(lattice, np.expand_dims(one, last_axes), shape) for last_axes, shape in ends]

    return rule


def _triangular_solve(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow] | None:
    """Follow a substitution: each unknown depends on the rows solved before it."""
    matrix, flow = operands
    if matrix is not None or flow is None:
        return _of_last_axes(2)(lattice, equation, operands, constants)
    params, rank = equation.params, flow.ndim - lattice.rank
    is_left = params["left_side"]
    backward = params["lower"] == params["transpose_a"]
    axis = rank - 2 if is_left else rank - 1
    return [prefix(lattice, flow, axis, backward if is_left else not backward)]


def _each(names: str, flow: Rule | None, **fields: Any) -> dict[str, Entry]:
    return dict.fromkeys(names.split(), Entry(flow, **fields))


def _elementwise(names: str, **fields: Any) -> dict[str, Entry]:
    return _each(names, _by_element, role="elementwise", **fields)


def _move(name: str, take: moves.Take, in_order: bool = False) -> dict[str, Entry]:
    flow, sources = functools.partial(moves.moved, take), functools.partial(moves.numbered, take)
    return {name: Entry(flow, kinds.moved, "move", sources, in_order=in_order)}


def _indexed(name: str, flow: Rule, sources: Any, *parts: int) -> dict[str, Entry]:
    kind = functools.partial(kinds.moved_by_index, parts)
    return {name: Entry(flow, kind, "move", sources, parts)}


def _sum_of(*parts: int) -> kinds.KindRule:
    return functools.partial(kinds.added, parts)


TABLE: Mapping[str, Entry] = {
    **_elementwise(
        """
        acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
        digamma erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow
        le lgamma log log1p log2 logistic lt max min mulhi nextafter one_minus_square polygamma
        population_count pow random_gamma_grad regularized_incomplete_beta rem round rsqrt
        shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor
        zeta
        """,
        kind=kinds.nonlinear,
    ),
    **_elementwise(
        "device_put optimization_barrier pcast pvary sharding_constraint with_derivative_of"
    ),
    **_elementwise("add add_any complex sub", kind=_sum_of(0, 1)),
    **_elementwise("conj imag neg real reduce_precision", kind=_sum_of(0)),
    **_elementwise(
        "convert_element_type copy copy_p name",
        kind=kinds.unchanged,
        in_order=True,
    ),
    **_elementwise("mul", kind=kinds.product),
    **_elementwise("div", kind=kinds.quotient),
    **_elementwise("abs", kind=kinds.absolute),
    **_elementwise("is_finite", kind=kinds.is_finite),
    **_elementwise("eq ne", kind=kinds.compared),
    **_elementwise("and not or", kind=kinds.combined),
    **_elementwise("select_n", kind=kinds.select),
    **_each("stop_gradient", _by_element, kind=kinds.unchanged, role="constant", in_order=True),
    **_move("reshape", moves.reshape_in_order, in_order=True),
    **_move("squeeze", moves.reshape, in_order=True),
    **_move("expand_dims", moves.reshape, in_order=True),
    **_move("transpose", moves.transpose),
    **_move("broadcast_in_dim", moves.broadcast_in_dim),
    **_move("slice", moves.strided_slice),
    **_move("rev", moves.rev),
    **_move("concatenate", moves.concatenate),
    **_move("split", moves.split),
    **_move("stack", moves.stack),
    **_move("unstack", moves.unstack),
    **_move("tile", moves.tile),
    **_move("pad", moves.pad),
    **_indexed("gather", moves.read, moves.sources_of_read, 0),
    **_indexed("dynamic_slice", moves.read, moves.sources_of_read, 0),
    **_indexed("dynamic_update_slice", moves.write, moves.sources_of_write, 0, 1),
    **_indexed("scatter", moves.write, moves.sources_of_write, 0, 2),
    **_each("scatter-add", moves.write, kind=_sum_of(0, 2)),
    **_each("scatter-max scatter-min scatter-mul scatter-sub", moves.write),
    **_each("reduce_sum", _reduction, kind=_sum_of(0)),
    **_each("reduce_and reduce_or", _reduction, kind=kinds.combined),
    **_each("argmax argmin reduce reduce_max reduce_min reduce_prod reduce_xor", _reduction),
    **_each("cumsum", _cumulative, kind=_sum_of(0)),
    **_each("cumlogsumexp cummax cummin cumprod", _cumulative),
    **_each("dot_general", _dot, kind=kinds.product, role="product"),
    **_each("conv_general_dilated", conv, kind=kinds.product, role="product"),
    **_each(
        """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        """,
        reduce_window,
    ),
    **_each("select_and_scatter_add", select_and_scatter_add),
    **_each("sort", _sort),
    **_each("top_k", _top_k),
    **_each("cholesky eig eigh hessenberg lu qr schur svd tridiagonal", _of_last_axes(2)),
    **_each("fft", _of_last_axes()),
    **_each("lu_pivots_to_permutation", _of_last_axes(1)),
    **_each("triangular_solve", _triangular_solve),
    **_each("zeros_mapped_like", _nothing),
    **_each("rng_uniform", None, role="draw"),
}


def _named(role: str) -> frozenset[str]:
    return frozenset(name for name, entry in TABLE.items() if entry.role == role)


ELEMENTWISE, CONSTANT, PRODUCTS, DRAWS = map(_named, ("elementwise", "constant", "product", "draw"))
"""Names of primitives by their role."""

IN_ORDER = frozenset(name for name, entry in TABLE.items() if entry.in_order)
"""Names of the primitives whose result has the elements of the only operand, in order."""

PLAIN_MOVES = frozenset(name for name in _named("move") if TABLE[name].parts is None)
"""Names of the moves without index operands."""

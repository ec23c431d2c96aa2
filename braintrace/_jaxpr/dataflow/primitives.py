"""Table of primitives: the operand elements that each result element depends on.

Only primitives in the table are followed element by element. For any other primitive, or if a rule
returns ``None``, every element of every result depends on all elements of all operands. Rules are
about values: a result may depend on an element and have no derivative with respect to it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ..._jax import Equation
from ..data_movement import MOVES
from .bilinear import dot_axes
from .constants import Constants
from .indexed import dynamic_slice, dynamic_update_slice, gather, move, scatter
from .lattices import Flow, Lattice, along, everything, joined, spread
from .windows import conv, prefix, reduce_window, select_and_scatter_add

Rule: TypeAlias = Callable[[Lattice, Equation, Sequence[Flow], Constants], Sequence[Flow] | None]
"""``(lattice, equation, flows of its operands, constants) -> flows of its results``."""


def through_primitive(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> Sequence[Flow]:
    """Return the flows of an equation's results; at least one operand has a flow."""
    rule = RULES.get(equation.primitive.name)
    flows = None if rule is None else rule(lattice, equation, operands, constants)
    return coupled(lattice, equation, operands) if flows is None else flows


def coupled(lattice: Lattice, equation: Equation, operands: Sequence[Flow]) -> list[Flow]:
    """Return the flows of results whose every element depends on all elements."""
    one = everything(lattice, operands)
    return [None if one is None else spread(lattice, one, v.aval.shape) for v in equation.outvars]


def _elementwise(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], _: Constants
) -> Sequence[Flow]:
    if len(equation.outvars) > 1:  # optimization_barrier: operand by operand
        return operands
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
    axes, flows = dot_axes(equation), []
    for factor, flow in enumerate(operands):
        if flow is None:
            continue
        kept_axes = (*axes.batch[factor], *axes.free[factor])
        order = (*kept_axes, *axes.summed[factor])
        flow = flow.transpose(*order, *range(len(order), flow.ndim))
        flow = lattice.over(flow, range(len(kept_axes), len(order)))
        partner = axes.in_result[1 - factor]
        flows.append(spread(lattice, np.expand_dims(flow, partner), equation.outvars[0].aval.shape))
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


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    braintrace_undivided cbrt ceil clamp complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg
    nextafter not one_minus_square one_way optimization_barrier or pcast polygamma pow pvary
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sharding_constraint sign sin sinh sqrt square sub tan tanh with_derivative_of xor zeta
    """
)
"""A result element depends on the operand elements at the same place, scalars aside."""

INTEGERS = _names(
    """
    clz mulhi population_count shift_left shift_right_arithmetic shift_right_logical
    """
)
"""The same, for integers only."""

REDUCTIONS = _names("reduce_sum reduce_max reduce_min reduce_prod")
CHOICES = _names("argmax argmin reduce reduce_and reduce_or reduce_xor")
"""Other reductions, most of them without a derivative."""

CUMULATIVE = _names("cumlogsumexp cummax cummin cumprod cumsum")

CONSTANT = _names("stop_gradient")
"""An identity without a derivative."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE | INTEGERS | CONSTANT, _elementwise),
    **dict.fromkeys(MOVES, move),
    **dict.fromkeys(REDUCTIONS | CHOICES, _reduction),
    **dict.fromkeys(CUMULATIVE, _cumulative),
    **dict.fromkeys(
        _names("cholesky eig eigh hessenberg lu qr schur svd tridiagonal"), _of_last_axes(2)
    ),
    **dict.fromkeys(
        _names("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"), scatter
    ),
    **dict.fromkeys(
        _names(
            "reduce_window reduce_window_max reduce_window_min reduce_window_sum "
            "select_and_gather_add"
        ),
        reduce_window,
    ),
    "conv_general_dilated": conv,
    "dot_general": _dot,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "fft": _of_last_axes(),
    "gather": gather,
    "lu_pivots_to_permutation": _of_last_axes(1),
    "select_and_scatter_add": select_and_scatter_add,
    "sort": _sort,
    "top_k": _top_k,
    "triangular_solve": _triangular_solve,
    "zeros_mapped_like": _nothing,
}

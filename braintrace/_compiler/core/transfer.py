"""How position ids pass backward through one equation.

Ids are integer arrays of a variable's shape: which hidden position an element reaches, or
one of the codes below. A transfer maps the ids of an equation's outputs to the ids that each
operand receives through this equation, to ``None`` where the equation carries no derivative,
or to `CUT` where it mixes positions.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ..._graph.hidden_group import Ids as Ids
from ..._jax import Equation
from ..._jaxpr import carries_derivative
from ..._jaxpr.data_movement import NOWHERE, is_data_movement, moved_back, moved_operands
from ..._jaxpr.dataflow import CONSTANT, ELEMENTWISE, NONE, REDUCTIONS, Constants, merge
from ..._jaxpr.dataflow.bilinear import dot_axes

MANY = -3  # several positions, by a broadcast


class _Cut:
    """The mark of an operand that reaches the state through mixing."""

    def __repr__(self) -> str:
        return "CUT"


CUT = _Cut()

Contribution = Ids | _Cut | None


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


WINDOWS = _names("reduce_window_sum reduce_window_max reduce_window_min")
COPIES = _names("copy copy_p")
MIXING = _names(
    """
    argsort cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum eig eigh fft
    lu qr sort svd top_k triangular_solve
    """
)


def transfer(
    equation: Equation, out_ids: Sequence[Ids | None], constants: Constants
) -> list[Contribution] | None:
    """Return what every operand of ``equation`` receives; ``None``: its kind is not known."""
    name = equation.primitive.name
    if name in CONSTANT:
        return [None] * len(equation.invars)
    if name in ELEMENTWISE:
        return _elementwise(equation, out_ids)
    if is_data_movement(equation):
        return _move(equation, out_ids, constants)
    if name in REDUCTIONS:
        return [_reduction(equation, out_ids[0])]
    if name in WINDOWS:
        return [_window(equation, out_ids[0])]
    if name == "dot_general":
        return _dot(equation, out_ids[0])
    if name == "scatter-add":
        return _scatter_add(equation, out_ids[0], constants)
    return [CUT] * len(equation.invars) if name in MIXING else None


def _elementwise(equation: Equation, out_ids: Sequence[Ids | None]) -> list[Contribution]:
    if len(equation.outvars) > 1:  # optimization_barrier: operand by operand
        return list(out_ids)
    (ids,) = out_ids
    assert ids is not None
    return [
        (ids if atom.aval.shape == ids.shape else _narrowed(ids, atom.aval.shape))
        if carries_derivative(atom)
        else None
        for atom in equation.invars
    ]


def _narrowed(ids: Ids, shape: tuple[int, ...]) -> Ids:
    """Return what an operand receives that the equation itself broadcasts."""
    size = int(np.prod(shape))
    source = np.broadcast_to(np.arange(size, dtype=np.int32).reshape(shape), ids.shape)
    return spread_back(source, ids, size).reshape(shape)


def _move(
    equation: Equation, out_ids: Sequence[Ids | None], constants: Constants
) -> list[Contribution]:
    back = moved_back(equation, out_ids, NONE)
    if back is not None:
        return list(back)
    sources = constants.sources(equation)
    if sources is None:
        overwritten = equation.primitive.name in ("dynamic_update_slice", "scatter")
        # What is written over comes from no known place; what it is written into stays in place.
        first = out_ids[0] if overwritten else CUT
        return [first, *[CUT] * (len(equation.invars) - 1)]
    carried = moved_operands(equation)
    shapes = [equation.invars[operand].aval.shape for operand in carried]
    sizes = [int(np.prod(shape)) for shape in shapes]
    total = functools.reduce(
        merge,
        [
            spread_back(source, ids, sum(sizes))
            for source, ids in zip(sources, out_ids, strict=True)
            if ids is not None
        ],
    )
    contributions: list[Contribution] = [None] * len(equation.invars)
    pieces = np.split(total, np.cumsum(sizes)[:-1])
    for operand, piece, shape in zip(carried, pieces, shapes, strict=True):
        contributions[operand] = piece.reshape(shape)
    return contributions


def spread_back(source: np.ndarray, ids: Ids, size: int) -> Ids:
    """Give each of ``size`` source elements the id of the output elements made from it."""
    received = np.full(size, NONE, np.int32)
    used = (source != NOWHERE) & (ids != NONE)
    targets, values = source[used], ids[used]
    received[targets] = values
    received[targets[received[targets] != values]] = MANY
    return received


def are_distinct(positions: np.ndarray, size: int) -> bool:
    """Tell whether no position, of ``size`` that there are, is found twice."""
    return int(np.count_nonzero(places_of(positions, size))) == positions.size


def places_of(positions: np.ndarray, size: int) -> np.ndarray:
    """Return for each of ``size`` positions whether it is among some."""
    found = np.zeros(size, bool)
    found[positions] = True
    return found


def _reduction(equation: Equation, ids: Ids | None) -> Contribution:
    assert ids is not None
    if np.any(ids == MANY):  # a reduction that is broadcast back
        return CUT
    shape = equation.invars[0].aval.shape
    return np.broadcast_to(np.expand_dims(ids, tuple(equation.params["axes"])), shape)


def _window(equation: Equation, ids: Ids | None) -> Contribution:
    """Give the elements of each window its id; an element of several windows is mixed."""
    assert ids is not None
    params = equation.params
    padding = params["padding"]
    shape = equation.invars[0].aval.shape
    dilated = any(rate != 1 for rate in params["base_dilation"])
    if np.any(ids == MANY) or dilated or np.min(padding) < 0:
        return CUT
    received = np.full(
        [n + low + high for n, (low, high) in zip(shape, padding, strict=True)], NONE
    )
    outputs = np.indices(ids.shape)
    for offset in np.ndindex(*params["window_dimensions"]):
        steps = zip(
            outputs, params["window_strides"], offset, params["window_dilation"], strict=True
        )
        inside = tuple(place * stride + o * rate for place, stride, o, rate in steps)
        earlier = received[inside]
        if np.any((earlier != NONE) & (ids != NONE) & (earlier != ids)):
            return CUT
        received[inside] = np.where(ids == NONE, earlier, ids)
    own = [slice(low, low + n) for n, (low, _) in zip(shape, padding, strict=True)]
    return received[tuple(own)]


def _dot(equation: Equation, ids: Ids | None) -> list[Contribution]:
    """Pass ids to the operand whose elements reach one position each, over its partner's axes."""
    assert ids is not None
    axes = dot_axes(equation)
    shapes = [atom.aval.shape for atom in equation.invars]
    contributions: list[Contribution] = []
    for own in range(2):
        reached = _one_of(ids, axes.in_result[1 - own])
        if reached is None:
            contributions.append(CUT)
            continue
        order = [*axes.batch[own], *axes.free[own], *axes.summed[own]]
        laid_out = reached.reshape(*reached.shape, *[1] * len(axes.summed[own]))
        full = np.broadcast_to(laid_out, [shapes[own][axis] for axis in order])
        contributions.append(full.transpose(np.argsort(order)))
    return contributions


def _one_of(ids: Ids, axes: tuple[int, ...]) -> Ids | None:
    """Return the one id found along some axes, ``NONE`` aside; ``None`` where there are several."""
    largest = np.max(ids, axis=axes, initial=NONE, where=ids != NONE)
    same = (ids == NONE) | (ids == np.expand_dims(largest, axes))
    return largest if np.all(same) and not np.any(ids < NONE) else None


def _scatter_add(equation: Equation, ids: Ids | None, constants: Constants) -> list[Contribution]:
    """Pass ids to the operand, and to updates that are each added at a place of their own."""
    assert ids is not None
    updates = equation.invars[2].aval
    places = constants.value(equation.invars[1])
    if places is None:
        return [ids, None, CUT]

    def added(values: np.ndarray) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            zeros = np.zeros(ids.shape, np.int32)
            numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
            return np.asarray(jax.lax.scatter_add(zeros, places, values, numbers, mode=mode))

    if np.any(added(np.ones(updates.shape, np.int32)) > 1):
        return [ids, None, CUT]
    source = added(np.arange(1, updates.size + 1, dtype=np.int32).reshape(updates.shape)) - 1
    return [ids, None, spread_back(source, ids, updates.size).reshape(updates.shape)]


def join(first: Contribution, second: Contribution) -> Contribution:
    """Combine what an operand receives along two ways; mixing on either cuts it."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, _Cut) or isinstance(second, _Cut):
        return CUT
    return merge(first, second)

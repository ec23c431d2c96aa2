"""Bilinear products: the two factors of each term of a product or convolution.

A product is linear in either of its factors. The derivative of element ``u`` of the result with
respect to element ``j`` of one factor is an element of the other factor, or zero.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._jax import Equation

NOTHING = -1
"""Used instead of an element if the derivative is zero."""


@dataclasses.dataclass(frozen=True)
class DotAxes:
    """The axes of a ``dot_general``, of its first and of its second operand.

    Attributes
    ----------
    batch
        Axes of both operands and of the result, where they come first.
    summed
        Contracted axes.
    free
        Axes of one operand alone.
    in_result
        The axes of the result that correspond to ``free``.
    """

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    summed: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    in_result: tuple[tuple[int, ...], tuple[int, ...]]


def dot_axes(equation: Equation) -> DotAxes:
    """Return the axes of a ``dot_general``, sorted by their role."""
    summed, batch = equation.params["dimension_numbers"]

    def free_axes(i: int) -> tuple[int, ...]:
        taken, rank = {*summed[i], *batch[i]}, len(equation.invars[i].aval.shape)
        return tuple(axis for axis in range(rank) if axis not in taken)

    free = free_axes(0), free_axes(1)
    first, middle = len(batch[0]), len(batch[0]) + len(free[0])
    in_result = tuple(range(first, middle)), tuple(range(middle, middle + len(free[1])))
    return DotAxes(_pair(batch), _pair(summed), free, in_result)


def _pair(axes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(axes[0]), tuple(axes[1])


def joining(
    equation: Equation, operand: int, inputs: np.ndarray, outputs: np.ndarray
) -> np.ndarray:
    """Return the other factor's element in the product of an input and an output.

    Parameters
    ----------
    equation
        A ``dot_general`` or a convolution.
    operand
        Index of the operand that ``inputs`` are elements of.
    inputs, outputs
        Flat numbers of elements, of one shape.

    Returns
    -------
    numpy.ndarray
        Flat numbers of elements of the other operand, or `NOTHING`.
    """
    shapes = [tuple(atom.aval.shape) for atom in equation.invars]
    result = tuple(equation.outvars[0].aval.shape)
    if equation.primitive.name == "dot_general":
        return _joining_of_dot(shapes, result, dot_axes(equation), operand, inputs, outputs)
    if operand != 0:  # a kernel element that depends on data contributes to many elements
        return np.full(inputs.shape, NOTHING)
    return joining_of_conv((shapes[0], shapes[1], result), inputs, outputs, **equation.params)


def _joining_of_dot(
    shapes: Sequence[tuple[int, ...]],
    result: tuple[int, ...],
    axes: DotAxes,
    operand: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
) -> np.ndarray:
    of_result = np.unravel_index(outputs, result)
    this, other = operand, 1 - operand
    of_this = np.unravel_index(inputs, shapes[this])
    joined = np.ones(inputs.shape, bool)
    of_other: list[Any] = [0] * len(shapes[other])
    for place, (axis, partner) in enumerate(zip(axes.batch[this], axes.batch[other], strict=True)):
        joined &= of_this[axis] == of_result[place]
        of_other[partner] = of_result[place]
    for axis, place in zip(axes.free[this], axes.in_result[this], strict=True):
        joined &= of_this[axis] == of_result[place]
    for axis, place in zip(axes.free[other], axes.in_result[other], strict=True):
        of_other[axis] = of_result[place]
    for axis, partner in zip(axes.summed[this], axes.summed[other], strict=True):
        of_other[partner] = of_this[axis]
    return _elements(of_other, shapes[other], joined)


def joining_of_conv(
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    dimension_numbers: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    feature_group_count: int,
    batch_group_count: int,
    window_strides: Any = None,
    strides: Any = None,
    **_: Any,
) -> np.ndarray:
    """Return the kernel element that connects inputs and outputs of a convolution.

    Parameters
    ----------
    shapes
        The shapes of input, kernel and output.
    inputs, outputs
        Flat numbers of elements, of one shape.
    strides
        Another name of ``window_strides``; the rest is as in ``jax.lax.conv_general_dilated``.
    """
    of_input, of_output = np.unravel_index(inputs, shapes[0]), np.unravel_index(outputs, shapes[2])
    lhs, rhs, out = (
        dimension_numbers.lhs_spec,
        dimension_numbers.rhs_spec,
        dimension_numbers.out_spec,
    )
    window_strides = strides if window_strides is None else window_strides
    # Batch groups are computed as a convolution over another batch axis, and are not covered.
    joined = (of_input[lhs[0]] == of_output[out[0]]) & (batch_group_count == 1)
    per_group = shapes[1][rhs[1]], shapes[1][rhs[0]] // feature_group_count
    joined &= of_input[lhs[1]] // per_group[0] == of_output[out[1]] // per_group[1]
    of_kernel: list[Any] = [0] * len(shapes[1])
    of_kernel[rhs[0]], of_kernel[rhs[1]] = of_output[out[1]], of_input[lhs[1]] % per_group[0]
    for axis, (low, _high) in enumerate(padding):
        place = of_input[lhs[2 + axis]] * lhs_dilation[axis] + low
        offset = place - of_output[out[2 + axis]] * window_strides[axis]
        tap, rest = np.divmod(offset, rhs_dilation[axis])
        joined &= (rest == 0) & (tap >= 0) & (tap < shapes[1][rhs[2 + axis]])
        of_kernel[rhs[2 + axis]] = tap
    return _elements(of_kernel, shapes[1], joined)


def _elements(places: Sequence[Any], shape: tuple[int, ...], joined: np.ndarray) -> np.ndarray:
    """Return the flat numbers of elements where they are joined."""
    inside = [np.where(joined, place, 0) for place in places]
    flat = np.ravel_multi_index(inside, shape) if inside else np.zeros(joined.shape, int)
    return np.asarray(np.where(joined, flat, NOTHING))

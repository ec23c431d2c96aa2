"""Which element of one factor joins an element of the other to an element of their product.

A product is linear in either of its factors: the derivative of element ``u`` of the result with
respect to element ``j`` of one factor is an element of the other, or zero.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jax import Equation

NOTHING = -1
"""In the place of an element: there is none, and the derivative is zero."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def joining(
    equation: Equation, operand: int, inputs: np.ndarray, outputs: np.ndarray
) -> np.ndarray:
    """Return which element of the other factor joins elements of one to elements of the product.

    Parameters
    ----------
    equation
        One of `PRODUCTS`.
    operand
        Which of its two operands ``inputs`` are elements of.
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
        numbers = equation.params["dimension_numbers"]
        return _joining_of_dot(shapes, result, numbers, operand, inputs, outputs)
    if operand != 0:  # of a kernel that is computed from data, every element joins many
        return np.full(inputs.shape, NOTHING)
    return joining_of_conv((shapes[0], shapes[1], result), inputs, outputs, **equation.params)


def _joining_of_dot(
    shapes: Sequence[tuple[int, ...]],
    result: tuple[int, ...],
    numbers: Any,
    operand: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
) -> np.ndarray:
    contracted, batch = numbers
    free = [
        [axis for axis in range(len(shape)) if axis not in (*contracted[i], *batch[i])]
        for i, shape in enumerate(shapes)
    ]
    # The result has the batch axes, then those of the first operand alone, then of the second.
    of_result = np.unravel_index(outputs, result)
    first, second = len(batch[0]), len(batch[0]) + len(free[0])
    in_result = [*zip(batch[0], batch[1], range(first), strict=True)]
    own, other = operand, 1 - operand
    starts = (first, second)
    of_own = np.unravel_index(inputs, shapes[own])
    joined = np.ones(inputs.shape, bool)
    of_other: list[Any] = [0] * len(shapes[other])
    for *axes, place in in_result:
        joined &= of_own[axes[own]] == of_result[place]
        of_other[axes[other]] = of_result[place]
    for offset, axis in enumerate(free[own]):
        joined &= of_own[axis] == of_result[starts[own] + offset]
    for offset, axis in enumerate(free[other]):
        of_other[axis] = of_result[starts[other] + offset]
    for axis, partner in zip(contracted[own], contracted[other], strict=True):
        of_other[partner] = of_own[axis]
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
    """Return which element of the kernel joins elements of input and output of a convolution.

    Parameters
    ----------
    shapes
        Of input, kernel and output.
    inputs, outputs
        Flat numbers of elements, of one shape.
    strides
        Another name of ``window_strides``; the rest is as ``jax.lax.conv_general_dilated`` has it.
    """
    of_input, of_output = np.unravel_index(inputs, shapes[0]), np.unravel_index(outputs, shapes[2])
    lhs, rhs, out = (
        dimension_numbers.lhs_spec,
        dimension_numbers.rhs_spec,
        dimension_numbers.out_spec,
    )
    window_strides = strides if window_strides is None else window_strides
    # Batch groups are computed by a convolution of another batch: nothing is said of those.
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
    kept = [np.where(joined, place, 0) for place in places]
    flat = np.ravel_multi_index(kept, shape) if kept else np.zeros(joined.shape, int)
    return np.asarray(np.where(joined, flat, NOTHING))

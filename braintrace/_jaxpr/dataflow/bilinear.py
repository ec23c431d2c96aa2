"""Bilinear products: the two factors of each term of a product or convolution.

A product is linear in either of its factors. The derivative of element ``u`` of the result with
respect to element ``j`` of one factor is an element of the other factor, or zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..._jax import Equation
from .windows import conv_places

NOTHING = -1
"""Used instead of an element if the derivative is zero."""


Letters: TypeAlias = tuple[str, ...]
"""Names of the axes of an array."""


def dot_letters(equation: Equation) -> tuple[Letters, Letters, Letters]:
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
    shapes = [tuple(atom.aval.shape) for atom in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "dot_general":
        return _joining_of_dot(shapes, dot_letters(equation), operand, inputs, outputs)
    if operand != 0:  # a kernel element that depends on data contributes to many elements
        return np.full(inputs.shape, NOTHING)
    return joining_of_conv(shapes, equation.params, inputs, outputs)


def _joining_of_dot(
    shapes: Sequence[tuple[int, ...]],
    letters: Sequence[Letters],
    operand: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
) -> np.ndarray:
    places = np.unravel_index(inputs, shapes[operand]), np.unravel_index(outputs, shapes[2])
    of_this, of_result = (
        dict(zip(names, axes, strict=True))
        for names, axes in zip((letters[operand], letters[2]), places, strict=True)
    )
    joined = np.ones(inputs.shape, bool)
    for letter in of_this.keys() & of_result.keys():
        joined &= of_this[letter] == of_result[letter]
    known = {**of_this, **of_result}
    return _elements([known[a] for a in letters[1 - operand]], shapes[1 - operand], joined)


def joining_of_conv(
    shapes: Sequence[tuple[int, ...]],
    params: Mapping[str, Any],
    inputs: np.ndarray,
    outputs: np.ndarray,
) -> np.ndarray:
    """Return the kernel element that connects inputs and outputs of a convolution.

    Parameters
    ----------
    shapes
        The shapes of input, kernel and output.
    params
        The parameters of ``jax.lax.conv_general_dilated``.
    inputs, outputs
        Flat numbers of elements, of one shape.
    """
    (x, kernel, _), numbers = shapes, params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    of_input, of_output = np.unravel_index(inputs, x), np.unravel_index(outputs, shapes[2])
    # Batch groups are computed as a convolution over another batch axis, and are not covered.
    joined = (of_input[lhs[0]] == of_output[out[0]]) & (params["batch_group_count"] == 1)
    read, made = kernel[rhs[1]], kernel[rhs[0]] // params["feature_group_count"]
    joined &= of_input[lhs[1]] // read == of_output[out[1]] // made
    of_kernel: list[Any] = [0] * len(kernel)
    of_kernel[rhs[0]], of_kernel[rhs[1]] = of_output[out[1]], of_input[lhs[1]] % read
    for axis, places in enumerate(conv_places(shapes, params), 2):
        at_taps = places[of_output[out[axis]]] == of_input[lhs[axis]][..., None]
        joined &= at_taps.any(-1)
        of_kernel[rhs[axis]] = at_taps @ np.arange(places.shape[1])
    return _elements(of_kernel, kernel, joined)


def _elements(places: Sequence[Any], shape: tuple[int, ...], joined: np.ndarray) -> np.ndarray:
    """Return the flat numbers of elements where they are joined."""
    inside = [np.where(joined, place, 0) for place in places]
    flat = np.ravel_multi_index(inside, shape) if inside else np.zeros(joined.shape, int)
    return np.asarray(np.where(joined, flat, NOTHING))

r"""Rules for windows and convolutions, axis by axis.

A window at output :math:`o` and tap :math:`t` of an axis reads the place

.. math:: (o \cdot stride + t \cdot rate - low) / dilation

if it is a whole number inside of the axis. A window reads an element if this condition holds along
every axis, so joins along one axis after the other are exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._jax import Equation
from .constants import Constants
from .lattices import Flow, Lattice, joined, spread


def conv(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a convolution: batch, features and each spatial axis separately."""
    params, (x, kernel) = equation.params, operands
    shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
    numbers, every, flows = params["dimension_numbers"], conv_places(shapes, params), []
    batch, features, *spatial = (shapes[2][axis] for axis in numbers.out_spec)
    if x is not None:
        flow = _by_spec(lattice, x, numbers.lhs_spec)
        for axis, places in enumerate(every):
            flow = _read(lattice, flow, axis + 2, places)
        flows.append(_of_features(lattice, flow, features, params))
    if kernel is not None:
        flow = lattice.over(_by_spec(lattice, kernel, numbers.rhs_spec), [1])
        for axis, places in enumerate(every):
            size, taps = shapes[0][numbers.lhs_spec[axis + 2]], places.shape[1]
            flow = _read(lattice, flow, axis + 1, np.where(places < size, np.arange(taps), taps))
        flows.append(flow[None])
    result = joined(lattice, [spread(lattice, f, (batch, features, *spatial)) for f in flows])
    assert result is not None
    return [_by_spec(lattice, result, np.argsort(numbers.out_spec).tolist())]


def _by_spec(lattice: Lattice, flow: np.ndarray, spec: Sequence[int]) -> np.ndarray:
    return flow.transpose(*spec, *range(flow.ndim - lattice.rank, flow.ndim))


def _of_features(
    lattice: Lattice, flow: np.ndarray, features: int, params: dict[str, int]
) -> np.ndarray:
    """Return the flow of output features: inputs, or samples, of their group joined."""
    of_features, of_batch = params["feature_group_count"], params["batch_group_count"]
    samples, inputs, *rest = flow.shape
    if of_batch > 1:
        groups = flow.reshape(of_batch, samples // of_batch, inputs, *rest)
        by_group = np.moveaxis(lattice.over(groups, [2]), 0, 1)
    else:
        groups = flow.reshape(samples, of_features, inputs // of_features, *rest)
        by_group = lattice.over(groups, [2])
    return np.repeat(by_group, features // by_group.shape[1], axis=1)


def conv_places(shapes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[np.ndarray]:
    """Return for each spatial axis what `window_places` returns.

    ``shapes`` are the shapes of input, kernel and output.
    """
    (x, kernel, out), numbers = shapes, params["dimension_numbers"]
    return [
        window_places(
            x[numbers.lhs_spec[axis + 2]],
            out[numbers.out_spec[axis + 2]],
            kernel[numbers.rhs_spec[axis + 2]],
            params["window_strides"][axis],
            low,
            params["lhs_dilation"][axis],
            params["rhs_dilation"][axis],
        )
        for axis, (low, _) in enumerate(params["padding"])
    ]


def window_places(
    size: int, outputs: int, window: int, stride: int, low: int, dilation: int, rate: int
) -> np.ndarray:
    """Return ``(outputs, window)``: the element of an axis that is read, or ``size``."""
    at = np.arange(outputs)[:, None] * stride + np.arange(window) * rate - low
    place, rest = np.divmod(at, dilation)
    return np.where((rest == 0) & (place >= 0) & (place < size), place, size)


def _read(lattice: Lattice, flow: np.ndarray, axis: int, places: np.ndarray) -> np.ndarray:
    """Join the elements that each output reads along an axis."""
    end = (*flow.shape[:axis], 1, *flow.shape[axis + 1 : flow.ndim - lattice.rank])
    padded = np.concatenate([flow, lattice.empty(end)], axis)
    return lattice.over(np.take(padded, places, axis), [axis + 1])


def _readers(places: np.ndarray, size: int) -> np.ndarray:
    """Return ``(size, most)``: the outputs that read an element, padded."""
    readers = [np.flatnonzero((places == place).any(1)) for place in range(size)]
    most = max(map(len, readers), default=0)
    filled = np.full((size, most), len(places))
    for place, outputs in enumerate(readers):
        filled[place, : len(outputs)] = outputs
    return filled


def _places_of_windows(
    equation: Equation, read: Sequence[int], made: Sequence[int]
) -> list[np.ndarray]:
    """Return for each axis the elements that the windows of an equation read."""
    params, count = equation.params, len(read)
    ones = (1,) * count
    return [
        window_places(size, outputs, window, stride, low, dilation, rate)
        for size, outputs, window, stride, (low, _), dilation, rate in zip(
            read,
            made,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation") or ones,
            params.get("window_dilation") or ones,
            strict=True,
        )
    ]


def reduce_window(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Join the elements of each window, of all operands that have windows."""
    read, made = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    count = len(equation.outvars) if equation.primitive.name == "reduce_window" else len(operands)
    flow = joined(lattice, operands[:count])
    if flow is not None:
        for axis, places in enumerate(_places_of_windows(equation, read, made)):
            flow = _read(lattice, flow, axis, places)
    starts = joined(lattice, operands[count:])
    if starts is not None:
        starts = spread(lattice, starts, made)
    return [joined(lattice, [flow, starts])] * len(equation.outvars)


def select_and_scatter_add(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow windows backward, from a window's selected element to all its elements."""
    source, operand = operands
    made, read = (atom.aval.shape for atom in equation.invars)
    every = _places_of_windows(equation, read, made)
    if operand is not None:
        for axis, places in enumerate(every):
            operand = _read(lattice, operand, axis, places)
    flow = joined(lattice, [source, operand])
    assert flow is not None
    for axis, places in enumerate(every):
        flow = _read(lattice, flow, axis, _readers(places, read[axis]))
    return [flow]


def prefix(lattice: Lattice, flow: np.ndarray, axis: int, backward: bool) -> np.ndarray:
    """Join each element with all before it along an axis (after it, if ``backward``).

    After ``k`` rounds each element has been joined with the ``2**k - 1`` elements before it.
    """
    size, step = flow.shape[axis], 1
    while step < size:
        at = np.arange(size) + (step if backward else -step)
        places = np.where((at >= 0) & (at < size), at, size)
        flow = lattice.join(flow, _read(lattice, flow, axis, places[:, None]))
        step *= 2
    return flow

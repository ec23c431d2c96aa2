"""Which sample each number of a linear program depends on.

Cotangents of a step start with the samples of the states that they are of; every equation hands on
those of its operands. What depends on none has `NONE`, on several `MIXED`. Values that are no
cotangents count as constant: a product with one is what it is for all samples. A rule knows which
elements meet; of an operation without one, all elements do.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._jax import AnyJaxpr, Atom, Equation, bind, call_body
from .._jaxpr import interpret, loop_of
from .._jaxpr.data_movement import is_data_movement, moved, moved_operands
from .._jaxpr.dataflow import ELEMENTWISE, MIXED, NONE, merge

Samples: TypeAlias = np.ndarray | None
"""The sample of every element of an array; ``None``: all of them depend on none."""


def samples_of_outputs(jaxpr: AnyJaxpr, given: Sequence[Samples]) -> list[Samples]:
    """Return the samples of a program's outputs, given those of its inputs."""
    return interpret(jaxpr, list(given), _run, lambda constant: None)


def _run(_: int, equation: Equation, operands: list[Samples]) -> Sequence[Samples]:
    if all(operand is None for operand in operands):
        return [None] * len(equation.outvars)
    name, body = equation.primitive.name, call_body(equation)
    if body is not None:
        return samples_of_outputs(body, operands)
    if name in ELEMENTWISE:
        return _elementwise(equation, operands)
    if is_data_movement(equation):
        return _moved(equation, operands)
    rule = _RULES.get(name)
    found = None if rule is None else rule(equation, operands)
    return _uniform(equation, operands) if found is None else found


def _shape(atom: Atom) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape


def _joined(every: Sequence[Samples]) -> Samples:
    found = [samples for samples in every if samples is not None]
    return functools.reduce(merge, found) if found else None


def _over(samples: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return what is found along some axes, which go."""
    axes = tuple(axes)
    largest = np.max(samples, axis=axes, initial=NONE)
    smallest = np.min(
        np.where(samples == NONE, _again(largest, axes, samples.shape), samples), axes
    )
    mixed = (samples == MIXED).any(axes) | (smallest != largest)
    return np.where(mixed, MIXED, largest).astype(np.int32)


def _again(found: np.ndarray, axes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return what is found along some axes, with these axes again."""
    return np.broadcast_to(np.expand_dims(found, tuple(axes)), shape)


def _elementwise(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    if len(equation.outvars) > 1:  # optimization_barrier: operand by operand
        return operands
    shape = _shape(equation.outvars[0])
    return [_joined([None if o is None else np.broadcast_to(o, shape) for o in operands])]


def _moved(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    carried = moved_operands(equation)
    full = [
        np.full(_shape(atom), NONE, np.int32) if samples is None else samples
        for atom, samples in zip(equation.invars, operands, strict=True)
    ]
    found = moved(equation, full)
    if found is not None:
        return found
    return _INDEXED[equation.primitive.name](equation, [full[place] for place in carried])


def _is_spread(samples: np.ndarray, axes: Sequence[int]) -> bool:
    """Tell whether samples are the same along some axes."""
    first = samples[tuple(slice(0, 1) if a in axes else slice(None) for a in range(samples.ndim))]
    return bool(np.all(samples == first))


def _first(samples: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    return samples[tuple(slice(0, 1) if a in axes else slice(None) for a in range(samples.ndim))]


def _dynamic_slice(equation: Equation, carried: list[np.ndarray]) -> Sequence[Samples]:
    (samples,), sizes = carried, equation.params["slice_sizes"]
    cut = [axis for axis, size in enumerate(sizes) if size != samples.shape[axis]]
    if not _is_spread(samples, cut):
        return _uniform(equation, carried)
    return [np.broadcast_to(_first(samples, cut), sizes)]


def _dynamic_update_slice(equation: Equation, carried: list[np.ndarray]) -> Sequence[Samples]:
    samples, update = carried
    cut = [axis for axis, size in enumerate(update.shape) if size != samples.shape[axis]]
    if not _is_spread(update, cut):
        return _uniform(equation, carried)
    return [merge(samples, np.broadcast_to(_first(update, cut), samples.shape))]


def _gather(equation: Equation, carried: list[np.ndarray]) -> Sequence[Samples]:
    """Wherever it looks along an axis, it finds the same there."""
    (samples,) = carried
    looked = equation.params["dimension_numbers"].start_index_map
    if not _is_spread(samples, looked):
        return _uniform(equation, carried)
    indices = np.zeros(_shape(equation.invars[1]), np.int32)
    return [_bound(equation, [samples, indices])]


def _scatter(equation: Equation, carried: list[np.ndarray]) -> Sequence[Samples]:
    samples, update = carried
    looked = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    if set(np.unique(update)) == {NONE}:
        return [samples]
    empty = np.full(samples.shape, NONE, np.int32)
    indices = np.zeros(_shape(equation.invars[1]), np.int32)
    numbers = equation.params["dimension_numbers"]
    with jax.ensure_compile_time_eval():
        # Where several are written to one place, the largest and the smallest tell.
        placed = [
            np.asarray(write(empty, indices, update, numbers))
            for write in (jax.lax.scatter_max, _scatter_min)
        ]
    low = np.where(placed[1] == _HIGH, NONE, placed[1])
    both = np.where(placed[0] == low, placed[0], MIXED).astype(np.int32)
    return [merge(samples, _again(_over(both, looked), looked, both.shape))]


_HIGH = np.iinfo(np.int32).max


def _scatter_min(
    empty: np.ndarray, indices: np.ndarray, update: np.ndarray, numbers: Any
) -> jax.Array:
    high = np.full_like(empty, _HIGH)
    low: jax.Array = jax.lax.scatter_min(high, indices, update, numbers)
    return low


def _bound(equation: Equation, operands: list[np.ndarray]) -> np.ndarray:
    params = {**equation.params, "fill_value": NONE}
    with jax.ensure_compile_time_eval():
        return np.asarray(bind(equation.replace(params=params), operands)[0])


def _pad(equation: Equation, carried: list[np.ndarray]) -> Sequence[Samples]:
    with jax.ensure_compile_time_eval():
        return [np.asarray(bind(equation, [carried[0], np.int32(NONE)])[0])]


_INDEXED: Mapping[str, Callable[[Equation, list[np.ndarray]], Sequence[Samples]]] = {
    "gather": _gather,
    "scatter": _scatter,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
}


def _reduction(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    assert operands[0] is not None
    return [_over(operands[0], equation.params["axes"])]


def _along(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    """Everything along one axis meets."""
    axis = equation.params.get("axis", equation.params.get("dimension"))
    if axis is None:
        return None
    (samples,) = (samples for samples in operands if samples is not None)
    return _meeting(equation, samples, [axis])


def _meeting(equation: Equation, samples: np.ndarray, axes: Sequence[int]) -> Sequence[Samples]:
    """Return the samples of outputs where everything along some axes meets."""
    found = _over(samples, axes)
    return [_again(found, axes, _shape(var)) for var in equation.outvars]


def _window(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    """Everything along the axes of a window meets."""
    (samples,) = (samples for samples in operands if samples is not None)
    axes = [a for a, size in enumerate(equation.params["window_dimensions"]) if size > 1]
    return _meeting(equation, samples, axes)


def _fourier(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    (samples,) = operands
    assert samples is not None
    last = range(samples.ndim - len(equation.params["fft_lengths"]), samples.ndim)
    return _meeting(equation, samples, last)


def _triangular_solve(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    matrix, samples = operands
    if matrix is not None or samples is None:
        return None
    return _meeting(equation, samples, [samples.ndim - 1 - equation.params["left_side"]])


def _linear_solve(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    """Return what the program of the solver says, whose matrix is a constant."""
    lengths, count = equation.params["const_lengths"], sum(equation.params["const_lengths"])
    if any(samples is not None for samples in operands[:count]):
        return None
    own = [None] * lengths.solve
    return samples_of_outputs(equation.params["jaxprs"].solve, [*own, *operands[count:]])


def _dot(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    if sum(samples is not None for samples in operands[:2]) > 1:
        return None
    own = 0 if operands[0] is not None else 1
    samples, (contract, batch) = operands[own], equation.params["dimension_numbers"]
    assert samples is not None
    free = [
        [a for a in range(len(_shape(atom))) if a not in (*contract[i], *batch[i])]
        for i, atom in enumerate(equation.invars[:2])
    ]
    left = [a for a in range(samples.ndim) if a not in contract[own]]
    reduced = _over(samples, contract[own]) if contract[own] else samples
    ordered = reduced.transpose([left.index(a) for a in (*batch[own], *free[own])])
    before = len(batch[0]) + (len(free[0]) if own == 1 else 0)
    shape = list(ordered.shape)
    lead, rest = shape[: len(batch[0])], shape[len(batch[0]) :]
    others = [1] * len(free[1 - own])
    laid_out = [*lead, *rest, *others] if own == 0 else [*lead, *others, *rest]
    assert before >= 0
    return [np.broadcast_to(ordered.reshape(laid_out), _shape(equation.outvars[0]))]


def _convolution(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples] | None:
    """Keep samples of the first operand apart; everything else meets."""
    samples, params = operands[0], equation.params
    grouped = params["batch_group_count"] != 1
    if samples is None or operands[1] is not None or grouped:
        return None
    numbers = params["dimension_numbers"]
    own, others = numbers.lhs_spec[0], numbers.lhs_spec[1:]
    shape = [1] * samples.ndim
    shape[numbers.out_spec[0]] = samples.shape[own]
    return [np.broadcast_to(_over(samples, others).reshape(shape), _shape(equation.outvars[0]))]


def _scan(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    loop = loop_of(equation, operands)
    if loop.condition is not None:
        return _uniform(equation, operands)
    slices = [None if s is None else _over(s, [0]) for s in loop.sequences]
    carried, count = list(loop.carried), len(loop.carried)
    while True:
        found = samples_of_outputs(loop.body, [*loop.fixed, *carried, *slices])
        new = [_joined([a, b]) for a, b in zip(carried, found[:count], strict=True)]
        if all(_same(a, b) for a, b in zip(carried, new, strict=True)):
            break
        carried = new
    stacked = [
        None if s is None else np.broadcast_to(s, _shape(var))
        for s, var in zip(found[count:], equation.outvars[count:], strict=True)
    ]
    return [*carried, *stacked]


def _same(first: Samples, second: Samples) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _branches(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    every = [samples_of_outputs(b, operands[1:]) for b in equation.params["branches"]]
    return [_joined(found) for found in zip(*every, strict=True)]


def _uniform(equation: Equation, operands: Sequence[Samples]) -> Sequence[Samples]:
    """Return the samples of outputs whose every element is made of all elements."""
    found = np.unique(np.concatenate([s.ravel() for s in operands if s is not None]))
    of_all = [int(sample) for sample in found if sample != NONE]
    one = of_all[0] if len(of_all) == 1 else MIXED if of_all else NONE
    return [np.full(_shape(var), one, np.int32) for var in equation.outvars]


_RULES: Mapping[str, Callable[[Equation, Sequence[Samples]], Sequence[Samples] | None]] = {
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort"), _along),
    **dict.fromkeys(("reduce_window_sum", "select_and_scatter_add"), _window),
    "fft": _fourier,
    "triangular_solve": _triangular_solve,
    "custom_linear_solve": _linear_solve,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "scatter-add": lambda equation, operands: _scatter(
        equation, [_filled(equation, operands, place) for place in (0, 2)]
    ),
    "scan": _scan,
    "cond": _branches,
}


def _filled(equation: Equation, operands: Sequence[Samples], place: int) -> np.ndarray:
    samples = operands[place]
    empty = np.full(_shape(equation.invars[place]), NONE, np.int32)
    return empty if samples is None else samples


def axis_of_samples(samples: np.ndarray, count: int) -> int | None:
    """Return the axis along which an array has one sample after the other, or ``None``.

    Elements that depend on none go with any.
    """
    for axis, size in enumerate(samples.shape):
        if size == count:
            shape = [1] * samples.ndim
            shape[axis] = count
            expected = np.arange(count, dtype=np.int32).reshape(shape)
            if np.all((samples == NONE) | (samples == expected)):
                return axis
    return None


def laid_out(shape: Sequence[int], axis: int | None, count: int) -> np.ndarray:
    """Return the sample of every element of an array, given the axis of samples."""
    if axis is None:
        return np.zeros(shape, np.int32)
    assert shape[axis] == count
    index = [1] * len(shape)
    index[axis] = count
    numbers = np.arange(count, dtype=np.int32).reshape(index)
    return np.ascontiguousarray(np.broadcast_to(numbers, shape)) if math.prod(shape) else numbers

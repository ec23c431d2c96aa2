"""Vmapping of a step for one sample over the samples of a batch."""

from collections.abc import Callable

import jax

from .._errors import CompilationError
from .._jax import Aval
from .._typing import path_name
from .state_arrays import StateArray


def mapped_axes(arrays: list[StateArray], arguments: int) -> list[str]:
    """Return for every input ``'mapped'``, ``'shared'`` or ``'key'``."""
    return ["mapped"] * arguments + [*map(_axis, arrays)]


def _axis(array: StateArray) -> str:
    if array.kind == "random":
        return "key"
    if array.per_sample:
        return "mapped"
    if array.written and array.kind != "parameter":
        raise CompilationError(
            f"`update` writes State '{path_name(array.path)}', which has one value for all "
            "samples, but the model is mapped over the samples of a batch: each sample would "
            "write another value. Make it a `brainstate.ShortTermState`, one per sample, or "
            "write the model for a batch (`batch_size` without `vmap`)."
        )
    return "shared"


def mapped_avals(avals: list[Aval], axes: list[str], batch_size: int) -> list[Aval]:
    """Return the types of a vmapped step's arguments, from those for one sample."""
    return [
        jax.ShapeDtypeStruct((batch_size, *aval.shape), aval.dtype) if axis == "mapped" else aval
        for aval, axis in zip(avals, axes, strict=True)
    ]


def map_over_batch(
    step: Callable[..., list[jax.Array]], arrays: list[StateArray], axes: list[str], batch_size: int
) -> Callable[..., list[jax.Array]]:
    """Vmap a step over the batch; every sample has its own random key."""
    key_outputs = _key_outputs(arrays)
    in_axes = [None if axis == "shared" else 0 for axis in axes]

    def mapped_step(*values: jax.Array) -> list[jax.Array]:
        inputs = [
            jax.random.split(value, batch_size) if axis == "key" else value
            for value, axis in zip(values, axes, strict=True)
        ]
        results = list(jax.vmap(step, in_axes=in_axes, out_axes=0)(*inputs))
        for index in key_outputs:
            results[index] = results[index][0]
        return results

    return mapped_step


def _key_outputs(arrays: list[StateArray]) -> list[int]:
    """Return the places of random keys among the outputs, counted from the end."""
    ends = [array for array in arrays if array.written]
    return [i - len(ends) for i, array in enumerate(ends) if array.kind == "random"]

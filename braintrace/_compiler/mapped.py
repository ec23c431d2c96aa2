"""A step that is written for one sample, mapped over the samples of a batch."""

from collections.abc import Callable
from typing import Any

import jax

from .._errors import CompilationError
from .._typing import path_name
from .slots import Slot


def mapped_axes(slots: list[Slot], arguments: int) -> list[str]:
    """Say of every input how it is mapped: over its batch axis, not at all, or as a key."""
    mapped = [_axis(slot) for slot in slots for _ in range(slot.count or 1)]
    return ["mapped"] * arguments + mapped


def _axis(slot: Slot) -> str:
    if slot.kind == "random":
        return "key"
    if slot.per_sample:
        return "mapped"
    if slot.written and slot.kind != "parameter":
        raise CompilationError(
            f"`update` writes State '{path_name(slot.path)}', of which there is one, while the "
            "model is mapped over the samples of a batch: every sample would write another value. "
            "Make it a `brainstate.ShortTermState`, one per sample, or write the model for a "
            "batch (`batch_size` without `vmap`)."
        )
    return "shared"


def mapped_avals(avals: list[Any], axes: list[str], batch_size: int) -> list[Any]:
    """Return the types of a mapped step's arguments, from those of one sample."""
    return [
        jax.ShapeDtypeStruct((batch_size, *aval.shape), aval.dtype) if axis == "mapped" else aval
        for aval, axis in zip(avals, axes, strict=True)
    ]


def map_over_batch(
    step: Callable[..., list[Any]], slots: list[Slot], axes: list[str], batch_size: int
) -> Callable[..., list[Any]]:
    """Return a step of one sample as one of a batch, in which every sample has a random key."""
    key_outputs = _key_outputs(slots)
    in_axes = [None if axis == "shared" else 0 for axis in axes]

    def mapped_step(*values: Any) -> list[Any]:
        inputs = [
            jax.random.split(value, batch_size) if axis == "key" else value
            for value, axis in zip(values, axes, strict=True)
        ]
        results = list(jax.vmap(step, in_axes=in_axes, out_axes=0)(*inputs))
        for index in key_outputs:
            results[index] = results[index][0]
        return results

    return mapped_step


def _key_outputs(slots: list[Slot]) -> list[int]:
    """Return the positions, counted from the end, at which random keys come out."""
    ends = [
        slot
        for slot in slots
        if slot.written
        for _ in range(1 if slot.count is None else slot.count + 1)
    ]
    return [i - len(ends) for i, slot in enumerate(ends) if slot.kind == "random"]

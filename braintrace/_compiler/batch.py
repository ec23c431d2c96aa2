"""Batch axes of States: the axes that follow the ``batch_size`` of ``init_state``.

One trace of ``init_state`` with a size that no other axis has finds them. If ``init_state`` follows
no size (States made in a constructor, a fixed batch), the first axis is the batch axis if it has
the size that the user has given.
"""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import initialise, trace_stateful, unnoticed_states
from .._graph.traced_model import Axes, Batch
from .._jaxpr.lattices import BOTTOM, Flow
from .._typing import Path

Shape = tuple[int, ...]
Shapes = Mapping[Path, Sequence[Shape]]
"""Shapes of the leaves of States, by path."""


def batch_of(model: brainstate.nn.Module, mapped: int | None, batch_size: int | None) -> Batch:
    """Return the number of samples of a model, and the batch axes of its States.

    Parameters
    ----------
    model
        The model, its States initialised.
    mapped
        Batch size if a model for one sample is vmapped; ``None``: it is not.
    batch_size
        The size that the user has passed to ``init_state``; ``None``: unknown.
    """
    now = _shapes(model)
    if mapped is not None:
        return Batch(mapped, MappingProxyType({p: (0,) * len(s) for p, s in now.items()}))
    size = _unlike_any(now, batch_size or 1)
    made = _made_with(model, size)
    if made is not None and made.keys() == now.keys() and made != now:
        return _following(now, made, size)
    axes = {
        path: tuple(0 if batch_size and s[:1] == (batch_size,) else None for s in shapes)
        for path, shapes in now.items()
    }
    has_batch = any(0 in leaves for leaves in axes.values())
    return Batch(batch_size if has_batch else None, MappingProxyType(axes))


def _shapes(model: brainstate.nn.Module) -> Shapes:
    return {
        tuple(path): [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(state.value)]
        for path, state in model.states(brainstate.ShortTermState).items()
    }


def _unlike_any(now: Shapes, batch_size: int) -> int:
    """Return a multiple of a batch size that no axis of the States has."""
    taken = {batch_size, *(size for leaves in now.values() for shape in leaves for size in shape)}
    return next(batch_size * k for k in itertools.count(2) if batch_size * k not in taken)


def _made_with(model: brainstate.nn.Module, size: int) -> Shapes | None:
    """Return the shapes of States for another batch size; ``None``: there is an error with it."""
    shapes: Shapes = {}

    def make() -> None:
        nonlocal shapes
        twin = brainstate.graph.clone(model)
        initialise(twin, batch_size=size)
        shapes = _shapes(twin)

    try:
        with unnoticed_states():
            trace_stateful(make)
    except Exception:  # `init_state` may fail in any way with another size
        return None
    return shapes


def _following(now: Shapes, made: Shapes, size: int) -> Batch:
    """Return the axes that follow ``batch_size``, given the States' shapes for two sizes."""
    axes: dict[Path, Axes] = {}
    unclear: list[Path] = []
    samples: set[int] = set()
    for path, shapes in now.items():
        found: list[int | None] = []
        for before, after in zip(shapes, made[path], strict=True):
            rank = len(before) if len(before) == len(after) else 0
            differ = [a for a in range(rank) if before[a] != after[a]]
            is_followed = [after[a] for a in differ] == [size]
            found.append(differ[0] if is_followed else None)
            if is_followed:
                samples.add(before[differ[0]])
            elif differ:
                unclear.append(path)
        axes[path] = tuple(found)
    if len(samples) > 1:
        unclear = [*now]
    count = min(samples, default=None)
    # A State of a single sample is shared by all samples.
    return Batch(count, MappingProxyType(axes), () if count == 1 else tuple(unclear))


def with_axes(batch: Batch, axes: Mapping[Path, int | None]) -> Batch:
    """Add the batch axes of filters of readouts; ``None``: samples are coupled on the way."""
    every = {**batch.axes, **{path: (axis,) for path, axis in axes.items()}}
    coupled = () if batch.samples is None else (p for p, axis in axes.items() if axis is None)
    return Batch(batch.samples, MappingProxyType(every), (*batch.unclear, *coupled))


def follow(samples: Flow, expected: np.ndarray) -> bool:
    """Test whether elements depend on the expected samples alone, or on none."""
    return samples is None or not np.any((samples != BOTTOM) & (samples != expected))


def laid_out(shape: Sequence[int], axis: int | None, count: int) -> np.ndarray:
    """Return the sample of every element of an array, given the axis of samples."""
    if axis is None:
        return np.zeros(shape, np.int32)
    assert shape[axis] == count
    index = [1] * len(shape)
    index[axis] = count
    numbers = np.arange(count, dtype=np.int32).reshape(index)
    return np.array(np.broadcast_to(numbers, shape))

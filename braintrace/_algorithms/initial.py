"""The values that a model's states have at the start of a sequence."""

from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import ShapeError
from .._typing import Path

Shapes = tuple[tuple[int, ...], ...]


def fresh_values(
    model: brainstate.nn.Module,
    mapped: int | None,
    batch_size: int | None,
    options: dict[str, Any],
) -> dict[Path, Any]:
    """Return what ``init_state`` gives every short-term State, leaving the model as it is.

    Parameters
    ----------
    model
        The model.
    mapped
        Size of the batch axis over which a model for one sample is mapped, or ``None``.
    batch_size
        Given to ``init_state``; for a mapped model, the new size of the batch axis.
    options
        Further arguments of ``init_state``.
    """
    twin = brainstate.graph.clone(model)
    size = None if mapped is not None else batch_size
    arguments = {} if size is None else {"batch_size": size}
    brainstate.nn.init_all_states(twin, **arguments, **options)
    values = {
        tuple(path): state.value for path, state in twin.states(brainstate.ShortTermState).items()
    }
    if mapped is None:
        return values
    copies = mapped if batch_size is None else batch_size
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), values)


def shapes_of(values: Mapping[Path, Any]) -> Shapes:
    """Return the shapes of all values of States, in the order of their paths."""
    leaves = (leaf for path in sorted(values, key=str) for leaf in jax.tree.leaves(values[path]))
    return tuple(tuple(jnp.shape(leaf)) for leaf in leaves)


def values_as_now(
    model: brainstate.nn.Module,
    now: Mapping[Path, Any],
    mapped: int | None,
    options: dict[str, Any],
) -> dict[Path, Any]:
    """Return fresh values of the shapes that those of the short-term States have now.

    Raises
    ------
    ShapeError
        If ``init_state`` gives them neither without a batch size nor with that of an axis.
    """
    shapes = shapes_of(now)
    leading = sorted({shape[0] for shape in shapes if shape})
    others = sorted({size for shape in shapes for size in shape[1:]})
    for size in (None, *dict.fromkeys([*leading, *others])):
        try:
            values = fresh_values(model, mapped, size, options)
        except TypeError:  # `init_state` wants a batch size
            continue
        if shapes_of(values) == shapes:
            return values
    raise ShapeError(
        f"`{type(model).__name__}.init_state` does not give the states the shapes that they have "
        "now. Call `reset_state` with the batch size (and the options) that you initialise with."
    )

"""Arguments of ``update`` for another batch size: the first axis of that size changes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import ShapeError
from ..._graph import TracedModel
from .initial_values import Shapes


def example_arguments(traced: TracedModel) -> Any:
    """Return zeros like the arguments of ``update``."""
    leaves = (jnp.zeros(var.aval.shape, var.aval.dtype) for var in traced.argument_vars)
    return jax.tree.unflatten(traced.argument_tree, leaves)


def arguments_for_batch(
    traced: TracedModel, shapes: tuple[Shapes, Shapes], batch_size: int | None
) -> Any:
    """Return zeros like the arguments of ``update`` for another batch size.

    Parameters
    ----------
    traced
        The traced model.
    shapes
        Shapes of the short-term States of the traced step, and with the new batch size.
    batch_size
        The new batch size.

    Raises
    ------
    ShapeError
        If anything except the batch size differs.
    """
    before, after = shapes
    if batch_size is None or list(map(len, before)) != list(map(len, after)):
        raise ShapeError(
            f"The states have shapes {', '.join(map(str, after))}; the model was compiled for "
            f"{', '.join(map(str, before))}. Call `compile_graph` with an example of these "
            "shapes; reset an algorithm that was compiled inside a map inside the same map."
        )
    pairs = zip(itertools.chain(*before), itertools.chain(*after), strict=True)
    old = min((old for old, new in pairs if old != new == batch_size), default=None)
    old = old if traced.batch_size is None else traced.batch_size
    leaves = []
    for var in traced.argument_vars:
        shape = list(var.aval.shape)
        if old in shape:
            shape[shape.index(old)] = batch_size
        leaves.append(jnp.zeros(shape, var.aval.dtype))
    return jax.tree.unflatten(traced.argument_tree, leaves)

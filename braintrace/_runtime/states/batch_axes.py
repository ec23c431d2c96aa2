"""Arguments of ``update`` for another batch size.

``init_state`` declares the batch axes of the states. There is no such declaration for the arguments
of ``update``, and sizes may be equal by accident. `axes_of_arguments` follows each axis of an
argument to the states.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ..._compiler import axes_of_arguments
from ..._errors import ShapeError
from ..._graph import ETraceGraph, TracedModel
from .initial_values import Shapes


def example_arguments(traced: TracedModel) -> Any:
    """Return zeros like the arguments of ``update``."""
    leaves = (jnp.zeros(var.aval.shape, var.aval.dtype) for var in traced.argument_vars)
    return jax.tree.unflatten(traced.argument_tree, leaves)


def arguments_for_batch(
    graph: ETraceGraph, shapes: tuple[Shapes, Shapes], batch_size: int | None
) -> Any:
    """Return zeros like the arguments of ``update`` for another batch size.

    Parameters
    ----------
    graph
        The analysed model.
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
    traced = graph.traced
    pairs = zip(itertools.chain(*before), itertools.chain(*after), strict=True)
    old = min((old for old, new in pairs if old != new == batch_size), default=None)
    is_mapped = traced.batch_size is not None
    axes = (
        [0] * len(traced.argument_vars)
        if is_mapped
        else axes_of_arguments(traced, graph.batch, old)
    )
    leaves = []
    for var, axis in zip(traced.argument_vars, axes, strict=True):
        shape = [batch_size if i == axis else own for i, own in enumerate(var.aval.shape)]
        leaves.append(jnp.zeros(shape, var.aval.dtype))
    return jax.tree.unflatten(traced.argument_tree, leaves)

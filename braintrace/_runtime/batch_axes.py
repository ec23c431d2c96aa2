"""Which axes of a step's arguments are the batch.

``init_state`` says which axes of the states are: those that follow its ``batch_size``. Nothing says
it of the arguments of ``update``: sizes may agree by accident. An axis of an argument is taken for
the batch if it has its size, and if a step can be traced with another size there: one that is no
other axis's, so that nothing fits by accident.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import trace_stateful
from .._compiler import described
from .._errors import ShapeError
from .._graph import TracedModel
from .initial_values import Shapes, twin_of

MOST_TRIALS = 256

Axes = tuple[int | None, ...]
"""The batch axis of each leaf of the arguments; ``None``: it has none."""


def example_arguments(traced: TracedModel) -> Any:
    """Return zeros like the arguments of ``update``."""
    leaves = (jnp.zeros(var.aval.shape, var.aval.dtype) for var in traced.argument_vars)
    return jax.tree.unflatten(traced.argument_tree, leaves)


def arguments_for_batch(
    model: brainstate.nn.Module,
    traced: TracedModel,
    shapes: tuple[Shapes, Shapes],
    batch_size: int | None,
) -> Any:
    """Return zeros like the arguments of ``update`` for another batch size.

    Parameters
    ----------
    model
        The model.
    traced
        Its step, as it was traced.
    shapes
        Of the short-term States for which it was traced, and of those with the new batch size.
    batch_size
        The new one.

    Raises
    ------
    ShapeError
        If something else than the batch size differs.
    """
    before, after = shapes
    if batch_size is None or list(map(len, before)) != list(map(len, after)):
        raise ShapeError(
            f"The states have shapes {', '.join(map(str, after))}; the model was compiled for "
            f"{', '.join(map(str, before))}. Call `compile_graph` with an example for these, or "
            "reset an algorithm that was compiled inside a map inside it."
        )
    pairs = zip(itertools.chain(*before), itertools.chain(*after), strict=True)
    old = min((old for old, new in pairs if old != new == batch_size), default=None)
    axes = (
        (0,) * len(traced.argument_vars)
        if traced.batch_size is not None
        else _batch_axes(model, traced, old, batch_size)
    )
    leaves = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in _resized(traced, axes, batch_size))
    return jax.tree.unflatten(traced.argument_tree, leaves)


def _batch_axes(
    model: brainstate.nn.Module, traced: TracedModel, old: int | None, new: int
) -> Axes:
    """Return the first choice with which a step can be traced; leading axes come first."""
    choices = [
        [*(axis for axis, size in enumerate(var.aval.shape) if size == old), None]
        for var in traced.argument_vars
    ]
    likely, *others = itertools.islice(itertools.product(*choices), MOST_TRIALS)
    if not others:
        return likely
    for size in (_unlike_any(traced, old or 1), new):
        for axes in (likely, *others):
            if _can_be_traced(model, traced, _resized(traced, axes, size), size):
                return axes
    return likely


def _unlike_any(traced: TracedModel, old: int) -> int:
    """Return a multiple of a batch size that no axis of arguments and states has."""
    shapes = [var.aval.shape for var in traced.argument_vars]
    shapes += [leaf.shape for leaf in traced.leaves]
    taken = {1, *itertools.chain.from_iterable(shapes)}
    return next(old * k for k in itertools.count(2) if old * k not in taken)


def _resized(traced: TracedModel, axes: Axes, size: int) -> Iterator[jax.ShapeDtypeStruct]:
    for var, axis in zip(traced.argument_vars, axes, strict=True):
        shape = [size if i == axis else own for i, own in enumerate(var.aval.shape)]
        yield jax.ShapeDtypeStruct(shape, var.aval.dtype)


def _can_be_traced(
    model: brainstate.nn.Module, traced: TracedModel, leaves: Iterator[Any], size: int
) -> bool:
    def step(*leaves: Any) -> None:
        twin = twin_of(model)
        brainstate.nn.init_all_states(twin, batch_size=size)
        states = twin.states(brainstate.ShortTermState).values()
        before = [described(state.value) for state in states]
        twin.update(*jax.tree.unflatten(traced.argument_tree, leaves))
        if before != [described(state.value) for state in states]:
            raise ValueError("a state has changed its shape")

    try:
        trace_stateful(step, *leaves)
    except Exception:  # whatever the model makes of other shapes
        return False
    return True

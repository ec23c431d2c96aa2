"""Checks of the example arguments of ``update``, before a model is traced."""

import brainstate
import jax
import numpy as np

from ..._arguments import (
    BATCH_SIZE,
    MODEL,
    check_arrays,
    check_option,
    check_takes,
    named,
    parameter_names,
    shown,
)
from ..._errors import ShapeError
from ..._typing import PyTree, path_name


def check_example(
    model: brainstate.nn.Module, arguments: tuple[PyTree, ...], batch_size: int | None
) -> None:
    """Refuse an invalid model, and arguments that its ``update`` could not take.

    Raises
    ------
    OptionError
        If the model is missing, or its ``update`` takes another number of arguments.
    DtypeError
        If an argument contains a value that JAX does not compute with.
    ShapeError
        If an argument of a vmapped model does not start with the batch axis.
    """
    check_option("model", model, MODEL)
    check_option("batch_size", batch_size, BATCH_SIZE)
    update = f"{type(model).__name__}.update"
    check_takes(update, model.update, arguments, f"{len(arguments)} example arguments")
    for name, argument in zip(argument_names(model, arguments), arguments, strict=True):
        check_arrays(name, argument, f"`{update}`: ")
    if batch_size is not None:
        _check_batch(arguments, batch_size)


def argument_names(model: brainstate.nn.Module, arguments: tuple[PyTree, ...]) -> list[str]:
    """Return the parameter names of ``update`` for its arguments."""
    return parameter_names(model.update, len(arguments))


def _check_batch(arguments: tuple[PyTree, ...], batch_size: int) -> None:
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(arguments)]
    if any(shape[:1] != (batch_size,) for shape in shapes):
        raise ShapeError(
            f"The model is mapped over a batch of `batch_size`={batch_size}, so every argument "
            "needs this first axis; the example arguments have shapes "
            f"{', '.join(map(str, shapes))}."
        )


def call_of_update(model: brainstate.nn.Module, arguments: tuple[PyTree, ...]) -> str:
    """Print the arguments of a failing ``update`` and the model's hidden states."""
    call = named(argument_names(model, arguments), arguments)
    states = ", ".join(
        f"State '{path_name(path)}' = {shown(state.value)}"
        for path, state in model.states(brainstate.HiddenState).items()
    )
    ancestors = f" and {states}" if states else ""
    return f"`{type(model).__name__}.update` fails for {call}{ancestors}"

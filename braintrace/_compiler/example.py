"""Checks of the example arguments of ``update``, before a model is traced."""

import brainstate
import jax
import numpy as np

from .._checks import named, parameter_names, shown
from .._errors import ShapeError
from .._typing import PyTree, path_name


def argument_names(model: brainstate.nn.Module, arguments: tuple[PyTree, ...]) -> list[str]:
    """Return the parameter names of ``update`` for its arguments."""
    return parameter_names(model.update, len(arguments))


def check_batch(arguments: tuple[PyTree, ...], batch_size: int) -> None:
    """Refuse arguments of a vmapped model that do not start with the batch axis."""
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

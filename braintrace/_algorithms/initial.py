"""The values that a model's states have at the start of a sequence."""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._typing import Path


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

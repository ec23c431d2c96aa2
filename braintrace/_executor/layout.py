"""Between the layouts of a hidden state, of its group's positions and of an operation's output.

Every function takes arrays with any number of leading axes before the layout's own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import Branch, HiddenGroup, HiddenParamOpRelation, Reach


def trace_key(relation: HiddenParamOpRelation, group: HiddenGroup, state: int) -> str:
    """Name the trace of one relation for one hidden state, the same in every process."""
    return f"{relation.key}>{group.states[state].name}"


def x_key(graph: Any, relation: HiddenParamOpRelation) -> str:
    """Name the input of an operation; operations that share their input share the name."""
    relations = graph.hidden_param_op_relations
    return next(r.key for r in relations if r.x_var is relation.x_var)


def new_state_to_positions(group: HiddenGroup, state: int, value: jax.Array) -> jax.Array:
    """Bring an array in the layout of a state's new variable to the group's positions."""
    layout = group.layouts[state]
    lead = value.shape[: value.ndim - len(group.new_vars[state].aval.shape)]
    if layout is not None:
        value = value.reshape(*lead, -1)[..., np.argsort(layout.ravel())]
    return value.reshape(*lead, *group.shape)


def positions_to_table(reach: Reach, value: jax.Array, group: HiddenGroup) -> jax.Array:
    """Give every element of ``y`` the value at the position that it reaches."""
    lead = value.shape[: value.ndim - len(group.shape)]
    if reach.kind == "tiled":
        assert reach.tile is not None
        once, split = reach.tile
        value = jnp.broadcast_to(value.reshape(*lead, *once), (*lead, *split))
    elif reach.kind == "gather":
        flat = value.reshape(*lead, -1)
        taken = jnp.take(flat, np.maximum(reach.positions, 0).ravel(), axis=-1)
        value = jnp.where(reach.positions.ravel() >= 0, taken, jnp.zeros((), taken.dtype))
    return value.reshape(*lead, *reach.table_shape)


def branch_to_table(reach: Reach, branch: Branch, value: jax.Array) -> jax.Array:
    """Put the elements of a branch's variable at their places in the table."""
    if branch.slots is not None:
        size = reach.positions.size
        slots = np.where(branch.slots < 0, size, branch.slots)
        value = jnp.zeros(size, value.dtype).at[slots].add(value.ravel(), mode="drop")
    return value.reshape(reach.table_shape)


def over_fan_out(reach: Reach, function: Any, *arrays: Any) -> Any:
    """Apply a function of y-shaped arrays to each layer of a fan-out.

    Without one the function is applied as it is; with one, its results get the fan-out as
    their first axis.
    """
    return jax.vmap(function)(*arrays) if reach.fan_out > 1 else function(*arrays)

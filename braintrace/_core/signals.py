r"""Signals, adjoints and resets of states, per unit of a group or as a flattened state has them.

A reset state does not depend on earlier values: its row of ``D`` is zero, :math:`D^t[v, a, c] = 0`
if ``v`` belongs to a reset sample. Traces and adjoints then follow the recursions of separate
sequences. ``reset`` is a boolean for all samples, or one for each. A state without a batch axis is
shared by all samples, and is reset if all of them are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import OptionError
from .._graph import Adjoints, ETraceGraph, FlatState, HiddenGroup, Signal
from .._jaxpr import reached
from .layout import new_state_to_elements, old_state_to_elements
from .probed_step import Probes, pre_step_probe


def signals(group: HiddenGroup, signal: Probes) -> dict[int, jax.Array]:
    """Return the learning signals of a group's states, per element; missing ones are zero.

    The next step's signal for a state before it is included: the signal of an output that reads the
    old state, or of a window that starts there.
    """
    result: dict[int, jax.Array] = {}
    for a, state in enumerate(group.states):
        if state.name in signal:
            result[a] = new_state_to_elements(group, a, signal[state.name])
        if (name := pre_step_probe(state)) in signal:
            pre_step = old_state_to_elements(group, a, signal[name])
            later = jnp.concatenate([pre_step[1:], jnp.zeros_like(pre_step[:1])])
            result[a] = result[a] + later if a in result else later
    return result


def flat_signals(flat: FlatState, signal: Probes) -> dict[str, jax.Array]:
    """Return the same for the states of a flattened state, by name and in their layouts."""
    result = {leaf.name: signal[leaf.name] for leaf in flat.leaves if leaf.name in signal}
    for leaf in flat.leaves:
        if (name := pre_step_probe(leaf)) in signal:
            later = jnp.concatenate([signal[name][1:], jnp.zeros_like(signal[name][:1])])
            result[leaf.name] = result.get(leaf.name, 0) + later
    return result


def of_past(graph: ETraceGraph, signal: Probes) -> Signal:
    """Return the signals of a chunk's first step for the states before it, by name."""
    probes = {state.name: pre_step_probe(state) for state in graph.traced_states}
    return {name: signal[probe][0] for name, probe in probes.items() if probe in signal}


def at_entry(graph: ETraceGraph, mu: Signal) -> Adjoints:
    """Return the adjoints of the states before a window, per element of their groups."""
    return {
        group.index: {
            a: old_state_to_elements(group, a, mu[state.name])
            for a, state in enumerate(group.states)
            if state.name in mu
        }
        for group in graph.traced_groups
    }


def reachable_blocks(group: HiddenGroup, rows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the blocks ``(i, j)`` of products of ``D`` that can be nonzero."""

    def read(new: int) -> list[int]:
        return [old for state, old in group.transition if state == new]

    return sorted((row, old) for row in rows for old in reached([row], read))


# --- resets


def over_first_axis(value: jax.Array, ndim: int) -> jax.Array:
    """Append axes of size 1 to an array, up to ``ndim`` axes."""
    return value.reshape(*value.shape, *(1,) * (ndim - value.ndim))


def where_flagged(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Select zeros where flags of the first axes are not set."""
    return jnp.where(over_first_axis(flags, value.ndim), value, 0)


def flags_along(axis: int | None, flags: Any, ndim: int) -> Any:
    """Reshape flags, one for all samples or one for each, to the batch axis of an array.

    An array without a batch axis is shared by all samples, and is reset if all of them are.
    """
    if flags.ndim == 0:
        return flags
    if axis is None:
        return flags.all(-1)
    return flags.reshape([-1 if a == axis else 1 for a in range(ndim)])


def at_elements(graph: ETraceGraph, group: HiddenGroup, flags: jax.Array) -> jax.Array:
    """Broadcast flags, one for all samples or one for each, to the elements of a group.

    Raises
    ------
    OptionError
        If flags are per sample, and only some states of an element have a batch axis.
    """
    axes = {state.name: graph.batch.axis(state) for state in group.states}
    if flags.ndim == 0 or set(axes.values()) == {None}:
        return jnp.broadcast_to(flags_along(None, flags, len(group.shape)), group.shape)
    for name, axis in axes.items():
        if axis is None:
            raise OptionError(
                f"All samples share State '{name}', which is coupled elementwise to "
                f"{', '.join(map(repr, axes))}, so single samples cannot be reset. Give one flag "
                "for all samples."
            )
    for state, layout in zip(group.states, group.old_layouts, strict=True):
        if layout is None:  # at all positions, in order
            along = flags_along(axes[state.name], flags, len(state.shape))
            return jnp.broadcast_to(along, state.shape).reshape(group.shape)
    sample = np.zeros(group.num_positions, np.int32)
    for state, layout in zip(group.states, group.old_layouts, strict=True):
        assert layout is not None
        axis = axes[state.name]
        sample[layout] = flags_along(axis, np.arange(flags.size), layout.ndim)
    return flags[sample].reshape(group.shape)


def probes_after_reset(graph: ETraceGraph, probes: Probes, reset: jax.Array) -> Probes:
    """Return probes without those of old values that have been reset."""
    after = dict(probes)
    for state in graph.traced_states:
        if (name := pre_step_probe(state)) in probes:
            is_new = flags_along(graph.batch.axis(state), reset, probes[name].ndim)
            after[name] = jnp.where(is_new, 0, probes[name])
    return after

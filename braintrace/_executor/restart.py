r"""Steps before which samples start anew.

A restarted state no longer depends on anything before it: its row of the transition is zero,

.. math:: D^t[v, a, c] = 0 \quad \text{where } v \text{ belongs to a restarted sample},

and the recursions of the traces and of the adjoint, fed with that, are those of separate
sequences. ``restart`` is a boolean for all samples, or one per entry of the states' first axis.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import ETraceGraph, HiddenGroup, Records
from .jacobians import transition_key
from .probed_step import Probes, pre_step_probe


def over_first_axis(value: jax.Array, ndim: int) -> jax.Array:
    """Give an array of one value, or of one per entry of the first axes, ``ndim`` axes."""
    return value.reshape(*value.shape, *(1,) * (ndim - value.ndim))


def where_flagged(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Return zeros, whatever there is, where flags of the first axes are not set."""
    return jnp.where(over_first_axis(flags, value.ndim), value, 0)


def at_positions(group: HiddenGroup, per_sample: jax.Array) -> jax.Array:
    """Bring one value for all samples, or one per sample, to the positions of a group."""
    if per_sample.ndim == 0:
        return jnp.broadcast_to(per_sample, group.shape)
    for state, layout in zip(group.states, group.old_layouts, strict=True):
        if layout is None:  # at all positions, in order
            whole = jnp.broadcast_to(over_first_axis(per_sample, len(state.shape)), state.shape)
            return whole.reshape(group.shape)
    sample = np.zeros(group.num_positions, np.int32)
    for layout in group.old_layouts:
        assert layout is not None
        sample[layout] = over_first_axis(np.arange(len(layout)), layout.ndim)
    return per_sample[sample].reshape(group.shape)


def restarted(graph: ETraceGraph, records: Records, restart: jax.Array) -> Records:
    """Return the records of one step, before which some samples have started anew."""
    if graph.whole is not None:
        return dataclasses.replace(records, restart=restart)
    transitions = dict(records.D)
    for group in graph.traced_groups:
        for a, c in group.transition:
            key = transition_key(group, a, c)
            if key not in transitions:
                continue
            is_new = at_positions(group, restart)
            transitions[key] = jnp.where(is_new, 0, transitions[key])
    return dataclasses.replace(records, D=transitions, restart=restart)


def restarted_probes(graph: ETraceGraph, probes: Probes, restart: jax.Array) -> Probes:
    """Return probes without those on old values that are not there any more."""
    pre_step = {}
    for state in graph.read_by_output:
        probe = probes[pre_step_probe(state)]
        pre_step[pre_step_probe(state)] = jnp.where(over_first_axis(restart, probe.ndim), 0, probe)
    return {**probes, **pre_step}

"""Signals and adjoints of states, per unit of a group or as a flattened state has them."""

import jax
import jax.numpy as jnp

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

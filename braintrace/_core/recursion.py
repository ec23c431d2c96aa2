r"""Recursions over time within a chunk, per state element.

For the steps ``s = 1 … K`` of a chunk, with recorded learning signals ``l`` and Jacobian blocks
``D``,

.. math::

    \lambda^s = l^s + (D^{s+1})^\top \lambda^{s+1}, \qquad \lambda^{K+1} = 0, \qquad
    \mu = (D^1)^\top \lambda^1, \qquad
    P^s = D^K \cdots D^{s+1}.

All arrays are per element of a group, with time as their first axis. A ``D`` that is equal in all
steps may have a time axis of length 1.
"""

import functools
import operator
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from .._graph import ETraceGraph, HiddenGroup, Records, Signal
from .._jaxpr import reached
from .jacobian.jacobians import transition_key
from .layout import new_state_to_elements, old_state_to_elements
from .probed_step import Probes, pre_step_probe
from .time_loops import scan_records

Times = Callable[[jax.Array, jax.Array], jax.Array]
"""``(factor, value) -> product``; see `products.nan_safe`."""

States = dict[int, jax.Array]
"""One array per state of a group."""

ByGroup = Mapping[int, Mapping[int, jax.Array]]
"""Arrays per element of each group, by its index and by state."""

Blocks = dict[tuple[int, int], jax.Array]
"""Blocks of an ``n × n`` matrix per element, by ``(row, column)``; missing blocks are zero."""


def transition_blocks(group: HiddenGroup, records: Records) -> Blocks:
    """Return the recorded ``D`` of a group."""
    return {(a, c): records.D[transition_key(group, a, c)] for a, c in group.transition}


def signals(group: HiddenGroup, signal: Probes) -> dict[int, jax.Array]:
    """Return the learning signals of a group's states, per element.

    The next step's signal for a state before it is included: the signal of an output that reads the
    old state, or of a window that starts there.
    """
    result = {
        a: new_state_to_elements(group, a, signal[state.name])
        for a, state in enumerate(group.states)
    }
    for a, state in enumerate(group.states):
        if (name := pre_step_probe(state)) in signal:
            pre_step = old_state_to_elements(group, a, signal[name])
            result[a] = result[a] + jnp.concatenate([pre_step[1:], jnp.zeros_like(pre_step[:1])])
    return result


def at_entry(graph: ETraceGraph, mu: Signal) -> ByGroup:
    """Return the adjoints of the states before a window, per element of their groups."""
    return {
        group.index: {
            a: old_state_to_elements(group, a, mu[state.name])
            for a, state in enumerate(group.states)
            if state.name in mu
        }
        for group in graph.traced_groups
    }


def backward(
    group: HiddenGroup, blocks: Blocks, signal: dict[int, jax.Array], times: Times = operator.mul
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """Return ``λ`` of every state, and ``μ`` of the states that the next step reads."""
    if not blocks:
        return signal, {}

    def step(carry: States, recorded: tuple[States, Blocks]) -> tuple[States, States]:
        signal_now, D = recorded
        adjoint = {a: s + carry[a] if a in carry else s for a, s in signal_now.items()}
        before = {
            c: functools.reduce(operator.add, [times(adjoint[a], D[a, d]) for a, d in D if d == c])
            for c in group.read_states
        }
        return before, adjoint

    # States of a group may have different precisions.
    dtype = jnp.result_type(*signal.values(), *blocks.values())
    start = {c: jnp.zeros_like(signal[c][0], dtype) for c in group.read_states}
    signal = {a: value.astype(dtype) for a, value in signal.items()}
    steps = len(next(iter(signal.values())))
    mu, adjoint = scan_records(step, start, (signal, blocks), steps, reverse=True)
    return adjoint, mu


def suffix_products(
    group: HiddenGroup,
    blocks: Blocks,
    rows: tuple[int, ...],
    steps: int,
    times: Times = operator.mul,
) -> tuple[Blocks, Blocks]:
    """Return ``P^s`` for every step (time first), and ``P^0``.

    For a single step, they are the identity and ``D`` itself, without the blocks that can only be
    nonzero after more steps: a trace multiplied by zeros would still be read.

    Parameters
    ----------
    group, blocks
        The group and its recorded ``D``.
    rows
        Required rows.
    steps
        Length ``K`` of the chunk.
    times
        Multiplication of ``P`` and ``D``.
    """
    dtype = jnp.result_type(*blocks.values()) if blocks else group.states[0].dtype
    if steps == 1:
        now = {(i, i): jnp.ones((1, *group.shape), dtype) for i in rows}
        return now, {(i, j): D[0].astype(dtype) for (i, j), D in blocks.items() if i in rows}
    pairs = _reachable(group, rows)
    identity = {(i, j): jnp.full(group.shape, 1.0 if i == j else 0.0, dtype) for i, j in pairs}

    def step(carry: Blocks, D: Blocks) -> tuple[Blocks, Blocks]:
        before = {
            (i, j): functools.reduce(
                operator.add,
                [times(carry[i, m], D[m, d]) for m, d in D if d == j and (i, m) in carry]
                or [jnp.zeros(group.shape, dtype)],
            )
            for i, j in pairs
        }
        return before, carry

    first, each = scan_records(step, identity, blocks, steps, reverse=True)
    return each, first


def _reachable(group: HiddenGroup, rows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the blocks ``(i, j)`` of products of ``D`` that can be nonzero."""

    def read(new: int) -> list[int]:
        return [old for state, old in group.transition if state == new]

    return sorted((row, old) for row in rows for old in reached([row], read))

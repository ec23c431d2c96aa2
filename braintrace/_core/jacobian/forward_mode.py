"""Forward-mode Jacobians of a step, for states that depend on a ``while`` loop.

A loop of unknown length has no reverse mode. A tangent of ones for all elements of a leaf results,
at each state element, in the sum over the leaf elements that reach it. The elements are therefore
split into sets in which each state element occurs at most once, with one tangent per set.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ..._graph import ETraceGraph, HiddenGroup
from ..._jax import Var
from ..._jaxpr import Program
from ..layout import new_state_to_elements
from .while_loops import contains_while


def has_while(program: Program, target: Var) -> bool:
    """Test whether ``target`` is computed through a ``while`` loop."""
    behind = program.making(program.depends_on([target]))
    return any(contains_while(program.equations[index]) for index in behind)


def forward_mode_jacobian(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    new_state: Callable[..., jax.Array],
    leaves: dict[Var, jax.Array],
) -> dict[Var, jax.Array]:
    """Return the derivative of the state element that each leaf element reaches.

    Parameters
    ----------
    graph, group, state
        The model, and the state whose new value is differentiated.
    new_state
        The new value as a function of the leaves.
    leaves
        Values of old states and outputs of ETP operations.
    """
    values = tuple(leaves.values())
    rows = {}
    for index, var in enumerate(leaves):
        positions = _positions(graph, group, state, var)
        row = jnp.zeros(var.aval.size, values[index].dtype)
        for turn in _disjoint_sets(positions):
            tangents = [jnp.zeros_like(value) for value in values]
            tangents[index] = jnp.asarray(turn.reshape(var.aval.shape), values[index].dtype)
            _, pushed = jax.jvp(new_state, values, tuple(tangents))
            at_elements = new_state_to_elements(group, state, pushed).ravel()
            row = row + jnp.where(turn, at_elements[np.maximum(positions, 0)], 0)
        rows[var] = row.reshape(var.aval.shape)
    return rows


def _positions(graph: ETraceGraph, group: HiddenGroup, state: int, var: Var) -> np.ndarray:
    """Return the state element that each element of a leaf reaches, or ``-1``."""
    for old, layout in zip(group.states, group.old_layouts, strict=True):
        if var is old.in_var:
            return np.arange(var.aval.size) if layout is None else layout.ravel()
    for relation in graph.hidden_param_op_relations:
        for influence in relation.influences:
            for point in influence.taps:
                if influence.group == group.index and point.state == state and point.var is var:
                    positions = np.append(influence.positions.ravel(), -1)
                    every = np.arange(influence.positions.size)
                    return positions[every if point.outputs is None else point.outputs]
    raise AssertionError("a leaf is an old state or a tap")


def _disjoint_sets(positions: np.ndarray) -> list[np.ndarray]:
    """Split elements into sets in which no state element occurs twice."""
    rank = np.full(positions.shape, -1)
    seen: dict[int, int] = {}
    for element, position in enumerate(positions):
        if position >= 0:
            rank[element] = seen.get(int(position), 0)
            seen[int(position)] = rank[element] + 1
    return [rank == turn for turn in range(int(rank.max(initial=-1)) + 1)]

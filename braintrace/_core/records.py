r"""Residuals of a step, and its Jacobian blocks ``D`` and ``Df``.

.. math::

    D^t[v, a, c] = (\partial h^t[v, a]) / (\partial h^{t-1}[v, c])
    \qquad
    D_f^t[u, a] = (\partial h^t[p(u), a]) / \partial y^t[u]

Both are derivatives of one state's new value with respect to the old states and the outputs of ETP
operations, with everything that couples elements held constant. Each element then reaches only one
element of a state, so one vector-Jacobian product with ones computes all of them.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import ETraceGraph, HiddenGroup, HiddenParamOpRelation, Records, Weights
from .._jax import Equation, Var, bind, is_var
from .._jaxpr import Rule, evaluate
from .layout import names_of, row_name, trace_sites, x_key
from .local_step import LocalStep, Values, evaluated_vars, read_vars

Inputs: TypeAlias = Mapping[Var, Any]
"""Values of the inputs of a program."""


def operands(graph: ETraceGraph, inputs: Inputs) -> Weights:
    """Return the operands that have gradients: for each relation, its evaluated prologue."""
    wanted = graph.operand_atoms
    atoms = [atom for own in wanted.values() for atom in own.values()]
    values = iter(evaluate(graph.traced.program, atoms, inputs))  # shared equations run once
    return {key: {name: next(values) for name in own} for key, own in wanted.items()}


def with_weights(graph: ETraceGraph, weights: Weights, group: int | None = None) -> dict[int, Rule]:
    """Return rules that run the relations' operations on given weights, held constant.

    Outputs that no trace follows (a gate that acts only through another weight) have the ordinary
    gradient of the step.

    Parameters
    ----------
    graph, weights
        The model and its operands.
    group
        Only the relations that reach this group; ``None``: all.
    """

    def rule_for(relation: HiddenParamOpRelation) -> Rule:
        held = jax.lax.stop_gradient(weights[relation.key])
        traced = _traced_elements(relation, group)

        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            with_held = list(values)
            for name, position in relation.trainable_positions.items():
                with_held[position] = held[name]
            (y,) = bind(equation, with_held)
            if traced is None:
                return [y]
            (differentiated,) = bind(equation, values)
            return [jnp.where(traced, y, differentiated)]

        return rule

    return {
        relation.equation: rule_for(relation)
        for relation in graph.hidden_param_op_relations
        if group is None or any(influence.group == group for influence in relation.influences)
    }


def _traced_elements(relation: HiddenParamOpRelation, group: int | None) -> np.ndarray | None:
    """Return the elements of the output that reach a group by a trace; ``None``: all of them."""
    reached = [influence for influence in relation.influences if influence.group == group]
    if not reached:
        return None
    traced = np.asarray((reached[0].positions >= 0).any(0))
    return None if traced.all() else traced


def residuals(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> Records:
    """Return the residuals of one step that the learning rule needs.

    Parameters
    ----------
    graph
        The compiled model.
    inputs
        Values of the program's inputs; the result has no gradient with respect to them.
    weights
        See `operands`.
    """
    inputs = {var: jax.lax.stop_gradient(value) for var, value in inputs.items()}
    if "step" in graph.needs:
        return Records(x={}, inputs=tuple(inputs[v] for v in graph.recorded_inputs))
    weights = jax.lax.stop_gradient(weights)
    program, relations = graph.traced.program, graph.hidden_param_op_relations
    given = [r.x_var for r in relations if r.x_var is not None]
    wanted = list(dict.fromkeys([*evaluated_vars(graph), *filter(is_var, given)]))
    found = evaluate(program, wanted, inputs, rules=with_weights(graph, weights))
    known = dict(zip(wanted, found, strict=True))
    x, values = {}, {}
    if "x" in graph.needs:
        keys = [x_key(graph, r) for r in relations if r.x_var is not None]
        pairs = zip(keys, given, strict=True)
        x = {key: known[atom] if is_var(atom) else atom.val for key, atom in pairs}
    if "values" in graph.needs:
        read = read_vars(graph)
        values = {n: known[v] for n, v in zip(names_of(program, read), read, strict=True)}
    result: Records = jax.lax.stop_gradient(Records(x=x, values=values))
    return result


def blocks(
    graph: ETraceGraph, group: HiddenGroup, values: Values
) -> tuple[dict[tuple[int, int], jax.Array], dict[str, jax.Array]]:
    """Return ``D`` of one step, by ``(new, old)`` state, and ``Df``, by the keys of traces.

    The unit row of each state is pulled back on its own: it has no entries for other states.

    Parameters
    ----------
    graph, group
        The compiled model, and one of its groups.
    values
        See `LocalStep`.
    """
    D, Df = dict[tuple[int, int], jax.Array](), dict[str, jax.Array]()
    for state in range(group.num_state):
        local = LocalStep(graph, group, values, (state,))
        new, back = jax.vjp(local, local.old, local.taps)
        if not new:
            continue
        of_old, of_taps = back(jax.tree.map(jnp.ones_like, new))
        rows, outputs = local.rows_of_old(of_old), local.rows_of_outputs(of_taps)
        D.update({(a, c): rows[c] for a, c in group.transition if a == state})
        for site in trace_sites(graph, group):
            if state in site.influence.states:
                Df[site.key(state)] = outputs[row_name(graph, site)]
    return D, Df

r"""The step's own Jacobians: ``D``, ``Df`` and the operations' inputs.

.. math::

    D^t[v, a, c] = \frac{\partial h^t[v, a]}{\partial h^{t-1}[v, c]}
    \qquad
    D_f^t[u, a] = \frac{\partial h^t[p(u), a]}{\partial y^t[u]}

Both come from the derivative of one state's new value with respect to the old states and the
marked outputs, with everything that mixes positions held constant. Each element then reaches
one position only, so that pulling back a one for every position gives all of them at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import ETraceGraph, HiddenGroup, HiddenParamOpRelation, Records, Weights
from .._jax import Atom, Equation, Var, bind, is_var
from .._jaxpr import Rule, evaluate
from .forward_mode import has_while, pushed_forward
from .layout import injection_to_slots, old_state_to_positions, trace_sites, x_key
from .maxima import bind_differentiable, maxima_of

Inputs: TypeAlias = Mapping[Var, Any]
"""Values of the inputs of a program."""


def transition_key(group: HiddenGroup, a: int, c: int) -> str:
    """Name the block ``D[a, c]`` of a group."""
    return f"{group.states[a].name}<{group.states[c].name}"


def operands(graph: ETraceGraph, inputs: Inputs) -> Weights:
    """Return the trainable operands of every relation: its prologue, evaluated."""
    program = graph.traced.program
    weights: Weights = {}
    for relation in graph.hidden_param_op_relations:
        names = list(relation.trainable_vars)
        values = evaluate(program, [relation.trainable_vars[name] for name in names], inputs)
        weights[relation.key] = dict(zip(names, values, strict=True))
    return weights


def with_weights(graph: ETraceGraph, weights: Weights, group: int | None = None) -> dict[int, Rule]:
    """Return rules that run the relations' operations on given weights, held constant.

    What an operation computes besides, and no trace carries (a gate that acts through another
    weight only), keeps the ordinary gradient of the step.

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
    """Return which elements of the output reach a group by a trace; ``None``: all of them."""
    reached = [influence for influence in relation.influences if influence.group == group]
    if not reached:
        return None
    traced = np.asarray((reached[0].positions >= 0).any(0))
    return None if traced.all() else traced


def jacobians(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> Records:
    """Return what the learning rule needs of one step.

    Parameters
    ----------
    graph
        The compiled model.
    inputs
        Values of the program's inputs; no gradient flows to them from the result.
    weights
        See `operands`.
    """
    inputs = {var: jax.lax.stop_gradient(value) for var, value in inputs.items()}
    weights = jax.lax.stop_gradient(weights)
    values = _values(graph, inputs, weights)
    records = Records(x={}, D={}, Df={})
    for relation in graph.hidden_param_op_relations:
        if "x" in graph.needs and relation.x_var is not None:
            records.x[x_key(graph, relation)] = values(relation.x_var)
    maxima = maxima_of(graph.traced.program)
    for group in graph.traced_groups:
        for state in range(group.num_states):
            _rows(graph, group, state, inputs, values, maxima, records)
    found: Records = jax.lax.stop_gradient(records)
    return found


class _Values:
    """Values of this step's variables, all those that the Jacobians need computed at once."""

    def __init__(self, known: dict[Var, jax.Array]) -> None:
        self.known = known

    def __call__(self, atom: Atom) -> jax.Array:
        return self.known[atom] if is_var(atom) else atom.val


def _values(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> _Values:
    wanted: dict[Var, None] = {}
    for relation in graph.hidden_param_op_relations:
        points = [p.var for influence in relation.influences for p in influence.injection_points]
        wanted.update(dict.fromkeys([relation.x_var, relation.y_var, *points]))
    wanted.update(dict.fromkeys(_opaque_outputs(graph)))
    for group in graph.hidden_groups:
        wanted.update(dict.fromkeys(group.new_vars))
        wanted.update(dict.fromkeys(s.joined_var for s in group.states))
    targets = [atom for atom in wanted if isinstance(atom, Var)]
    found = evaluate(graph.traced.program, targets, inputs, rules=with_weights(graph, weights))
    return _Values(dict(zip(targets, found, strict=True)))


def _opaque_outputs(graph: ETraceGraph) -> list[Var]:
    """Return the outputs of the operations that a walk does not pass."""
    program = graph.traced.program
    return [var for index in graph.opaque_equations for var in program.equations[index].outvars]


def _rows(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    inputs: Inputs,
    values: _Values,
    maxima: dict[int, Rule],
    records: Records,
) -> None:
    """Add the row ``a = state`` of ``D`` and of ``Df``."""
    old = [c for a, c in group.transition if a == state and "D" in graph.needs]
    influences = [
        (site, point)
        for site in trace_sites(graph, group)
        for point in site.influence.injection_points
        if point.state == state and "Df" in graph.needs
    ]
    leaves: dict[Var, jax.Array] = {
        group.states[c].in_var: inputs[group.states[c].in_var] for c in old
    }
    leaves.update({point.var: values(point.var) for _, point in influences})
    if not leaves:
        return
    held = _held(graph, group, state, values)
    program = graph.traced.program
    rules = {**maxima, **_cut_rules(group, state)}

    def new_state(*changed: jax.Array) -> jax.Array:
        overrides = {**held, **dict(zip(leaves, changed, strict=True))}
        return evaluate(program, [group.new_vars[state]], inputs, overrides, rules)[0]

    differentiate = pushed_forward if has_while(program, group.new_vars[state]) else _pulled_back
    rows = differentiate(graph, group, state, new_state, leaves)
    for c in old:
        key = transition_key(group, state, c)
        row = rows[group.states[c].in_var]
        records.D[key] = old_state_to_positions(group, c, row)
    for site, point in influences:
        row = rows[point.var]
        if point.var is not site.relation.y_var:
            row = row * _from_output(graph, site.relation.y_var, point.var, inputs, values)
        key = site.key(state)
        slots = injection_to_slots(site.influence, point, row)
        records.Df[key] = records.Df[key] + slots if key in records.Df else slots


def _pulled_back(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    new_state: Callable[..., jax.Array],
    leaves: dict[Var, jax.Array],
) -> dict[Var, jax.Array]:
    """Return the derivative of each leaf's element to the one position that it reaches."""
    value, pull_back = jax.vjp(new_state, *leaves.values())
    return dict(zip(leaves, pull_back(jnp.ones_like(value)), strict=True))


def _held(
    graph: ETraceGraph, group: HiddenGroup, state: int, values: _Values
) -> dict[Var, jax.Array]:
    """Return what is held constant: other groups, marked outputs, what a state is downstream of."""
    held = {var: values(var) for var in _opaque_outputs(graph)}
    for other in graph.hidden_groups:
        if other.index != group.index:
            held.update({var: values(var) for var in other.new_vars})
            joined = [s.joined_var for s in other.states if s.joined_var is not None]
            held.update({var: values(var) for var in joined})
    if state in group.downstream:
        upstream = [var for a, var in enumerate(group.new_vars) if a != state]
        held.update({var: values(var) for var in upstream})
    return held


def _cut_rules(group: HiddenGroup, state: int) -> dict[int, Rule]:
    """Return rules that hold the operands constant that mix positions."""
    operands_of: dict[int, set[int]] = {}
    for cut in group.cuts[state]:
        operands_of.setdefault(cut.equation, set()).add(cut.operand)

    def rule_for(held: set[int]) -> Rule:
        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            stopped = [jax.lax.stop_gradient(v) if i in held else v for i, v in enumerate(values)]
            return bind_differentiable(equation, stopped)

        return rule

    return {index: rule_for(held) for index, held in operands_of.items()}


def _from_output(
    graph: ETraceGraph, y: Var, reached: Var, inputs: Inputs, values: _Values
) -> jax.Array:
    """Return the element-wise derivative from ``y`` to the variable it is broadcast to."""

    def broadcast(value: jax.Array) -> jax.Array:
        return evaluate(graph.traced.program, [reached], inputs, {y: value})[0]

    return jax.jvp(broadcast, (values(y),), (jnp.ones_like(values(y)),))[1]

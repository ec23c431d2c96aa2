r"""Jacobians of a step: ``D``, ``Df`` and the operations' inputs.

.. math::

    D^t[v, a, c] = (\partial h^t[v, a]) / (\partial h^{t-1}[v, c])
    \qquad
    D_f^t[u, a] = (\partial h^t[p(u), a]) / \partial y^t[u]

Both are derivatives of one state's new value with respect to the old states and the outputs of ETP
operations, with everything that couples elements held constant. Each element then reaches only one
element of a state, so one vector-Jacobian product with ones computes all of them. A rule may keep
the diagonal through products; see `diagonal`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._graph import (
    Cut,
    Diagonal,
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    Records,
    Weights,
)
from ..._jax import Atom, Equation, Var, bind, is_var, struct_of
from ..._jaxpr import Rule, evaluate
from ..layout import old_state_to_elements, tap_to_outputs, trace_sites, x_key
from .diagonal import Factors, factors_of, with_diagonals
from .maxima import bind_differentiable, maxima_of

Inputs: TypeAlias = Mapping[Var, Any]
"""Values of the inputs of a program."""


def transition_key(group: HiddenGroup, a: int, c: int) -> str:
    """Return the name of the block ``D[a, c]`` of a group."""
    return f"{group.states[a].name}<{group.states[c].name}"


def operands(graph: ETraceGraph, inputs: Inputs) -> Weights:
    """Return the operands that have gradients: for each relation, its evaluated prologue."""
    wanted = graph.operand_atoms
    atoms = [atom for own in wanted.values() for atom in own.values()]
    values = iter(evaluate(graph.traced.program, atoms, inputs))  # shared equations run once
    return {key: {name: next(values) for name in own} for key, own in wanted.items()}


def operand_shapes(graph: ETraceGraph) -> Weights:
    """Return the shapes of the operands that have gradients."""
    found: Weights = {
        key: {name: struct_of(atom.aval) for name, atom in own.items()}
        for key, own in graph.operand_atoms.items()
    }
    return found


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


def jacobians(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> Records:
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
        return Records(x={}, D={}, Df={}, inputs=tuple(inputs[v] for v in graph.recorded_inputs))
    weights = jax.lax.stop_gradient(weights)
    known = _known(graph, inputs, weights)
    at = _Point(graph, inputs, weights, known, maxima_of(graph.traced.program))
    records = Records(x={}, D={}, Df={})
    for relation in graph.hidden_param_op_relations:
        if "x" in graph.needs and relation.x_var is not None:
            records.x[x_key(graph, relation)] = at.value(relation.x_var)
    for group in graph.traced_groups:
        for state in range(group.num_state):
            D, Df = _rows(at, group, state)
            records.D.update(D)
            records.Df.update(Df)
    result: Records = jax.lax.stop_gradient(records)
    return result


@dataclasses.dataclass(frozen=True)
class _Point:
    """The point at which the derivatives of a step are evaluated.

    Attributes
    ----------
    graph, inputs
        The compiled model, and the values of its program's inputs.
    weights
        Operands of its relations.
    known
        Values of all variables that the Jacobians need, computed at once.
    maxima
        Rules that run maxima and minima.
    """

    graph: ETraceGraph
    inputs: Inputs
    weights: Weights
    known: Mapping[Var, jax.Array]
    maxima: Mapping[int, Rule]

    def value(self, atom: Atom) -> jax.Array:
        return self.known[atom] if is_var(atom) else atom.val


def _known(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> dict[Var, jax.Array]:
    wanted: dict[Var, None] = {}
    for relation in graph.hidden_param_op_relations:
        points = [p.var for influence in relation.influences for p in influence.taps]
        wanted.update(dict.fromkeys([relation.x_var, relation.y_var, *points]))
    wanted.update(dict.fromkeys(_opaque_outputs(graph)))
    for group in graph.hidden_groups:
        wanted.update(dict.fromkeys(group.new_vars))
        wanted.update(dict.fromkeys(s.joined_var for s in group.states))
    for diagonal in (d for group in graph.traced_groups for of in group.diagonals for d in of):
        equation = graph.traced.program.equations[diagonal.equation]
        others = [a for i, a in enumerate(equation.invars) if i != diagonal.operand]
        wanted.update(dict.fromkeys([*filter(is_var, others), *equation.outvars]))
    targets = [atom for atom in wanted if isinstance(atom, Var)]
    result = evaluate(graph.traced.program, targets, inputs, rules=with_weights(graph, weights))
    return dict(zip(targets, result, strict=True))


def _opaque_outputs(graph: ETraceGraph) -> list[Var]:
    """Return the outputs of the operations that a backward slice does not pass."""
    program = graph.traced.program
    return [var for index in graph.opaque_equations for var in program.equations[index].outvars]


Rows: TypeAlias = dict[str, jax.Array]


def _rows(at: _Point, group: HiddenGroup, state: int) -> tuple[Rows, Rows]:
    """Return the row ``a = state`` of ``D`` and of ``Df``."""
    graph = at.graph
    old = [c for a, c in group.transition if a == state and "D" in graph.needs]
    points = [
        (site, point)
        for site in trace_sites(graph, group)
        for point in site.influence.taps
        if point.state == state and "Df" in graph.needs
    ]
    leaves = {var: at.inputs[var] for var in (group.states[c].in_var for c in old)}
    leaves.update({point.var: at.value(point.var) for _, point in points})
    derivatives = _derivatives(at, group, state, leaves) if leaves else {}
    D = {
        transition_key(group, state, c): old_state_to_elements(
            group, c, derivatives[group.states[c].in_var]
        )
        for c in old
    }
    Df: Rows = {}
    for site, point in points:
        row = derivatives[point.var]
        if point.var is not site.relation.y_var:
            row = _back_to_output(at, site.relation.y_var, point.var, row)
        key, outputs = site.key(state), tap_to_outputs(site.influence, point, row)
        Df[key] = Df[key] + outputs if key in Df else outputs
    return D, Df


def _derivatives(
    at: _Point, group: HiddenGroup, state: int, leaves: dict[Var, jax.Array]
) -> dict[Var, jax.Array]:
    """Return the derivative of the state element that each leaf element reaches."""
    program, target = at.graph.traced.program, group.new_vars[state]
    held, rules = _held(at, group, state), {**at.maxima, **_stop_gradient_rules(group.cuts[state])}
    old_vars = {old.in_var for old in group.states}
    diagonals = [(d, _factors(at, d)) for d in group.diagonals[state]]

    def new_state(*changed: jax.Array) -> jax.Array:
        given = dict(zip(leaves, changed, strict=True))
        old = {var: value for var, value in given.items() if var in old_vars}
        passing = [(d, _operand(at, d, {**held, **old}), factors) for d, factors in diagonals]
        overrides, passed = with_diagonals(program, {**held, **given}, rules, passing)
        value: jax.Array = evaluate(program, [target], at.inputs, overrides, passed)[0]
        return value

    value, pull_back = jax.vjp(new_state, *leaves.values())
    return dict(zip(leaves, pull_back(jnp.ones_like(value)), strict=True))


def _operand(at: _Point, diagonal: Diagonal, overrides: Mapping[Var, Any]) -> jax.Array:
    """Return the operand of a diagonal's product, as a function of old states in ``overrides``."""
    program = at.graph.traced.program
    x = program.equations[diagonal.equation].invars[diagonal.operand]
    rules = {**at.maxima, **_stop_gradient_rules(diagonal.cuts)}
    value: jax.Array = evaluate(program, [x], at.inputs, overrides, rules)[0]
    return value


def _factors(at: _Point, diagonal: Diagonal) -> Factors:
    """Return the derivatives of a diagonal's variable with respect to its operand.

    Both parts of a complex output count: the broadcast value may be its absolute value.
    """
    graph = at.graph
    equation = graph.traced.program.equations[diagonal.equation]
    operands = [
        None if i == diagonal.operand else at.value(atom) for i, atom in enumerate(equation.invars)
    ]
    for relation in graph.hidden_param_op_relations:
        if relation.equation == diagonal.equation:
            for name, position in relation.trainable_positions.items():
                operands[position] = at.weights[relation.key][name]
    factors = factors_of(diagonal, equation, operands)
    (y,) = equation.outvars
    if diagonal.var is y:
        return factors, None
    along = _from_output(at, y, diagonal.var)
    if not jnp.iscomplexobj(at.value(y)):
        return factors * along, None
    return factors, (along, _from_output(at, y, diagonal.var, 1j))


def _held(at: _Point, group: HiddenGroup, state: int) -> dict[Var, jax.Array]:
    """Return the values held constant: other groups, ETP outputs, states that a state reads."""
    held = _opaque_outputs(at.graph)
    for other in at.graph.hidden_groups:
        if other.index != group.index:
            held += other.new_vars
            held += [s.joined_var for s in other.states if s.joined_var is not None]
    if state in group.downstream:
        held += [var for a, var in enumerate(group.new_vars) if a != state]
    return {var: at.value(var) for var in held}


def _stop_gradient_rules(cuts: Sequence[Cut]) -> dict[int, Rule]:
    """Return rules that hold the operands constant that couple elements."""
    operands_of: dict[int, set[int]] = {}
    for cut in cuts:
        operands_of.setdefault(cut.equation, set()).add(cut.operand)

    def rule_for(held: set[int]) -> Rule:
        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            stopped = [jax.lax.stop_gradient(v) if i in held else v for i, v in enumerate(values)]
            return bind_differentiable(equation, stopped)

        return rule

    return {index: rule_for(held) for index, held in operands_of.items()}


def _back_to_output(at: _Point, y: Var, reached: Var, row: jax.Array) -> jax.Array:
    """Return the derivative with respect to ``y``, from the derivative for its broadcast variable.

    Both parts of a complex number count: the broadcast value may be its absolute value.
    """
    along = jnp.real(row * _from_output(at, y, reached, 1))
    if not jnp.iscomplexobj(at.value(y)):
        return along
    return jax.lax.complex(along, -jnp.real(row * _from_output(at, y, reached, 1j)))


def _from_output(at: _Point, y: Var, reached: Var, direction: complex = 1) -> jax.Array:
    """Return the elementwise derivative of the variable that ``y`` is broadcast to."""

    def broadcast(value: jax.Array) -> jax.Array:
        return evaluate(at.graph.traced.program, [reached], at.inputs, {y: value})[0]

    value = at.value(y)
    return jax.jvp(broadcast, (value,), (jnp.full_like(value, direction),))[1]

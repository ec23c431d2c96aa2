r"""Differentiable step with a perturbation of every traced hidden state.

The new value of a traced state is computed from the old states, the operands of its relations and
the other states of its group, without perturbations. Everything downstream (readout, deeper layers,
later groups, states of the group that no later step reads) reads this value plus a perturbation
that is zero. The derivative of a loss with respect to the perturbation is then the learning signal

.. math:: l^t[v, a] = \partial L^t / \partial h^t[v, a]

where the other states of the group are constant, unless they are downstream of it. If the loss sees
a state from before the step (an output reads it, or a state that does not act upon it), a second
perturbation of that value gives :math:`\partial L^t / \partial h^{t-1}[v, a]`, a part of the signal
of the step before. The derivative with respect to a parameter is its ordinary gradient of this step
along all paths that no trace follows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._errors import OptionError
from .._graph import Cut, ETraceGraph, FlatState, HiddenGroup, StateLeaf, TracedModel, Weights
from .._jax import (
    Atom,
    Equation,
    Var,
    bind,
    is_var,
    struct_of,
    without_derivative,
    zeros_mapped_like,
)
from .._jaxpr import Rule, carries_derivative, evaluate
from .._jaxpr.dataflow import CONSTANT
from .._typing import PyTree
from .records import Inputs, with_weights

Probes = dict[str, jax.Array]
"""One array per traced hidden state, by name, in the layout of its new variable. States whose old
value a loss sees have a second array (see `pre_step_probe`) in the layout of the old value."""


def pre_step_probe(state: StateLeaf) -> str:
    """Return the name of the perturbation of a state's value before the step."""
    return f"{state.name} before"


def probe_shapes(graph: ETraceGraph) -> Probes:
    """Return the shapes of the perturbations of traced states and of old values that are read."""
    shapes = {group.states[a].name: struct_of(var.aval) for group, a, var in graph.new_hidden_vars}
    if graph.flat_state is not None:
        shapes = {state.name: struct_of(state) for state in graph.flat_state.leaves}
    return shapes | {pre_step_probe(s): struct_of(s) for s in graph.read_late}


def probes_of_past(graph: ETraceGraph) -> Probes:
    """Return the shapes of perturbations of the traced states before a step or window."""
    return {pre_step_probe(state): struct_of(state) for state in graph.traced_states}


SECOND_DERIVATIVE = (
    "The gradient of a learner's step is differentiated again, but it is computed from traces that "
    "are held constant. Pass it through `jax.lax.stop_gradient`, or differentiate backpropagation "
    "through time (`predict`) twice."
)


def with_gradient(
    shapes: Probes,
    gradient: Callable[[Weights, PyTree, Probes], Weights],
    weights: Weights,
    residuals: PyTree,
) -> Probes:
    """Return perturbations of zero, whose cotangents become a gradient of the operands.

    Parameters
    ----------
    shapes
        Shapes of the perturbations.
    gradient
        ``(weights, residuals, cotangents that are not known to be zero) -> gradient``.
    weights, residuals
        The operands, and other values that the gradient is computed from.
    """

    def zeros(*arguments: Any) -> Probes:
        found: Probes = zeros_mapped_like(shapes, arguments)
        return found

    def forward(*arguments: Any) -> tuple[Probes, tuple[Weights, PyTree]]:
        weights, residuals = jax.tree.map(lambda argument: argument.value, arguments)
        return zeros(weights, residuals), (weights, residuals)

    def backward(known: tuple[Weights, PyTree], signal: dict[str, Any]) -> tuple[Weights, None]:
        heard = {name: v for name, v in signal.items() if not isinstance(v, SymbolicZero)}
        found = gradient(*known, heard)
        return without_derivative(known[0], found, OptionError, SECOND_DERIVATIVE), None

    probes = jax.custom_vjp(zeros)
    probes.defvjp(forward, backward, symbolic_zeros=True)
    result: Probes = probes(weights, residuals)
    return result


def probed_step(
    graph: ETraceGraph,
    inputs: Inputs,
    weights: Weights,
    probes: Probes,
) -> tuple[list[Any], dict[Var, Any]]:
    """Run one step.

    Parameters
    ----------
    graph
        The compiled model.
    inputs
        Values of the program's inputs.
    weights
        Operands of the relations; they have no gradient here.
    probes
        Perturbations of each traced hidden state, and of old values that a loss sees.

    Returns
    -------
    outputs
        Leaves of the result of ``update``.
    new_states
        New value of every State leaf that the step writes, by its input variable.
    """
    late = {s.in_var: inputs[s.in_var] + probes[pre_step_probe(s)] for s in graph.read_late}
    if graph.flat_state is None:
        seen = _probed(graph, inputs, weights, probes, late)
    else:
        seen = _flat_probed(graph, graph.flat_state, inputs, probes)
    return finish(graph.traced, {**inputs, **late}, seen)


def _probed(
    graph: ETraceGraph, inputs: Inputs, weights: Weights, probes: Probes, late: dict[Var, Any]
) -> dict[Var, Any]:
    """Return the new traced states, group by group, each with its perturbation.

    ``late`` are the old states that a loss sees, each with its own.
    """
    probed: dict[Var, tuple[HiddenGroup, Any]] = {}
    new = {group.states[a].name: var for group, a, var in graph.new_hidden_vars}
    for group, a, var in graph.new_hidden_vars:
        sees_own = a in group.downstream
        outside = {v: value for v, (g, value) in probed.items() if sees_own or g is not group}
        overrides = {**outside, **joined_states(graph.traced, new, outside)}
        whole = {**inputs, **{v: late[v] for v in group.late_inputs[a] if v in late}}
        # The traces follow the elementwise paths from the old states of the group.
        elementwise = {**whole, **{s.in_var: inputs[s.in_var] for s in group.states}}
        rules = _with_cut_uses(graph, group, a, weights, whole, overrides)
        (value,) = evaluate(graph.traced.program, [var], elementwise, overrides, rules)
        probed[var] = (group, value + probes[group.states[a].name])
    seen = {v: value for v, (_, value) in probed.items()}
    return {**seen, **joined_states(graph.traced, new, seen)}


def _with_cut_uses(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    weights: Weights,
    whole: Inputs,
    overrides: dict[Var, Any],
) -> dict[int, Rule]:
    """Return rules for a state's value in which the traces' weights are held constant.

    At operands through which no trace follows them (a mean over units, the input of another
    weight), they are not.
    """
    program, rules = graph.traced.program, with_weights(graph, weights, group.index)
    uses = _cut_uses(graph, group, state, frozenset(overrides))
    atoms = [program.equations[use.equation].invars[use.operand] for use in uses]
    values = evaluate(program, atoms, whole, overrides)
    of_equation: dict[int, dict[int, Any]] = {}
    for use, value in zip(uses, values, strict=True):
        of_equation.setdefault(use.equation, {})[use.operand] = value

    def rule_for(index: int) -> Rule:
        def rule(equation: Equation, values: list[Any]) -> Sequence[Any] | None:
            seen = [of_equation[index].get(i, value) for i, value in enumerate(values)]
            return rules[index](equation, seen) if index in rules else bind(equation, seen)

        return rule

    return {**rules, **{index: rule_for(index) for index in of_equation}}


def _cut_uses(
    graph: ETraceGraph, group: HiddenGroup, state: int, overridden: frozenset[Var]
) -> list[Cut]:
    """Return the uses at which a path from a weight to a state leaves what traces follow."""
    program = graph.traced.program
    learning = {r.equation: r for r in graph.hidden_param_op_relations}
    behind = program.depends_on([group.new_vars[state]], overridden)
    made = set(program.making(behind))
    uses = [cut for cut in group.cuts[state] if cut.equation in made]
    for index in made.intersection(graph.opaque_equations):
        own = learning[index].trainable_positions.values() if index in learning else ()
        uses += [Cut(index, i) for i in range(len(program.equations[index].invars)) if i not in own]
    moving = {leaf.in_var for leaf in graph.traced.parameters} | group.late_inputs[state]

    def is_live(use: Cut) -> bool:
        operand = program.equations[use.equation].invars[use.operand]
        before = program.depends_on([operand], overridden, CONSTANT, carries_derivative)
        return not before.isdisjoint(moving)

    return [use for use in dict.fromkeys(uses) if is_live(use)]


def _flat_probed(
    graph: ETraceGraph, flat: FlatState, inputs: Inputs, probes: Probes
) -> dict[Var, Any]:
    """Return all new states, each with its perturbation, as if they were independent of each other.

    Traces contain all paths from a parameter to each of them.
    """
    parameters = {leaf.in_var for leaf in graph.traced.parameters}
    held = {v: jax.lax.stop_gradient(x) if v in parameters else x for v, x in inputs.items()}
    new = {leaf.name: leaf.out_var for leaf in flat.leaves if leaf.out_var is not None}
    found = evaluate(graph.traced.program, list(new.values()), held)
    values = dict(zip(new, found, strict=True))
    seen: dict[Var, Any] = {}
    for name, var in new.items():
        if is_var(var) and var not in seen:  # a value that two states share counts once
            seen[var] = values[name] + probes[name]
    return {**seen, **joined_states(graph.traced, new, seen)}


def finish(
    traced: TracedModel, inputs: Inputs, overrides: dict[Var, Any]
) -> tuple[list[Any], dict[Var, Any]]:
    """Return a step's outputs and new states, given the values of some variables."""
    written = [leaf for leaf in traced.leaves if leaf.out_var is not None]
    targets: list[Atom] = [*traced.output_atoms, *(leaf.out_var for leaf in written)]
    values = evaluate(traced.program, targets, inputs, overrides, effects=True)
    count = len(traced.output_atoms)
    new_states = {leaf.in_var: value for leaf, value in zip(written, values[count:], strict=True)}
    return values[:count], new_states


def joined_states(
    traced: TracedModel, new: Mapping[str, Atom | None], values: Mapping[Var, Any]
) -> dict[Var, Any]:
    """Return the values of States that contain several states, if all of these are given.

    ``new`` are the new variables of states, by name.
    """
    parts: dict[Var, list[Any]] = {}
    for leaf in traced.leaves:
        if leaf.joined_var is not None and leaf.kind == "hidden":
            parts.setdefault(leaf.joined_var, []).append(new.get(leaf.name))
    return {
        joined: jnp.stack([values[var] for var in own], axis=-1)
        for joined, own in parts.items()
        if all(is_var(var) and var in values for var in own)
    }

r"""The gradient of steps from their traces: the step that a loss sees, records, and products.

Probed step: everything downstream of a traced state (readout, deeper layers, later groups, states
of the group that no later step reads) reads its new value plus a perturbation that is zero. The
derivative of a loss with respect to the perturbation is the learning signal

.. math:: l^t[v, a] = \partial L^t / \partial h^t[v, a]

where the other states of the group are constant, unless they are downstream of it. If the loss sees
a state from before the step (an output reads it, or a state that does not act upon it), a second
perturbation of that value gives :math:`\partial L^t / \partial h^{t-1}[v, a]`, a part of the signal
of the step before. The derivative with respect to a parameter is its ordinary gradient of this step
along all paths that no trace follows. The rest is computed by a rule from the signals and from what
was recorded of the steps.

A sample that is reset, or a step whose loss is masked, has a zero factor. The input, the state or
its trace may be NaN or infinite there (padding), and ``0 * NaN`` is NaN. With ``selects`` these
products select zeros: for the signals of a chunk with a mask, and for traces also if samples are
reset. Without a mask, a non-finite step has a non-finite loss, and its gradient must show that.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op.registry import Arrays, get_primitive_spec
from .._etrace_op.rules import pull_back
from .._graph.flat_state import FlatState
from .._graph.graph import ETraceGraph
from .._graph.hidden_group import Cut, HiddenGroup, HiddenParamOpRelation
from .._graph.method import Chunk, Records, TraceMethod, Traces, Weights
from .._graph.traced_model import TracedModel
from .._jax import Atom, Equation, Var, bind, is_var, struct_of
from .._jaxpr.program import Program, Rule, evaluate, program_of
from .._typing import PyTree
from .local_step import read_vars
from .sites import (
    Probes,
    TraceSite,
    names_of,
    of_past,
    pre_step_probe,
    probe_shapes,
    probes_of_past,
    row_name,
    trace_sites,
    x_key,
)

Inputs: TypeAlias = Mapping[Var, Any]
"""Values of the inputs of a program."""


def operand_shapes(graph: ETraceGraph) -> Weights:
    """Return the shapes of the operands that have gradients."""
    return {
        key: {name: struct_of(atom.aval) for name, atom in own.items()}
        for key, own in graph.operand_atoms.items()
    }


def operands(graph: ETraceGraph, inputs: Inputs) -> Weights:
    """Return the operands that have gradients: for each relation, its evaluated prologue."""
    wanted = graph.operand_atoms
    atoms = [atom for own in wanted.values() for atom in own.values()]
    values = iter(evaluate(graph.traced.program, atoms, inputs))  # shared equations run once
    return {key: {name: next(values) for name in own} for key, own in wanted.items()}


def _rules_of(
    graph: ETraceGraph,
    weights: Weights,
    group: int | None = None,
    live: Mapping[Cut, Any] = MappingProxyType({}),
) -> dict[int, Rule]:
    """Return rules that run the relations' operations on given weights, held constant.

    Outputs that no trace follows (a gate that acts only through another weight) have the ordinary
    gradient of the step.

    Parameters
    ----------
    graph, weights
        The model and its operands.
    group
        Only the relations that reach this group; ``None``: all.
    live
        Values for some uses of variables.
    """
    relations = {
        relation.equation: relation
        for relation in graph.hidden_param_op_relations
        if group is None or any(influence.group == group for influence in relation.influences)
    }

    def rule_for(index: int) -> Rule:
        held, traced = dict[int, Any](), None
        if relation := relations.get(index):
            own = jax.lax.stop_gradient(weights[relation.key])
            held = {place: own[name] for name, place in relation.trainable_positions.items()}
            traced = _traced_elements(relation, group)

        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            values = [live.get(Cut(index, i), value) for i, value in enumerate(values)]
            results = bind(equation, [held.get(i, value) for i, value in enumerate(values)])
            if traced is None:
                return results
            return [jnp.where(traced, results[0], bind(equation, values)[0])]

        return rule

    return {index: rule_for(index) for index in {*relations, *(use.equation for use in live)}}


def _traced_elements(relation: HiddenParamOpRelation, group: int | None) -> np.ndarray | None:
    """Return the elements of the output that reach a group by a trace; ``None``: all of them."""
    reached = [influence for influence in relation.influences if influence.group == group]
    if not reached:
        return None
    traced = np.asarray((reached[0].positions >= 0).any(0))
    return None if traced.all() else traced


def residuals(graph: ETraceGraph, inputs: Inputs, weights: Weights) -> Records:
    """Return the residuals of one step that the learning rule needs; they have no gradient."""
    inputs = {var: jax.lax.stop_gradient(value) for var, value in inputs.items()}
    if "step" in graph.needs:
        return Records(x={}, inputs=tuple(inputs[v] for v in graph.recorded_inputs))
    weights = jax.lax.stop_gradient(weights)
    program, relations = graph.traced.program, graph.hidden_param_op_relations
    given = [r.x_var for r in relations if r.x_var is not None]
    states = [var for _, _, var in graph.new_hidden_vars] if "states" in graph.needs else []
    read = [*read_vars(graph), *states] if "values" in graph.needs else states
    wanted = list(dict.fromkeys([*read, *filter(is_var, given)]))
    found = evaluate(program, wanted, inputs, rules=_rules_of(graph, weights))
    known = dict(zip(wanted, found, strict=True))
    x, values = {}, {}
    if "x" in graph.needs:
        keys = [x_key(graph, r) for r in relations if r.x_var is not None]
        pairs = zip(keys, given, strict=True)
        x = {key: known[atom] if is_var(atom) else atom.val for key, atom in pairs}
    if "values" in graph.needs:
        values = {n: known[v] for n, v in zip(names_of(program, read), read, strict=True)}
    return jax.lax.stop_gradient(Records(x=x, values=values))


@functools.lru_cache(maxsize=64)
def _own_step(graph: ETraceGraph) -> tuple[Program, PyTree]:
    """Return the program of `probed_step`, and the structure of its results."""
    in_vars = graph.traced.program.in_vars

    def run(values: list[Any], weights: Weights, probes: Probes) -> tuple[list[Any], list[Any]]:
        inputs = dict(zip(in_vars, values, strict=True))
        late = {s.in_var: inputs[s.in_var] + probes[pre_step_probe(s)] for s in graph.read_late}
        if graph.flat_state is None:
            seen = _probed(graph, inputs, weights, probes, late)
        else:
            seen = _flat_probed(graph, graph.flat_state, inputs, probes)
        outputs, new_states = finish(graph.traced, {**inputs, **late}, seen)
        return outputs, [*new_states.values()]

    shapes = [struct_of(var.aval) for var in in_vars], operand_shapes(graph), probe_shapes(graph)
    jaxpr, results = jax.make_jaxpr(run, return_shape=True)(*shapes)
    return program_of(jaxpr), jax.tree.structure(results)


def probed_step(
    graph: ETraceGraph, inputs: Inputs, weights: Weights, probes: Probes
) -> tuple[list[Any], dict[Var, Any]]:
    """Run one step, in which the operands ``weights`` have no gradient.

    ``probes`` perturb each traced hidden state, and the old values that a loss sees. Return the
    leaves of the result of ``update``, and the new values of States by their input variables.
    """
    program, results = _own_step(graph)
    values = [inputs[var] for var in graph.traced.program.in_vars]
    own = {name: probes[name] for name in probe_shapes(graph)}
    given = dict(zip(program.in_vars, jax.tree.leaves((values, weights, own)), strict=True))
    found = evaluate(program, program.out_atoms, given, effects=True)
    outputs, new = jax.tree.unflatten(results, found)
    return outputs, dict(zip(graph.traced.written_vars, new, strict=True))


def _probed(
    graph: ETraceGraph, inputs: Inputs, weights: Weights, probes: Probes, late: dict[Var, Any]
) -> dict[Var, Any]:
    """Return the new traced states, group by group, each with its perturbation.

    ``late`` are the old states that a loss sees, each with its own. The weights of traces are held
    constant, but not at operands through which no trace follows them (a mean over units, the input
    of another weight).
    """
    program, probed = graph.traced.program, dict[Var, tuple[HiddenGroup, Any]]()
    for _, entries in itertools.groupby(graph.new_hidden_vars, _alike):
        (group, *_), states, targets = zip(*entries, strict=True)
        sees_own, late_inputs = states[0] in group.downstream, group.late_inputs[states[0]]
        seen = {v: value for v, (g, value) in probed.items() if sees_own or g is not group}
        whole = {**inputs, **{v: late[v] for v in late_inputs if v in late}}
        uses = _cut_uses(graph, group, states[0], targets, frozenset(seen))
        atoms = [program.equations[use.equation].invars[use.operand] for use in uses]
        live = dict(zip(uses, evaluate(program, atoms, whole, seen), strict=True))
        # The traces follow the elementwise paths from the old states of the group.
        elementwise = {**whole, **{s.in_var: inputs[s.in_var] for s in group.states}}
        rules = _rules_of(graph, weights, group.index, live)
        values = evaluate(program, targets, elementwise, seen, rules)
        for a, var, value in zip(states, targets, values, strict=True):
            probed[var] = (group, value + probes[group.probes[a]])
    return {v: value for v, (_, value) in probed.items()}


def _alike(entry: tuple[HiddenGroup, int, Var]) -> tuple[Any, ...]:
    """Return what is equal for successive new states that are evaluated together."""
    group, a, var = entry
    return group.index, group.late_inputs[a], group.cuts[a], var if a in group.downstream else None


def _cut_uses(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    targets: Iterable[Var],
    overridden: frozenset[Var],
) -> list[Cut]:
    """Return the uses at which a path from a weight to new states leaves what traces follow.

    ``state`` is one of these states.
    """
    program = graph.traced.program
    learning = {r.equation: r for r in graph.hidden_param_op_relations}
    behind = program.depends_on(targets, overridden)
    made = set(program.making(behind))
    uses = [cut for cut in group.cuts[state] if cut.equation in made]
    for index in made.intersection(graph.opaque_equations):
        own = learning[index].trainable_positions.values() if index in learning else ()
        uses += [Cut(index, i) for i in range(len(program.equations[index].invars)) if i not in own]
    moving = {leaf.in_var for leaf in graph.traced.parameters} | group.late_inputs[state]

    def is_live(use: Cut) -> bool:
        operand = program.equations[use.equation].invars[use.operand]
        before = program.ancestors([operand], overridden)
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
    return seen


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


# --- the gradient of recorded steps


def chunk_gradient(
    method: TraceMethod, chunk: Chunk, signal: Probes, before: Traces, after: Traces | None = None
) -> tuple[Weights, Traces | None]:
    """Return the gradient of a recorded chunk, and the traces after it if the rule returns them.

    The signal of the first step for the states before the chunk is included: the signal of outputs
    that read them, of a window, or of a full-Jacobian rule. The arguments are the same as in
    `TraceMethod.gradient`.
    """
    graph, parts = chunk.graph, []
    late = signal.keys() & probes_of_past(graph).keys()
    if late:
        parts.append(method.late_gradient(chunk, of_past(graph, signal), before, after))
        if max(map(len, signal.values())) == 1:
            signal = {name: value for name, value in signal.items() if name not in late}
    if signal or not late:
        own, after = method.gradient(chunk, signal, before, after)
        parts.append(own)
    gradients = jax.tree.map(lambda *result: sum(result[1:], result[0]), *parts)
    return of_parameters(graph, gradients), after


def of_parameters(graph: ETraceGraph, gradients: Weights) -> Weights:
    """Return gradients of operands, with zeros for operands without a parameter.

    These gradients are not used, but a loop that accumulates them would compute them.
    """
    if graph.flat_state is not None:
        return gradients
    learning = {r.key: set(r.trainable_paths) for r in graph.hidden_param_op_relations}
    return {
        key: {
            name: gradient if name in learning[key] else jnp.zeros_like(gradient)
            for name, gradient in result.items()
        }
        for key, result in gradients.items()
    }


def as_chunk(tree: PyTree) -> PyTree:
    """Add a time axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


InputsByRelation: TypeAlias = Mapping[str, jax.Array | None]
"""Inputs of operations over time, by relation; ``None``: it has no input."""


def recorded_inputs(graph: ETraceGraph, records: Records) -> InputsByRelation:
    """Return the recorded inputs of the operations."""
    relations = graph.hidden_param_op_relations
    return {r.key: None if r.x_var is None else records.x[x_key(graph, r)] for r in relations}


def sum_products(
    chunk: Chunk, factors: Arrays, selects: bool, inputs: InputsByRelation | None = None
) -> Weights:
    """Return ``Σ x ⊗ f`` over time, batch and groups: one product for each site with factors.

    Parameters
    ----------
    chunk, factors
        The chunk, and factors by `row_name`, time first.
    selects
        Whether a zero factor has a zero result, also if the other is not finite.
    inputs
        Inputs by relation; ``None``: those that the chunk recorded.
    """
    gradients: Weights = {}
    inputs = recorded_inputs(chunk.graph, chunk.records) if inputs is None else inputs
    for site in trace_sites(chunk.graph):
        name, key = row_name(chunk.graph, site), site.relation.key
        if name in factors:
            x, factor = inputs[key], factors[name]
            if site.has_fan_out:  # without an input, one sum over all steps and samples
                factor = factor.sum((0, 1))[None] if x is None else factor.sum(1)
            x = finite_inputs(site, x, factor) if selects else x
            own = pull_back(*site.operation, x, factor, chunk.weights[key])
            gradients = add(gradients, {key: own})
    return gradients


def like(arrays: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return new arrays, gradients or traces, with the dtypes of others."""
    return jax.tree.map(lambda a, n: n.astype(a.dtype), dict(arrays), dict(new))


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; gradients of relations that only one argument has are unchanged."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}


def times(factor: jax.Array, value: jax.Array, selects: bool) -> jax.Array:
    """Return the elementwise product; with ``selects``, it is zero where the factor is."""
    product = factor * value
    return jnp.where(factor == 0, 0, product) if selects else product


def finite_inputs(site: TraceSite, x: jax.Array | None, factor: jax.Array) -> jax.Array | None:
    """Return inputs that are finite where all factors of a step, or sample, are zero.

    Factors have the shape of the operation's outputs, time first like the inputs.
    """
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    lead = 2 if get_primitive_spec(site.relation.primitive).batched else 1
    counts = (factor != 0).any(tuple(range(lead, factor.ndim)))
    of_step = counts.reshape(*counts.shape, *(1,) * (x.ndim - lead))
    return jnp.where(of_step | jnp.isfinite(x), x, 0)

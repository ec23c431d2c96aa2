r"""Steps that a rule differentiates: the local step for traces, and the step that a loss sees.

Local step: the new states of a group as functions of its old states and of operations' outputs.
Everything that couples units is held constant: outputs of ETP operations, other groups, operands of
`Cut` uses. Each unit of the old states and each element of an output then reach one unit of the new
states, so one vector-Jacobian product with a row of cotangents per unit gives the Jacobian blocks

.. math::

    D^t[v, a, c] = (\partial h^t[v, a]) / (\partial h^{t-1}[v, c])
    \qquad
    D_f^t[u, a] = (\partial h^t[p(u), a]) / \partial y^t[u]

times that row.

Probed step: everything downstream of a traced state (readout, deeper layers, later groups, states
of the group that no later step reads) reads its new value plus a perturbation that is zero. The
derivative of a loss with respect to the perturbation is the learning signal

.. math:: l^t[v, a] = \partial L^t / \partial h^t[v, a]

where the other states of the group are constant, unless they are downstream of it. If the loss sees
a state from before the step (an output reads it, or a state that does not act upon it), a second
perturbation of that value gives :math:`\partial L^t / \partial h^{t-1}[v, a]`, a part of the signal
of the step before. The derivative with respect to a parameter is its ordinary gradient of this step
along all paths that no trace follows.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.flat_state import FlatState
from .._graph.graph import ETraceGraph
from .._graph.hidden_group import Cut, HiddenGroup, HiddenParamOpRelation, Tap
from .._graph.method import Records, Weights
from .._graph.traced_model import TracedModel
from .._jax import Atom, Equation, Var, bind, is_var, struct_of
from .._jaxpr.derivatives import FROM_RESULT, bind_differentiable, from_result, maxima_of
from .._jaxpr.evaluate import Rule, evaluate, inlined
from .._jaxpr.primitives import CONSTANT
from .._jaxpr.program import carries_derivative, program_of
from .sites import (
    SUMS,
    Probes,
    TraceSite,
    names_of,
    new_slots_to_elements,
    new_state_to_elements,
    old_state_to_elements,
    pre_step_probe,
    row_name,
    sum_of,
    tap_to_outputs,
    trace_sites,
    x_key,
)
from .traces import examples

Values = Mapping[Var, Any]
"""Values of some variables of a step."""

States = dict[int, jax.Array]
"""One array per state of a group, by its index, in the layout of the group's units."""


def points_of(
    graph: ETraceGraph, group: HiddenGroup, state: int
) -> Iterator[tuple[TraceSite, Tap]]:
    """Yield the taps at which a state is differentiated by outputs of operations."""
    for site in trace_sites(graph, group):
        for point in taps_of(graph, site):
            if point.state == state:
                yield site, point


def taps_of(graph: ETraceGraph, site: TraceSite) -> Iterator[Tap]:
    """Yield the taps of an operation; outputs that are only added share one, at their sum."""
    y = site.relation.y_var
    for tap in site.influence.taps:
        yield dataclasses.replace(tap, var=_sum_of(graph, y)) if tap.var is y else tap


def _sum_of(graph: ETraceGraph, y: Var) -> Var:
    """Return the sum of outputs that nothing else reads, or the output."""
    program, opaque = graph.traced.program, set(opaque_outputs(graph))

    def has_outputs_alone(total: Var) -> bool:
        index = program.producer.get(total)
        if index is None or program.equations[index].primitive.name not in SUMS:
            return False
        return all(map(is_term, program.equations[index].invars))

    def is_term(atom: Atom) -> bool:
        is_read_once = is_var(atom) and len(program.readers[atom]) == 1
        return is_read_once and (atom in opaque or has_outputs_alone(atom))

    return sum_of(graph, y, has_outputs_alone) if y in opaque else y


def held_vars(graph: ETraceGraph, group: HiddenGroup, state: int) -> set[Var]:
    """Return the variables held constant: other groups, ETP outputs, states that a state reads."""
    held = set(opaque_outputs(graph))
    for other in graph.hidden_groups:
        if other.index != group.index:
            held.update(other.new_vars)
    if state in group.downstream:
        held.update(var for var in group.new_vars if var is not group.new_vars[state])
    return held


def opaque_outputs(graph: ETraceGraph) -> list[Var]:
    """Return the outputs of the operations that a backward slice does not pass."""
    program = graph.traced.program
    return [var for index in graph.opaque_equations for var in program.equations[index].outvars]


def operand_shapes(graph: ETraceGraph) -> Weights:
    """Return the shapes of the operands that have gradients."""
    found: Weights = {
        key: {name: struct_of(atom.aval) for name, atom in own.items()}
        for key, own in graph.operand_atoms.items()
    }
    return found


@functools.lru_cache(maxsize=64)
def read_vars(graph: ETraceGraph) -> list[Var]:
    """Return the variables of a step that the derivatives of its local steps depend on."""
    candidates = evaluated_vars(graph)

    def derivatives(values: list[Any]) -> Any:
        found = []
        for group in graph.traced_groups:
            local = LocalStep(graph, group, dict(zip(candidates, values, strict=True)))
            new, back = jax.vjp(local, local.old, local.taps)
            of_old, of_taps = back(jax.tree.map(jnp.ones_like, new))
            found.append((local.rows_of_old(of_old), local.rows_of_outputs(of_taps)))
        return found

    shapes = [struct_of(var.aval) for var in candidates]
    program = program_of(inlined(jax.make_jaxpr(derivatives)(shapes)))
    behind = program.depends_on(program.out_atoms)
    pairs = zip(candidates, program.in_vars, strict=False)
    # With several rules, each reads the parameters behind outputs that another one taps.
    parameters = {leaf.in_var for leaf in graph.traced.parameters}
    return [var for var, own in pairs if own in behind or var in parameters]


@functools.lru_cache(maxsize=64)
def evaluated_vars(graph: ETraceGraph) -> list[Var]:
    """Return the variables that an evaluation of the local steps reads, in order."""
    program, read = graph.traced.program, set[Var]()

    def add_behind(target: Atom, stops: set[Var]) -> None:
        behind = program.depends_on([target], frozenset(stops))
        read.update(var for var in behind if var in stops or var not in program.producer)
        made = (program.equations[index] for index in program.making(behind))
        read.update(e.outvars[0] for e in made if e.primitive.name in FROM_RESULT)

    for group in graph.traced_groups:
        for state, new in enumerate(group.new_vars):
            stops = held_vars(graph, group, state)
            add_behind(new, stops)
            for site, point in points_of(graph, group, state):
                read.add(point.var)
                if point.var is not _sum_of(graph, site.relation.y_var):
                    read.add(site.relation.y_var)
                    add_behind(point.var, stops)
    given = [var for var in program.in_vars if var in read]
    made = (var for equation in program.equations for var in equation.outvars)
    return given + [var for var in made if var in read]


def values_of(graph: ETraceGraph, recorded: Mapping[str, Any]) -> Values:
    """Return the values that local steps read, from those of `read_vars` by name.

    They are zero where no derivative depends on them. A result that is not recorded, behind another
    rule's operation, is computed again.
    """
    read = read_vars(graph)
    known = set(read)
    silent = {v: struct_of(v.aval) for v in evaluated_vars(graph) if v not in known}
    zeros = dict(zip(silent, examples(list(silent.values())), strict=True))
    pairs = zip(read, names_of(graph.traced.program, read), strict=True)
    return zeros | {var: recorded[name] for var, name in pairs if name in recorded}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # JAX prints functions that it traces
class LocalStep:
    """The local step of a group at one point of time.

    Attributes
    ----------
    graph, group
        The compiled model, and one of its groups.
    values
        Values of the variables that it reads; see `read_vars`.
    states
        The states that are differentiated; ``None``: all.
    """

    graph: ETraceGraph
    group: HiddenGroup
    values: Values
    states: tuple[int, ...] | None = None

    @property
    def _inputs(self) -> Values:
        in_vars = self.graph.traced.program.in_vars
        return {var: self.values[var] for var in in_vars if var in self.values}

    def _differentiates(self, state: int) -> bool:
        return self.states is None or state in self.states

    @property
    def old(self) -> list[jax.Array]:
        """Values of the old States that the new ones read, in their own layout."""
        return [self.values[var] for var in self._read]

    @property
    def _read(self) -> list[Var]:
        group = self.group
        return list(dict.fromkeys(group.states[c].in_var for c in group.read_states))

    @property
    def taps(self) -> list[jax.Array]:
        """Values at the taps; one variable may be the tap of several states."""
        return [self.values[var] for var in self._tapped]

    @property
    def _tapped(self) -> list[Var]:
        states = range(len(self.group.states))
        points = (p.var for a in states for _, p in points_of(self.graph, self.group, a))
        return list(dict.fromkeys(points))

    def __call__(self, old: Sequence[jax.Array], taps: Sequence[jax.Array]) -> States:
        """Return the new states that have a derivative, per unit."""
        live = dict(zip(self._read, old, strict=True))
        live |= dict(zip(self._tapped, taps, strict=True))
        new: States = {}
        for var in dict.fromkeys(self.group.new_vars):
            slots = [a for a, other in enumerate(self.group.new_vars) if other is var]
            moving = {v for a in slots for v in self._variables_of(a)}
            wanted = [a for a in slots if self._differentiates(a) and self._variables_of(a)]
            if wanted:
                value = self._new_state(wanted[0], var, {v: live[v] for v in moving})
                new |= new_slots_to_elements(self.group, tuple(wanted), value)
        return new

    def _variables_of(self, state: int) -> list[Var]:
        """Return the old States and the taps that a state is differentiated by."""
        read = [self.group.states[c].in_var for a, c in self.group.transition if a == state]
        return read + [point.var for _, point in points_of(self.graph, self.group, state)]

    def _new_state(self, state: int, target: Var, live: dict[Var, jax.Array]) -> jax.Array:
        program, group = self.graph.traced.program, self.group
        held = {v: self.values[v] for v in held_vars(self.graph, group, state) if v in self.values}
        rules = maxima_of(program) | self._rules_of(group.cuts[state])
        value: jax.Array = evaluate(program, [target], self._inputs, held | live, rules)[0]
        return value

    def _rules_of(self, cuts: Sequence[Cut]) -> dict[int, Rule]:
        """Return rules that hold operands constant, and take derivatives from known results."""
        held: dict[int, set[int]] = {}
        for cut in cuts:
            held.setdefault(cut.equation, set()).add(cut.operand)
        equations = self.graph.traced.program.equations
        known = {
            index: self.values[equation.outvars[0]]
            for index, equation in enumerate(equations)
            if equation.primitive.name in FROM_RESULT and equation.outvars[0] in self.values
        }

        def rule_for(index: int) -> Rule:
            def rule(equation: Equation, values: list[Any]) -> list[Any]:
                stopped = [
                    jax.lax.stop_gradient(v) if i in held.get(index, ()) else v
                    for i, v in enumerate(values)
                ]
                if index in known:
                    return [from_result(equation, stopped[0], known[index])]
                return bind_differentiable(equation, stopped)

            return rule

        return {index: rule_for(index) for index in (*held, *known)}

    def rows_of_old(self, cotangents: Sequence[jax.Array]) -> States:
        """Convert cotangents of old States to units."""
        group, by_var = self.group, dict(zip(self._read, cotangents, strict=True))
        values = {c: by_var[group.states[c].in_var] for c in group.read_states}
        return {c: old_state_to_elements(group, c, value) for c, value in values.items()}

    def rows_of_outputs(self, cotangents: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Convert cotangents at taps to the layout of each operation's output; see `row_name`."""
        at_taps, found = dict(zip(self._tapped, cotangents, strict=True)), dict[str, jax.Array]()
        for site in trace_sites(self.graph, self.group):
            name, y = row_name(self.graph, site), site.relation.y_var
            taps = [t for t in taps_of(self.graph, site) if self._differentiates(t.state)]
            for point in _distinct(taps) if name not in found else ():
                row = at_taps[point.var]
                if point.var is not _sum_of(self.graph, y):
                    row = self._back_to_output(y, point.var, row)
                outputs = tap_to_outputs(site.influence, point, row)
                found[name] = found[name] + outputs if name in found else outputs
        return found

    def _back_to_output(self, y: Var, reached: Var, row: jax.Array) -> jax.Array:
        """Return the cotangent of ``y``, from the one of the variable that it is broadcast to.

        Both parts of a complex number count: the broadcast value may be its absolute value.
        """
        along = jnp.real(row * self._from_output(y, reached, 1))
        if not jnp.iscomplexobj(self.values[y]):
            return along
        return jax.lax.complex(along, -jnp.real(row * self._from_output(y, reached, 1j)))

    def _from_output(self, y: Var, reached: Var, direction: complex = 1) -> jax.Array:
        """Return the elementwise derivative of the variable that ``y`` is broadcast to."""

        def broadcast(value: jax.Array) -> jax.Array:
            held = {v: self.values[v] for v in opaque_outputs(self.graph) if v in self.values}
            overrides = {**held, y: value}
            return evaluate(self.graph.traced.program, [reached], self._inputs, overrides)[0]

        value = self.values[y]
        return jax.jvp(broadcast, (value,), (jnp.full_like(value, direction),))[1]


def _distinct(taps: Sequence[Tap]) -> list[Tap]:
    """Return one tap for each variable, with the outputs of all states."""
    by_var: dict[Var, list[Tap]] = {}
    for tap in taps:
        by_var.setdefault(tap.var, []).append(tap)

    def joined(same: list[Tap]) -> Tap:
        outputs = [tap.outputs for tap in same if tap.outputs is not None]
        of_any = np.maximum.reduce(outputs) if len(outputs) == len(same) else None
        return dataclasses.replace(same[0], outputs=of_any)

    return list(map(joined, by_var.values()))


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
    """Return the residuals of one step that the learning rule needs; they have no gradient."""
    inputs = {var: jax.lax.stop_gradient(value) for var, value in inputs.items()}
    if "step" in graph.needs:
        return Records(x={}, inputs=tuple(inputs[v] for v in graph.recorded_inputs))
    weights = jax.lax.stop_gradient(weights)
    program, relations = graph.traced.program, graph.hidden_param_op_relations
    given = [r.x_var for r in relations if r.x_var is not None]
    states = [var for _, _, var in graph.new_hidden_vars] if "states" in graph.needs else []
    wanted = list(dict.fromkeys([*evaluated_vars(graph), *filter(is_var, given), *states]))
    found = evaluate(program, wanted, inputs, rules=with_weights(graph, weights))
    known = dict(zip(wanted, found, strict=True))
    x, values = {}, {}
    if "x" in graph.needs:
        keys = [x_key(graph, r) for r in relations if r.x_var is not None]
        pairs = zip(keys, given, strict=True)
        x = {key: known[atom] if is_var(atom) else atom.val for key, atom in pairs}
    if "values" in graph.needs:
        read = list(dict.fromkeys([*read_vars(graph), *states]))
        values = {n: known[v] for n, v in zip(names_of(program, read), read, strict=True)}
    result: Records = jax.lax.stop_gradient(Records(x=x, values=values))
    return result


def new_states(graph: ETraceGraph, group: HiddenGroup, recorded: Mapping[str, jax.Array]) -> States:
    """Return the values of a group's states after a step, per unit, from records of states."""
    names = names_of(graph.traced.program, group.new_vars)
    return {a: new_state_to_elements(group, a, recorded[name]) for a, name in enumerate(names)}


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
    for state in range(len(group.states)):
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


def probed_step(
    graph: ETraceGraph, inputs: Inputs, weights: Weights, probes: Probes
) -> tuple[list[Any], dict[Var, Any]]:
    """Run one step, in which the operands ``weights`` have no gradient.

    ``probes`` perturb each traced hidden state, and the old values that a loss sees. Return the
    leaves of the result of ``update``, and the new values of States by their input variables.
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
    for group, a, var in graph.new_hidden_vars:
        sees_own = a in group.downstream
        overrides = {v: value for v, (g, value) in probed.items() if sees_own or g is not group}
        whole = {**inputs, **{v: late[v] for v in group.late_inputs[a] if v in late}}
        # The traces follow the elementwise paths from the old states of the group.
        elementwise = {**whole, **{s.in_var: inputs[s.in_var] for s in group.states}}
        rules = _with_cut_uses(graph, group, a, weights, whole, overrides)
        (value,) = evaluate(graph.traced.program, [var], elementwise, overrides, rules)
        probed[var] = (group, value + probes[group.probes[a]])
    return {v: value for v, (_, value) in probed.items()}


def _with_cut_uses(
    graph: ETraceGraph,
    group: HiddenGroup,
    state: int,
    weights: Weights,
    whole: Inputs,
    seen: Values,
) -> dict[int, Rule]:
    """Return rules for a state's value in which the traces' weights are held constant.

    At operands through which no trace follows them (a mean over units, the input of another
    weight), they are not.
    """
    program, rules = graph.traced.program, with_weights(graph, weights, group.index)
    uses = _cut_uses(graph, group, state, frozenset(seen))
    atoms = [program.equations[use.equation].invars[use.operand] for use in uses]
    values = evaluate(program, atoms, whole, seen)
    of_equation: dict[int, dict[int, Any]] = {}
    for use, value in zip(uses, values, strict=True):
        of_equation.setdefault(use.equation, {})[use.operand] = value

    def rule_for(index: int) -> Rule:
        def rule(equation: Equation, values: list[Any]) -> Sequence[Any] | None:
            own = [of_equation[index].get(i, value) for i, value in enumerate(values)]
            return rules[index](equation, own) if index in rules else bind(equation, own)

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

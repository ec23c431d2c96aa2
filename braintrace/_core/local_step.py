r"""The local step, which traces follow: a group's new states without what couples its units.

New states are functions of old states and of operations' outputs. Everything that couples units is
held constant: outputs of ETP operations, other groups, operands of `Cut` uses. Each unit of the old
states and each element of an output then reach one unit of the new states, so one vector-Jacobian
product with a row of cotangents per unit gives the Jacobian blocks

.. math::

    D^t[v, a, c] = (\partial h^t[v, a]) / (\partial h^{t-1}[v, c])
    \qquad
    D_f^t[u, a] = (\partial h^t[p(u), a]) / \partial y^t[u]

times that row.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.graph import ETraceGraph
from .._graph.hidden_group import Cut, HiddenGroup, Tap
from .._jax import Atom, Equation, Var, is_var, struct_of
from .._jaxpr.derivatives import FROM_RESULT, bind_differentiable, from_result, maxima_of
from .._jaxpr.evaluate import Rule, evaluate, inlined
from .._jaxpr.program import program_of
from .sites import (
    SUMS,
    TraceSite,
    names_of,
    new_slots_to_elements,
    new_state_to_elements,
    old_state_to_elements,
    row_name,
    sum_of,
    tap_to_outputs,
    trace_sites,
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
        return evaluate(program, [target], self._inputs, held | live, rules)[0]

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

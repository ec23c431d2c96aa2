r"""The local step, which traces follow: a group's new states without what couples its units.

New states are functions of old states and of operations' outputs. Everything that couples units is
held constant: outputs of ETP operations, other groups, operands of `Cut` uses. Each unit of the old
states and each element of an output then reach one unit of the new states, so one vector-Jacobian
product with a row of cotangents per unit gives the Jacobian blocks

.. math::

    D^t[v, a, c] = (\partial h^t[v, a]) / (\partial h^{t-1}[v, c])
    \qquad
    D_f^t[u, a] = (\partial h^t[p(u), a]) / \partial y^t[u]

times that row. The product is a program, which is made once for a compiled model.

Let ``l`` be signals for the states after each step of a chunk, and ``r`` a row for the states after
the last one. In a scan backward in time (`pull`),

.. math::

    \lambda^s = l^s + (D^{s+1})^\top \lambda^{s+1}, \qquad \lambda^{K+1} := r, \qquad
    \mu = (D^1)^\top \lambda^1, \qquad f^s = (D_f^s)^\top \lambda^s.

Signals give the gradient, :math:`\sum_s x^s \otimes f^s + \mu \circ \epsilon^0`. The unit row of
state ``a`` gives its trace after the chunk, :math:`\sum_s x^s \otimes f^s + \sum_c \mu[c] \circ
\epsilon^0[c]`. No Jacobian exists as an array: each step's local step is differentiated at its
recorded values.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.graph import ETraceGraph
from .._graph.hidden_group import Cut, HiddenGroup, Tap
from .._graph.method import Records
from .._jax import Equation, Var, is_var, struct_of
from .._jaxpr.derivatives import FROM_RESULT, bind_differentiable, from_result, maxima_of
from .._jaxpr.program import Program, Rule, evaluate, inlined, program_of
from .._typing import PyTree
from .sites import (
    SUMS,
    TraceSite,
    at_elements,
    names_of,
    new_slots_to_elements,
    old_state_to_elements,
    row_name,
    sum_of,
    tap_to_outputs,
    trace_sites,
)
from .step_program import scan_records

Values = Mapping[Var, Any]
"""Values of some variables of a step."""

States = dict[int, jax.Array]
"""One array per state of a group, by its index, in the layout of the group's units."""


_Live = tuple[Var, int]
"""A variable that new states are differentiated by, with the number of its copy."""


# --- what is held, and what is differentiated


def _taps_of(graph: ETraceGraph, site: TraceSite) -> dict[_Live, list[Tap]]:
    """Return the taps of an operation; outputs that are only added share one, at their sum.

    An element that reaches different units of two states has a copy for each of them.
    """
    y, found = site.relation.y_var, dict[_Live, list[Tap]]()
    for tap in site.influence.taps:
        var, copy = _sum_of(graph, y) if tap.var is y else tap.var, 0
        while any(_differ(tap, other) for other in found.get((var, copy), ())):
            copy += 1
        found.setdefault((var, copy), []).append(tap)
    return found


def _differ(first: Tap, second: Tap) -> bool:
    """Test whether an element of a variable has different output elements at two taps."""
    places = [
        np.arange(t.var.aval.size) if t.outputs is None else t.outputs for t in (first, second)
    ]
    return bool(np.any((places[0] != places[1]) & (np.minimum(*places) >= 0)))


def _sum_of(graph: ETraceGraph, y: Var) -> Var:
    """Return the sum of outputs that nothing else reads, or the output."""
    program, opaque = graph.traced.program, set(opaque_outputs(graph))

    def has_outputs_alone(total: Var) -> bool:
        index = program.producer.get(total)
        if index is None or program.equations[index].primitive.name not in SUMS:
            return False
        return all(map(is_term, program.equations[index].invars))

    def is_term(atom: Any) -> bool:
        is_read_once = is_var(atom) and len(program.readers[atom]) == 1
        return is_read_once and (atom in opaque or has_outputs_alone(atom))

    return sum_of(graph, y, has_outputs_alone) if y in opaque else y


def _live_of(graph: ETraceGraph, group: HiddenGroup, state: int) -> dict[Var, _Live]:
    """Return the old States and the taps that a state is differentiated by."""
    read = (group.states[c].in_var for a, c in group.transition if a == state)
    live = {var: (var, 0) for var in read}
    for site in trace_sites(graph, group):
        taps = _taps_of(graph, site).items()
        live |= {key[0]: key for key, own in taps if any(tap.state == state for tap in own)}
    return live


def _held_vars(graph: ETraceGraph, group: HiddenGroup, state: int) -> set[Var]:
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


# --- values


@functools.lru_cache(maxsize=64)
def read_vars(graph: ETraceGraph) -> list[Var]:
    """Return the variables of a step that the derivatives of its local steps depend on."""
    read = {var for group in graph.traced_groups for var in local_step(graph, group).reads}
    # With several rules, each reads the parameters behind broadcasts that another one taps.
    taps = (
        (site.relation.y_var, tap) for site in trace_sites(graph) for tap in site.influence.taps
    )
    behind = graph.traced.program.depends_on(y for y, tap in taps if tap.var is not y)
    read.update(behind.intersection(leaf.in_var for leaf in graph.traced.parameters))
    return [var for var in _given_vars(graph) if var in read]


def _given_vars(graph: ETraceGraph) -> list[Var]:
    """Return the variables that local steps may be given, in order; others are computed again."""
    program = graph.traced.program
    given = {*program.in_vars, *opaque_outputs(graph)}
    given.update(relation.y_var for relation in graph.hidden_param_op_relations)
    for group in graph.hidden_groups:
        given.update(group.new_vars)
        given.update(*(_live_of(graph, group, a) for a in range(len(group.states))))
    known = (e for e in program.equations if e.primitive.name in FROM_RESULT)
    given.update(equation.outvars[0] for equation in known)
    made = (var for equation in program.equations for var in equation.outvars)
    return [var for var in (*program.in_vars, *made) if var in given]


def values_of(graph: ETraceGraph, recorded: Mapping[str, Any]) -> Values:
    """Return the values that local steps read, given the values of `read_vars` by name.

    A result that depends on another rule's operation is not recorded but computed again.
    """
    program, read = graph.traced.program, read_vars(graph)
    pairs = zip(read, names_of(program, read), strict=True)
    known = {var: recorded[name] for var, name in pairs if name in recorded}
    missing = [var for var in read if var not in known and var in program.producer]
    return known | dict(zip(missing, evaluate(program, missing, known), strict=True))


# --- the local step backward


class LocalStep(NamedTuple):
    """The vector-Jacobian product of the local step of a group.

    Attributes
    ----------
    program
        The program, which returns the leaves of ``results``.
    reads
        Its inputs by the variables of the step whose values they take.
    new
        Its inputs for cotangents, by the states that have a derivative.
    results
        Structure of the results of `pull`.
    """

    program: Program
    reads: Mapping[Var, Var]
    new: Mapping[int, Var]
    results: PyTree

    def once(self, values: Values) -> Values:
        """Return what the program computes from values that are equal in all steps."""
        # A broadcast is left to each step: it would take more memory than what it reads.
        program = self.program
        given = {own: values[var] for var, own in self.reads.items() if var in values}
        varying = program.dependents_of(var for var in program.in_vars if var not in given)
        left, moved = list[Any](), set[Var]()
        for equation in program.equations:
            if varying.isdisjoint(equation.outvars) and not _is_broadcast(equation):
                moved.update(equation.outvars)
            else:
                left.extend(equation.invars)
        wanted = list(dict.fromkeys(v for v in left if is_var(v) and v in moved))
        return dict(zip(wanted, evaluate(program, wanted, given), strict=True))

    def pull(
        self, values: Values, cotangents: States, once: Values | None = None
    ) -> tuple[States, dict[str, jax.Array]]:
        """Pull cotangents of new states back to old states, and to outputs by `row_name`."""
        inputs = {own: values[var] for var, own in self.reads.items()}
        inputs |= {own: cotangents[a] for a, own in self.new.items()}
        found = evaluate(self.program, self.program.out_atoms, inputs, once)
        before, outputs = jax.tree.unflatten(self.results, found)
        return before, outputs


def _is_broadcast(equation: Equation) -> bool:
    smallest = min((var.aval.size for var in equation.outvars), default=math.inf)
    return all(atom.aval.size < smallest for atom in equation.invars)


@functools.lru_cache(maxsize=256)
def local_step(graph: ETraceGraph, group: HiddenGroup, only: int | None = None) -> LocalStep:
    """Return the local step of a group, or of one of its states."""
    given, states = _given_vars(graph), range(len(group.states)) if only is None else [only]
    live_of = {a: live for a in states if (live := _live_of(graph, group, a))}
    moving = list(dict.fromkeys(key for own in live_of.values() for key in own.values()))
    read = sorted({c for a, c in group.transition if a in live_of})

    def pulled(values: list[Any], *cotangents: jax.Array) -> PyTree:
        step = _Forward(graph, group, dict(zip(given, values, strict=True)), live_of)

        def run(values: list[Any]) -> States:
            return step.new_states(dict(zip(moving, values, strict=True)))

        _, back = jax.vjp(run, [step.known[var] for var, _ in moving])
        rows = dict(zip(moving, *back(dict(zip(live_of, cotangents, strict=True))), strict=True))
        olds = {c: rows[group.states[c].in_var, 0] for c in read}
        before = {c: old_state_to_elements(group, c, row) for c, row in olds.items()}
        return before, step.rows_of_outputs(rows)

    types = (group.new_vars[a].aval.dtype for a in live_of)
    cotangents = [jax.ShapeDtypeStruct(group.shape, dtype) for dtype in types]
    shapes = [struct_of(var.aval) for var in given]
    closed, found = jax.make_jaxpr(pulled, return_shape=True)(shapes, *cotangents)
    program = program_of(inlined(closed))
    used, inputs = program.depends_on(program.out_atoms), iter(program.in_vars)
    reads = {var: own for var, own in zip(given, inputs, strict=False) if own in used}
    return LocalStep(
        program, reads, dict(zip(live_of, inputs, strict=True)), jax.tree.structure(found)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Forward:
    """The local step of a group, given values of variables, and what each state varies with."""

    graph: ETraceGraph
    group: HiddenGroup
    known: Values
    live_of: Mapping[int, Mapping[Var, _Live]]

    def evaluated(
        self, targets: Iterable[Var], overrides: Values, rules: dict[int, Rule]
    ) -> list[jax.Array]:
        program = self.graph.traced.program
        inputs = {var: self.known[var] for var in program.in_vars}
        values = evaluate(program, [*targets], inputs, overrides, rules)
        return [*map(jnp.asarray, values)]

    def held(self, variables: Iterable[Var]) -> Values:
        return {var: self.known[var] for var in variables}

    def new_states(self, live: Mapping[_Live, jax.Array]) -> States:
        """Return the new states, per unit, by the values of variables that they vary with."""
        group, parts, new = self.group, dict[Any, list[int]](), States()
        for a, own in self.live_of.items():  # the slots of a State are evaluated together
            copies = frozenset(key for key in own.values() if key[1])
            parts.setdefault((group.new_vars[a], copies), []).append(a)
        alike = dict[Any, dict[Var, list[int]]]()
        for (var, _), slots in parts.items():
            pairs = frozenset(pair for a in slots for pair in self.live_of[a].items())
            held = frozenset(_held_vars(self.graph, group, slots[0]))
            alike.setdefault((pairs, held, group.cuts[slots[0]]), {})[var] = slots
        # So are States that vary in the same way: an operation that they share is pulled back once.
        for (pairs, held, cuts), targets in alike.items():
            overrides = {**self.held(held), **{var: live[key] for var, key in pairs}}
            values = self.evaluated(targets, overrides, self.rules_of(cuts))
            for slots, value in zip(targets.values(), values, strict=True):
                new |= new_slots_to_elements(group, tuple(slots), value)
        return new

    def rules_of(self, cuts: Sequence[Cut]) -> dict[int, Rule]:
        """Return rules that hold operands constant, and take derivatives from known results."""
        program, held = self.graph.traced.program, dict[int, set[int]]()
        for cut in cuts:
            held.setdefault(cut.equation, set()).add(cut.operand)
        names = enumerate(equation.primitive.name for equation in program.equations)
        from_results = {index for index, name in names if name in FROM_RESULT}

        def rule_for(index: int) -> Rule:
            def rule(equation: Equation, values: list[Any]) -> list[Any]:
                stopped = [
                    jax.lax.stop_gradient(v) if i in held.get(index, ()) else v
                    for i, v in enumerate(values)
                ]
                if index in from_results:
                    return [from_result(equation, stopped[0], self.known[equation.outvars[0]])]
                return bind_differentiable(equation, stopped)

            return rule

        return maxima_of(program) | {index: rule_for(index) for index in {*held, *from_results}}

    def rows_of_outputs(self, rows: Mapping[_Live, jax.Array]) -> dict[str, jax.Array]:
        """Convert cotangents at taps to the layout of each operation's output; see `row_name`."""
        found: dict[str, jax.Array] = {}
        for site in trace_sites(self.graph, self.group):
            name, y = row_name(self.graph, site), site.relation.y_var
            taps = _taps_of(self.graph, site).items() if name not in found else ()
            for key, every in taps:
                own = [tap for tap in every if tap.state in self.live_of]
                if own:
                    row = self.back_to_output(y, key[0], rows[key])
                    outputs = tap_to_outputs(site.influence, _joined(own), row)
                    found[name] = found[name] + outputs if name in found else outputs
        return found

    def back_to_output(self, y: Var, reached: Var, row: jax.Array) -> jax.Array:
        """Return the cotangent of ``y``, from the one of a variable that it is broadcast to.

        The variable depends on ``y`` element by element. Both parts of a complex number count: the
        broadcast value may be its absolute value.
        """
        if reached is _sum_of(self.graph, y):
            return row
        held = self.held(opaque_outputs(self.graph))

        def along(direction: complex) -> jax.Array:
            tangent = jnp.full(y.aval.shape, direction, y.aval.dtype)
            broadcast = lambda value: self.evaluated([reached], {**held, y: value}, {})  # noqa: E731
            return jnp.real(row * jax.jvp(broadcast, (self.known[y],), (tangent,))[1][0])

        if not jnp.issubdtype(y.aval.dtype, jnp.complexfloating):
            return along(1)
        return jax.lax.complex(along(1), -along(1j))


def _joined(taps: Sequence[Tap]) -> Tap:
    """Return one tap with the outputs of all states."""
    outputs = [tap.outputs for tap in taps if tap.outputs is not None]
    of_any = np.maximum.reduce(outputs) if len(outputs) == len(taps) else None
    return dataclasses.replace(taps[0], outputs=of_any)


def blocks(
    graph: ETraceGraph, group: HiddenGroup, values: Values
) -> tuple[dict[tuple[int, int], jax.Array], dict[str, jax.Array]]:
    """Return ``D`` of one step, by ``(new, old)`` state, and ``Df``, by the keys of traces.

    The unit row of each state is pulled back separately: it has no entries for other states. The
    rows of many states that all act on each other, as in a neuron with compartments, are pulled
    back together: their program is as long as one row's.
    """
    D, Df = dict[tuple[int, int], jax.Array](), dict[str, jax.Array]()
    for state, of_old, outputs in _unit_rows(graph, group, values):
        D.update({(state, c): block for c, block in of_old.items()})
        for site in trace_sites(graph, group):
            if state in site.influence.states:
                Df[site.key(state)] = outputs[row_name(graph, site)]
    return D, Df


MOST_ROWS_APART = 4


def _unit_rows(
    graph: ETraceGraph, group: HiddenGroup, values: Values
) -> Iterator[tuple[int, States, dict[str, jax.Array]]]:
    """Yield the unit row of each state, pulled back to old states and to outputs."""
    states = range(len(group.states))
    types = [var.aval.dtype for var in group.new_vars]
    is_full = len(group.transition) == len(states) * len(group.read_states)
    if is_full and len(states) > MOST_ROWS_APART:
        local = local_step(graph, group)
        shape = (len(states), *group.shape)
        rows = {a: jnp.zeros(shape, types[a]).at[a].set(1) for a in local.new}
        pulled = jax.vmap(functools.partial(local.pull, values))(rows)
        for state in local.new:
            yield state, *jax.tree.map(operator.itemgetter(state), pulled)
        return
    for state in states:
        local = local_step(graph, group, state)
        if local.new:
            ones = jnp.ones(group.shape, types[state])
            yield state, *local.pull(values, {state: ones})


# --- rows of cotangents through a chunk

Outputs = dict[str, jax.Array]
"""Arrays in the layout of an operation's output, by `row_name`."""


def pull(
    graph: ETraceGraph,
    group: HiddenGroup,
    records: Records,
    end: States,
    signal: States,
    emit: Callable[[Outputs], PyTree],
    selects: bool,
) -> tuple[States, PyTree]:
    """Pull rows of cotangents of the states of a group back through a chunk.

    Parameters
    ----------
    graph, group, records
        The compiled model, one of its groups, and the recorded steps of a chunk.
    end
        Rows for the last states, per unit, with leading axes of their own.
    signal
        Signals for the states after each step, time first; empty: none.
    emit
        Selects what is returned of each step's cotangents of outputs.
    selects
        Whether a zero cotangent has a zero result, also if the derivative is not finite.

    Returns
    -------
    before
        Rows for the states before the chunk that its first step reads.
    emitted
        The results of ``emit``, time first.
    """
    row = next(iter(end.values()), jnp.zeros(group.shape))
    lead, local = row.shape[: row.ndim - len(group.shape)], local_step(graph, group)
    read = read_vars(graph)
    named = zip(read, names_of(graph.traced.program, read), strict=True)
    known = {var: records.values[name] for var, name in named if name in records.values}
    once = local.once({var: value[0] for var, value in known.items() if len(value) == 1})

    def step(rows: States, now: PyTree) -> tuple[States, PyTree]:
        recorded, own_signal, reset = now
        values = values_of(graph, recorded)
        cotangents = {
            a: _sum(
                [part[a] for part in (rows, own_signal) if a in part], (*lead, *group.shape)
            ).astype(own.aval.dtype)
            for a, own in local.new.items()
        }

        def pulled(cotangents: States) -> tuple[States, Outputs]:
            before, outputs = local.pull(values, cotangents, once)
            if selects:
                is_zero = jnp.all(jnp.stack([value == 0 for value in cotangents.values()]), 0)
                before = {c: jnp.where(is_zero, 0, value) for c, value in before.items()}
                sites = {row_name(graph, s): s for s in trace_sites(graph, group)}
                outputs = {
                    name: jnp.where(sites[name].to_outputs(is_zero), 0, row)
                    for name, row in outputs.items()
                }
            return before, outputs

        for _ in lead:
            pulled = jax.vmap(pulled)
        before, outputs = pulled(cotangents)
        if reset is not None:
            is_new = at_elements(graph, group, reset)
            before = {c: jnp.where(is_new, 0, value) for c, value in before.items()}
        carried = {
            c: before[c].astype(row.dtype) if c in before else jnp.zeros_like(row)
            for c, row in rows.items()
        }
        return carried, emit(outputs)

    now = (records.values, signal, records.reset)
    return scan_records(step, end, now, records.steps, reverse=True)


def _sum(terms: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(shape)

"""No random cell gets a wrong gradient in silence."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close
from catalogue_runs import Runs, data
from random_cells import (
    BATCH,
    INPUTS,
    OUTPUTS,
    UNITS,
    Program,
    chunk_size,
    entry_of,
    random_programs,
)
from recorded import RecordedCase

import braintrace

TOLERANCE = 1e-9
XS, TARGETS = (BATCH, INPUTS), (BATCH, OUTPUTS)

pytestmark = pytest.mark.usefixtures("float64")


def compiled(program):
    """A learner for the cell, or ``None`` where the compiler refuses it."""
    try:
        return Runs(entry_of(program), "d_rtrl")
    except braintrace.CompilationError:
        return None


def layouts(graph):
    """How the states come into their groups' order: a cell may read another in mirror order.

    A state may also be at a part of its group's positions only; the others hold zeros, which
    nothing reads.
    """

    def placed(ids, size):
        assert len(np.unique(ids)) == ids.size, "two elements of a state are at one position"

        def to_group(value):
            return jnp.zeros(size, value.dtype).at[ids].set(value)

        return to_group, lambda value: value[ids]

    return {
        state.name: placed(layout, group.num_positions)
        for group in graph.hidden_groups
        for state, layout in zip(group.states, group.old_layouts, strict=True)
        if layout is not None
    }


def dense(program, groups, canonical):
    entry = entry_of(program)
    model, (xs, targets) = entry.started(), data(entry)
    case = RecordedCase("random cell", model, xs[0], groups, canonical)
    params, states = jax.tree.map(np.asarray, (case.params(), case.states()))
    read, reached = dependencies(case, params, states, xs[0])
    assert not coupled(case, states, read, canonical), "two groups are coupled position by position"
    case.relations = {
        operation: tuple(group for group in groups if any(map(np.any, reached[group][operation])))
        for operation in case.relations
    }
    return oracles.dense_d_rtrl(case, params, states, xs, targets)


@oracles.compiled
def dependencies(case, params, states, x):
    """Derivatives at the first step, in numbers.

    read: of each new state with respect to each old one, and to each new one, every ETP output
        held fixed.
    reached: {group: {operation: those of the group's new states with respect to its output}}.
    """
    plain = oracles.PlainOps()
    case.step(plain, params, states, x)

    def from_old(old):
        ops = oracles.PlainOps(outputs=plain.outputs)
        case.step(ops, params, old, x)
        return ops.hidden

    def from_new(new):
        ops = oracles.PlainOps(outputs=plain.outputs, hidden=new)
        case.step(ops, params, states, x)
        return ops.hidden

    def from_outputs(outputs, members):
        ops = oracles.PlainOps(outputs=outputs)
        case.step(ops, params, states, x)
        return [ops.hidden[name] for name in members]

    read = [jax.jacfwd(from_old)(states)]
    read += [jax.jacfwd(from_new)({name: plain.hidden[name]}) for name in states]
    reached = {}
    for group, members in case.groups.items():
        by_state = jax.jacrev(from_outputs)(plain.outputs, members)
        reached[group] = {name: [state[name] for state in by_state] for name in plain.outputs}
    return read, reached


def coupled(case, states, read, canonical):
    """Whether a state of one group reads one of another at its own position."""
    group_of = {name: group for group, members in case.groups.items() for name in members}
    positions = {name: np.arange(value.size) for name, value in states.items()}
    own = {
        name: canonical[name][1](of) if name in canonical else of for name, of in positions.items()
    }

    def at_own_position(new, old, derivative):
        full = np.reshape(derivative, (len(positions[new]), len(positions[old])))
        return np.any(full[own[new].ravel(), own[old].ravel()])

    return any(
        group_of[new] != group_of[name] and at_own_position(new, name, derivative)
        for of_new in read
        for new, by_name in of_new.items()
        for name, derivative in by_name.items()
    )


def outcome(program):
    return outcome_of(program, compiled(program))


def outcome_of(program, runs):
    if runs is None:
        return "refused"
    graph, found = runs.learner.graph, runs.own_gradient()
    if any(diagnostic.level == "warning" for diagnostic in graph.diagnostics):
        assert all(np.isfinite(leaf).all() for g in found.values() for leaf in g)
        return "diagnosed"
    groups = {
        str(group.index): tuple(state.name for state in group.states)
        for group in graph.hidden_groups
    }
    expected = dense(program, groups, layouts(graph))
    assert_gradients_close(found, expected, TOLERANCE, f"step by step: {program}")
    at_once = runs.sequence(chunk_size(program))
    assert_gradients_close(at_once, expected, TOLERANCE, f"at once: {program}")
    return "equal"


@pytest.mark.parametrize("examples", [3])
def test_random_cells_agree_with_the_oracle_or_say_why_not(examples):
    outcomes = collections.Counter()

    @random_programs(examples)
    def check(program):
        outcomes[outcome(program)] += 1

    check()
    assert outcomes["equal"] >= 0.4 * examples, outcomes
    assert outcomes["diagnosed"] >= 0.15 * examples, outcomes


@pytest.mark.parametrize("name", ["roll", "flip", "swap", "mean", "dot", "max", "cumsum"])
def test_mixing_of_a_state_is_not_silent(name):
    assert outcome(Program(1, ((name, 1, 0), ("add", 0, 1)))) in ("refused", "diagnosed")


@pytest.mark.parametrize("name", ["flip", "mirror"])
def test_an_output_that_reaches_two_positions_by_moves_is_traced(name):
    assert outcome(Program(1, ((name, 0, 0), ("gain", 0, 0)))) == "equal"


def test_states_at_a_part_of_their_positions_are_traced():
    """The first position of one state is none of the others': it reads them from the second on."""
    instructions = (("sigmoid", 1, 0), ("input", 2, 0), ("halves", 0, 1), ("padded", 1, 0))
    program = Program(2, instructions)
    runs = compiled(program)
    groups = runs.learner.graph.hidden_groups
    assert any(group.num_positions > UNITS * BATCH for group in groups)
    assert outcome_of(program, runs) == "equal"


@pytest.mark.parametrize("name", ["dot", "cumsum"])
def test_an_output_that_reaches_all_positions_is_not_silent(name):
    assert outcome(Program(1, ((name, 0, 0), ("gain", 0, 0)))) == "diagnosed"

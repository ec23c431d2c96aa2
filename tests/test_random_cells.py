"""No random cell gets a wrong gradient in silence."""

import collections
import warnings

import brainstate
import jax
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close
from hypothesis import HealthCheck, Phase, given, settings
from random_cells import BATCH, INPUTS, OUTPUTS, Program, RandomCell, programs
from recorded import RecordedCase, mantissas, sequences

import braintrace

TOLERANCE = 1e-9
XS, TARGETS = (BATCH, INPUTS), (BATCH, OUTPUTS)

pytestmark = pytest.mark.usefixtures("float64")


def compiled(program):
    """A learner for the cell, or ``None`` where the compiler refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        xs, _ = sequences(XS, TARGETS)
        try:
            return braintrace.compile(RandomCell(program), "d_rtrl", xs[0], batch_size=BATCH)
        except braintrace.CompilationError:
            return None


def learned(learner):
    xs, targets = sequences(XS, TARGETS)
    gradients = learner.etrace_grad(
        xs,
        targets,
        step_fn=lambda x, target: RecordedCase.loss(learner(x), target),
        reduction="sum",
        chunk_size=1,
    )
    return {"/".join(path): mantissas(value) for path, value in gradients.items()}


def layouts(graph):
    """How the states come into their groups' order: a cell may read another in mirror order."""

    def permuted(order):
        inverse = np.argsort(order)
        to_group, from_group = (
            lambda value, taken=taken: value.ravel()[taken].reshape(value.shape)
            for taken in (inverse, order)
        )
        return to_group, from_group

    return {
        state.name: permuted(layout.ravel())
        for group in graph.hidden_groups
        for state, layout in zip(group.states, group.old_layouts, strict=True)
        if layout is not None
    }


def dense(program, groups, canonical):
    model = RandomCell(program)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    xs, targets = sequences(XS, TARGETS)
    case = RecordedCase("random cell", model, xs[0], groups, canonical)
    params, states = jax.tree.map(np.asarray, (case.params(), case.states()))
    assert not coupled(case, params, states, xs[0]), "two groups are coupled position by position"
    case.relations = reached(case, params, states, xs[0])
    return oracles.dense_d_rtrl(case, params, states, xs, targets)


def reached(case, params, states, x):
    """The groups that each operation reaches, seen in numbers at the first step."""
    ops = oracles.PlainOps()
    case.step(ops, params, states, x)
    relations = dict.fromkeys(ops.outputs, ())
    for group, members in case.groups.items():

        def new_states(outputs, members=members):
            changed = oracles.PlainOps(outputs=outputs)
            case.step(changed, params, states, x)
            return [changed.hidden[name] for name in members]

        for jacobian in jax.jacrev(new_states)(ops.outputs):
            for name, derivative in jacobian.items():
                if np.any(derivative) and group not in relations[name]:
                    relations[name] = (*relations[name], group)
    return relations


def coupled(case, params, states, x):
    """Whether a state of one group reads one of another at its own position.

    Seen in numbers: with every marked output held fixed, by the change of each new state with
    each old one, and with each new one.
    """
    held = oracles.PlainOps()
    case.step(held, params, states, x)

    def from_old(old):
        ops = oracles.PlainOps(outputs=held.outputs)
        case.step(ops, params, old, x)
        return ops.hidden

    def from_new(new):
        ops = oracles.PlainOps(outputs=held.outputs, hidden=new)
        case.step(ops, params, states, x)
        return ops.hidden

    group_of = {name: group for group, members in case.groups.items() for name in members}
    found = []
    for name in states:
        others = [other for other in states if group_of[other] != group_of[name]]
        for function, values in ((from_old, states), (from_new, {name: held.hidden[name]})):
            tangent = jax.tree.map(np.zeros_like, values)
            for position in np.ndindex(states[name].shape):
                tangent[name] = np.zeros_like(states[name])
                tangent[name][position] = 1
                change = jax.jvp(function, (values,), (tangent,))[1]
                found += [other for other in others if change[other][position] != 0]
    return found


def outcome(program):
    learner = compiled(program)
    if learner is None:
        return "refused"
    if any(diagnostic.level == "warning" for diagnostic in learner.graph.diagnostics):
        assert all(np.isfinite(leaf).all() for g in learned(learner).values() for leaf in g)
        return "diagnosed"
    groups = {
        str(group.index): tuple(state.name for state in group.states)
        for group in learner.graph.hidden_groups
    }
    expected = dense(program, groups, layouts(learner.graph))
    assert_gradients_close(learned(learner), expected, TOLERANCE, str(program))
    return "equal"


def test_random_cells_agree_with_the_oracle_or_say_why_not():
    outcomes = collections.Counter()

    @settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def check(program):
        outcomes[outcome(program)] += 1

    check()
    assert outcomes["equal"] >= 12, outcomes
    assert outcomes["diagnosed"] >= 5, outcomes


@pytest.mark.parametrize("name", ["roll", "flip", "swap", "mean", "dot", "max", "cumsum"])
def test_mixing_of_a_state_is_not_silent(name):
    assert outcome(Program(1, ((name, 1, 0), ("add", 0, 1)))) in ("refused", "diagnosed")


@pytest.mark.parametrize("name", ["roll", "flip", "swap", "mirror", "shift"])
def test_an_output_that_reaches_two_positions_by_moves_is_traced(name):
    assert outcome(Program(1, ((name, 0, 0), ("gain", 0, 0)))) == "equal"


@pytest.mark.parametrize("name", ["dot", "cumsum"])
def test_an_output_that_reaches_all_positions_is_not_silent(name):
    assert outcome(Program(1, ((name, 0, 0), ("gain", 0, 0)))) == "diagnosed"

"""`reset_state` of all samples or of some, wherever it is called, is what `reset` is."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_states_close
from drivers import build_learner, snapshot

import braintrace

LENGTH, BATCH = 5, 2
DONE = np.zeros((LENGTH, BATCH), bool)
DONE[1, 0], DONE[2], DONE[-1, 1] = True, True, True
LATER = np.concatenate([DONE[:1] & False, DONE[:-1]])
"""The same resets, as flags of the step that comes after."""


@pytest.mark.parametrize(("name", "options"), [("ALIFLateThreshold", {})])
def test_in_a_loop_of_the_users_own(name, options):
    case = catalogue.BY_NAME[name]
    expected, eager, compiled, by_cond = (build_learner(case, **options) for _ in range(4))
    xs, _ = case.sequences(BATCH, LENGTH)
    expected.etrace_evolve(xs, reset=LATER)
    initial = snapshot(eager)
    for x, done in zip(xs, DONE, strict=True):
        eager(x)
        eager.reset_state(where=done)

    def step(x, done):
        compiled(x)
        compiled.reset_state(where=done)

    def step_with_cond(x, done):
        by_cond(x)
        for sample in np.eye(BATCH, dtype=bool):
            is_done = (done & sample).any()
            reset = lambda sample=sample: by_cond.reset_state(where=sample)  # noqa: E731
            brainstate.transform.cond(is_done, reset, lambda: None)

    brainstate.transform.for_loop(step, xs, DONE)
    brainstate.transform.jit(
        lambda: brainstate.transform.for_loop(step_with_cond, xs, jnp.asarray(DONE))
    )()
    expected.reset_state(where=DONE[-1])
    for learner in (eager, compiled, by_cond):
        assert_states_close(snapshot(learner), snapshot(expected), name)
    eager.reset_state(where=True)
    assert_states_close(snapshot(eager), initial, name)


def test_what_an_update_function_may_not_do():
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case)
    model, algorithm = learner.algorithm.model, learner.algorithm
    state, traces = model.states(brainstate.HiddenState)[("h",)], algorithm.traces
    x = case.sequences(BATCH, 1)[0][0]

    def zero(state):
        state.value = jax.tree.map(jnp.zeros_like, state.value)
        return 0

    def run(update_fn):
        return learner.etrace_online(
            *case.sequences(BATCH, 2),
            step_fn=lambda x, target: case.loss(learner(x), target),
            update_fn=update_fn,
        )

    wrong = [
        (lambda: learner(x), "`update_fn` calls the learner"),
        (lambda: algorithm(x), "`update_fn` writes"),
        (lambda: zero(state), "`update_fn` writes the hidden State 'h'"),
        (lambda: zero(algorithm.traces), "`update_fn` writes the traces"),
        (lambda: zero(traces), "the State of the traces"),
        (lambda: learner.reset_state(), "`update_fn` writes"),
        (lambda: learner.reset_state(where=np.ones(BATCH, bool)), "`update_fn` writes"),
    ]
    before = snapshot(learner)
    for call, words in wrong:
        with pytest.raises((braintrace.OptionError, braintrace.ShapeError), match=words):
            run(lambda gradients, call=call: call())
        assert_states_close(snapshot(learner), before)
    with pytest.raises(braintrace.OptionError, match="the State of the traces"):
        learner.etrace_grad(x[None], step_fn=lambda x: learner(x).sum() + zero(traces))
    assert_states_close(snapshot(learner), before)
    seen = []

    def reading(gradients):
        brainstate.transform.cond(state.value.sum() > 0, lambda: state.value, lambda: state.value)
        seen.append(jax.tree.leaves(algorithm.traces.value))

    run(reading)
    assert algorithm.traces is traces and seen

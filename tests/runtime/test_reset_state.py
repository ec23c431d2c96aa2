"""`reset_state` of all samples or of some, wherever it is called, is what `reset` is."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close
from drivers import build_learner, snapshot, weights_of

import braintrace

LENGTH, BATCH = 5, 2
DONE = np.zeros((LENGTH, BATCH), bool)
DONE[1, 0], DONE[2], DONE[-1, 1] = True, True, True
LATER = np.concatenate([DONE[:1] & False, DONE[:-1]])
"""The same resets, as flags of the step that comes after."""
EITHER = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ALIFLateThreshold", {}),
        ("LSTMFused", {"algorithm": "es_d_rtrl", "decay_or_rank": 0.7, "style": "mapped"}),
    ],
)


def stream(case, learner, after_step, **options):
    """Learn along a stream in two calls; ``after_step(done)`` is called in `update_fn`."""
    weights = weights_of(learner.algorithm.model)

    def update(gradients, done):
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])
        after_step(done)

    def step_fn(x, target, done):
        return case.loss(learner(x), target), done

    sequences = (*case.sequences(BATCH, LENGTH), DONE)
    functions = {"step_fn": step_fn, "update_fn": update, "has_aux": True}
    losses = [learner.etrace_online(*sequences, **functions, **options)[0] for _ in range(2)]
    return losses, {path: weight.value for path, weight in weights.items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [("LSTMFused", {"algorithm": "es_d_rtrl", "decay_or_rank": 0.7, "style": "mapped"})],
)
def test_in_an_update_function(name, options):
    case = catalogue.BY_NAME[name]
    expected, single, under_cond = (build_learner(case, **options) for _ in range(3))
    # What is asked for after the last step of a call comes before the first of the next.
    twice = np.concatenate([LATER, DONE[-1:], LATER[1:]])
    functions = {"step_fn": lambda x, target: case.loss(expected(x), target)}
    weights = weights_of(expected.algorithm.model)
    before = jax.device_get({path: weight.value for path, weight in weights.items()})

    def descend(gradients):
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])

    xs, targets = (np.concatenate([part] * 2) for part in case.sequences(BATCH, LENGTH))
    losses = expected.etrace_online(xs, targets, update_fn=descend, reset=twice, **functions)
    expected.reset_state(where=DONE[-1])

    def every(done):
        """All at once where all are done, else one by one, both under `cond`."""
        cond = brainstate.transform.cond
        cond(done.all(), under_cond.reset_state, lambda: None)
        cond(done.any(), lambda: under_cond.reset_state(where=done), lambda: None)

    for learner, after_step in (
        (single, lambda done: single.reset_state(where=done)),
        (under_cond, every),
    ):
        found, after = stream(case, learner, after_step)
        np.testing.assert_allclose(np.concatenate(found), losses, rtol=1e-5)
        assert_gradients_close(
            jax.tree.map(np.subtract, after, before),
            {path: jax.tree.map(np.subtract, weights[path].value, before[path]) for path in after},
            1e-5,
            name,
        )
        assert_states_close(snapshot(learner), snapshot(expected), name)


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
        (lambda: learner.reset_state(BATCH + 1), "within its batch"),
        (lambda: learner.reset_state(scale=2.0), "the initial values of its model"),
        (lambda: learner.reset_state(where=np.zeros(BATCH)), "expected booleans"),
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

"""Traces that are known to be zero, or deferred, in every transformation."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import LEAKY, TARGETS, XS, assert_same, learner_of, state_of, step_of

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("float64")]


def gradient(learner):
    return learner.etrace_grad(XS, TARGETS, step_fn=step_of(learner))


def steps(learner):
    return jnp.stack([learner(x) for x in jnp.asarray(XS)])


def one_step_gradient(learner):
    weights = learner.module.states(brainstate.ParamState)
    own = brainstate.transform.grad(lambda: jnp.sum(learner(XS[0]) ** 2), weights)
    return own()


def reset(learner):
    learner.reset_state()


STARTS = {"zero": reset, "deferred": gradient, "arrays": steps}

PROGRAMS = {
    "gradient": [gradient],
    "reset, gradient": [reset, gradient],
    "gradient, reset": [gradient, reset],
    "gradient twice": [gradient, gradient],
    "steps": [steps],
    "reset, steps": [reset, steps],
    "gradient, steps": [gradient, steps],
    "gradient, one step": [gradient, one_step_gradient],
    "one step, reset, gradient": [one_step_gradient, reset, gradient],
}


def run(learner, parts):
    return [part(learner) for part in parts]


def looped(learner):
    """The steps in a loop of brainstate."""
    return brainstate.transform.for_loop(learner, jnp.asarray(XS))


def in_jit(learner, parts):
    parts = [looped if part is steps else part for part in parts]
    return brainstate.transform.jit(lambda: run(learner, parts))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_in_jit_is_the_program(program, start):
    parts, learner = PROGRAMS[program], learner_of(LEAKY)
    for call in (STARTS[start], lambda own: run(own, parts)):
        result = call(learner)
    second = run(learner, parts)
    after = state_of(learner)
    reset(learner)
    STARTS[start](learner)
    compiled = in_jit(learner, parts)
    assert_same(compiled(), result)
    assert_same(compiled(), second)
    assert_same(state_of(learner), after)


@pytest.mark.parametrize("start", STARTS)
def test_loops_and_gradients_outside_of_jit(start):
    learner = learner_of(LEAKY)
    STARTS[start](learner)
    expected = steps(learner), one_step_gradient(learner), state_of(learner)
    reset(learner)
    STARTS[start](learner)
    assert_same((looped(learner), one_step_gradient(learner), state_of(learner)), expected)


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_a_branch_resets(start, is_new):
    learner = learner_of(LEAKY)
    STARTS[start](learner)
    if is_new:
        reset(learner)
    expected = gradient(learner)
    reset(learner)
    STARTS[start](learner)

    @brainstate.transform.jit
    def run_branch(flag):
        brainstate.transform.cond(flag, lambda: reset(learner), lambda: None)
        return gradient(learner)

    assert_same(run_branch(is_new), expected)


def test_functions_that_need_other_forms_alternate():
    learner = learner_of(LEAKY)
    train = in_jit(learner, [reset, gradient])
    evaluate = in_jit(learner, [reset, steps])
    expected = run(learner, [reset, gradient]), run(learner, [reset, steps])
    for _ in range(3):
        assert_same(train(), expected[0])
        assert_same(evaluate(), expected[1])


def test_a_loop_with_a_new_step_function_in_every_trace_is_compiled_twice(compilations):
    """From zero traces, and from those of the sequence before."""
    learner = learner_of(LEAKY)

    @brainstate.transform.jit
    def train(scale, targets):
        reset(learner)
        step_fn = step_of(learner)
        return learner.etrace_grad(XS, step_fn=lambda x: step_fn(scale * x, targets[0]))

    scale, targets = jnp.asarray(2.0), jnp.asarray(TARGETS)
    reset(learner)
    first = train(scale, targets)
    train(scale, targets)
    count = len(compilations)
    for _ in range(3):
        assert_same(train(scale, targets), first)
    assert len(compilations) == count
    traces = state_of(learner)
    reset(learner)
    learner.etrace_grad(2.0 * XS, step_fn=lambda x: step_of(learner)(x, TARGETS[0]))
    assert_same(state_of(learner), traces)


# --- pure functions


def test_a_scan_over_sequences_after_a_reset():
    learner = learner_of(LEAKY)
    pure, state = learner.functional(), learner.functional().state()
    sequences = np.stack([XS, 2 * XS]), np.stack([TARGETS, -TARGETS])

    def in_turn(state, now):
        return pure.grad(state, *now, step_fn=step_of(learner))

    expected = []
    now = pure.reset(state)
    for index in range(2):
        now, found = in_turn(now, [part[index] for part in sequences])
        expected.append(found)
    start = pure.reset(state, like=state)
    last, found = jax.jit(lambda s: jax.lax.scan(in_turn, s, sequences))(start)
    assert_same(found, jax.tree.map(lambda *parts: jnp.stack(parts), *expected))
    assert_same(last, pure.settle(now))


def test_a_scan_of_steps_after_a_reset():
    learner = learner_of(LEAKY)
    pure = learner.functional()
    state = pure.settle(pure.reset(pure.state()))
    last, outputs = jax.lax.scan(pure.step, state, jnp.asarray(XS))
    assert_same(outputs, steps(learner))
    assert_same(jax.device_get(last), state_of(learner))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_pure_branch_resets(is_new):
    learner = learner_of(LEAKY)
    steps(learner)
    pure, state = learner.functional(), learner.functional().state()
    found = jax.lax.cond(is_new, pure.reset, lambda state: state, state)
    assert_same(found, pure.settle(pure.reset(state)) if is_new else state)


def test_deferred_traces_of_mapped_learners():
    learner = learner_of(LEAKY)
    pure, state = learner.functional(), learner.functional().state()
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    both = np.stack([XS, 2 * XS])

    def from_reset(state, xs):
        return pure.grad(pure.reset(state), xs, TARGETS, step_fn=step_of(learner))

    found = jax.vmap(pure.settle)(jax.vmap(from_reset)(stack, both)[0])
    for index in range(2):
        alone = pure.settle(from_reset(state, both[index])[0])
        assert_same(jax.tree.map(lambda leaf, k=index: leaf[k], found), alone)


# --- nothing is computed that nobody reads


def cost(lowered):
    found = lowered.compile().cost_analysis()
    return np.array([found["flops"], found["bytes accessed"]])


def test_a_loop_of_the_user_does_no_work_of_traces():
    learner = learner_of(LEAKY)
    pure, state = learner.functional(), learner.functional().state()
    step_fn = step_of(learner)
    from_zero = jax.jit(lambda s: pure.grad(s, XS, TARGETS, step_fn=step_fn))
    wanted = cost(from_zero.lower(pure.reset(state)))
    assert (cost(from_zero.lower(state)) > wanted).all()
    together = jax.jit(lambda s: pure.grad(pure.reset(s), XS, TARGETS, step_fn=step_fn))
    assert (cost(together.lower(state)) <= 1.05 * wanted).all()
    for parts in ([reset, gradient], [gradient, reset]):
        reset(learner)
        compiled = in_jit(learner, parts)
        compiled()
        assert (cost(compiled.lower()) <= 1.05 * wanted).all()

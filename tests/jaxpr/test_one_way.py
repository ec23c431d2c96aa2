"""Gradients that would go back through a `while` loop are refused by name, and nothing else is."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

XS = jax.device_put(np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32))
close = {"rtol": 1e-5, "atol": 1e-6}


def unbounded(x):
    return jax.lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, jnp.tanh(carry[1])), (0, x)
    )[1]


def bounded(x):
    return jnp.tanh(jnp.tanh(jnp.tanh(x)))


def in_a_branch(x):
    return jax.lax.cond(x.sum() > -1e9, unbounded, lambda x: x, x)


def in_a_scan(x):
    return jax.lax.scan(lambda x, _: (unbounded(x), None), x, None, length=1)[0]


def in_a_call(x):
    return jax.jit(unbounded)(x)


@jax.custom_jvp
def with_a_derivative(x):
    return unbounded(x)


with_a_derivative.defjvp(lambda xs, dxs: jax.jvp(bounded, xs, dxs))

PLACES = ("before", "between", "behind")
LOOPS = {"plain": unbounded, "branch": in_a_branch, "scan": in_a_scan, "call": in_a_call}


class Model(brainstate.nn.Module):
    """An encoder, a leaky state and a readout; a loop before, between or behind."""

    def __init__(self, place, loop):
        super().__init__()
        draw = np.random.default_rng(1).normal
        self.encoder = brainstate.ParamState(jax.device_put(np.float32(draw(size=(3, 3)))))
        self.w = brainstate.ParamState(jax.device_put(np.float32(draw(size=(3, 4)))))
        self.out = brainstate.ParamState(jax.device_put(np.float32(draw(size=(4, 2)))))
        self.loops = {**dict.fromkeys(PLACES, lambda x: x), place: loop}

    def init_state(self, batch_size=2):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        x = self.loops["before"](x @ self.encoder.value)
        self.h.value = 0.9 * self.h.value + self.loops["between"](
            braintrace.matmul(x, self.w.value)
        )
        return self.loops["behind"](self.h.value @ self.out.value)


def compiled(place, loop, rule="d_rtrl", **options):
    return braintrace.compile(Model(place, loop), rule, XS[0], batch_size=2, **options)


def by_sequence(learner):
    return learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x) ** 2))


def by_chunks(learner):
    step_fn = lambda x: jnp.sum(learner(x) ** 2)  # noqa: E731
    return learner.etrace_grad(XS, step_fn=step_fn, chunk_size=2)


def by_resets(learner):
    """Step by step, each sample reset in the middle, with an uncounted step."""
    step_fn = lambda x: jnp.sum(learner(x) ** 2)  # noqa: E731
    flags = jnp.zeros((len(XS), 2), bool).at[2, 0].set(True)
    mask = jnp.asarray([1.0, 0.0, 1.0, 1.0])
    return learner.etrace_grad(XS, step_fn=step_fn, chunk_size=1, reset=flags, mask=mask)


def by_stream(learner):
    taken = []
    learner.etrace_online(
        XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), update_fn=lambda g: taken.append(g)
    )


def by_function(learner):
    pure = learner.functional()
    return pure.grad(pure.state(), XS, step_fn=lambda x: jnp.sum(learner(x) ** 2))


def by_own_step(learner):
    return brainstate.transform.grad(
        lambda: jnp.sum(learner(XS[0]) ** 2), learner.algorithm.param_states
    )()


def by_own_steps(learner):
    def loss():
        return jnp.sum(brainstate.transform.for_loop(learner, XS) ** 2)

    return brainstate.transform.jit(
        brainstate.transform.grad(loss, learner.algorithm.param_states)
    )()


def by_pure_steps(learner):
    pure = learner.functional()
    start = pure.state()

    def loss(parameters):
        state = dataclasses.replace(start, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, XS)[1] ** 2)

    return jax.jit(jax.grad(loss))(start.parameters)


def by_mapped_steps(learner):
    pure = learner.functional()
    start = pure.state()

    def loss(parameters, x):
        return jnp.sum(pure.step(dataclasses.replace(start, parameters=parameters), x)[1] ** 2)

    return jax.vmap(jax.grad(loss), in_axes=(None, 0))(start.parameters, XS)


WAYS = [by_sequence, by_stream, by_function, by_own_step, by_own_steps, by_pure_steps]
WAYS += [by_mapped_steps, by_chunks, by_resets]
NAMES = {"before": "'encoder'", "between": "'encoder', 'w'", "behind": "'encoder', 'h', 'out', 'w'"}


@pytest.mark.parametrize(
    ("place", "way"),
    [
        ("before", by_sequence),
        ("before", by_own_step),
        ("before", by_chunks),
        ("between", by_stream),
        ("between", by_own_steps),
        ("between", by_resets),
        ("behind", by_function),
        ("behind", by_pure_steps),
        ("behind", by_mapped_steps),
    ],
)
@pytest.mark.core
def test_a_gradient_through_a_loop_is_refused_by_name(place, way):
    """What is before the loop is named, and the learner predicts as before."""
    learner = compiled(place, unbounded)
    words = rf"`while` loop of `update` \(.*test_one_way.py.*are {NAMES[place]}\. Use.*fori_loop"
    with pytest.raises(braintrace.CompilationError, match=words):
        way(learner)
    found = learner.predict(XS)
    np.testing.assert_allclose(found, compiled(place, bounded).predict(XS), **close)


@pytest.mark.parametrize(
    ("options", "way", "loop"),
    [
        ({}, by_sequence, "plain"),
        ({}, by_own_step, "scan"),
        ({"rule": "es_d_rtrl"}, by_sequence, "branch"),
        ({"rule": "es_d_rtrl"}, by_sequence, "call"),
        ({"rule": "es_d_rtrl"}, by_own_step, "plain"),
        ({"window": 2}, by_sequence, "scan"),
        ({"window": 2}, by_own_step, "branch"),
        ({"window": 2}, by_own_step, "call"),
    ],
)
def test_loops_inside_of_others_are_found(loop, way, options):
    learner = compiled("behind", LOOPS[loop], **options)
    with pytest.raises(braintrace.CompilationError, match=r"`while` loop of `update` \(.*test_one"):
        way(learner)


@pytest.mark.parametrize(
    ("form", "place", "way"),
    [
        ("stopped", "behind", by_pure_steps),
        ("with its own derivative", "between", by_pure_steps),
        ("with its own derivative", "behind", by_sequence),
    ],
)
def test_what_has_a_gradient_keeps_it(place, form, way):
    """A loop behind `stop_gradient`, and one in a function with a derivative of its own."""

    def stopped(loop):
        return lambda x: x + loop(jax.lax.stop_gradient(x))

    if form == "stopped":
        found, expected = (
            way(compiled(place, stopped(unbounded))),
            way(compiled(place, stopped(bounded))),
        )
    else:
        found, expected = way(compiled(place, with_a_derivative)), way(compiled(place, bounded))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), found, expected)


@pytest.mark.parametrize("rule", ["d_rtrl", "es_d_rtrl"])
def test_weights_behind_the_loop_learn_alone(rule):
    """The derivative with respect to what does not pass the loop is not refused."""
    found, expected = (
        brainstate.transform.grad(
            lambda learner=learner: jnp.sum(learner(XS[0]) ** 2),
            {path: s for path, s in learner.algorithm.param_states.items() if path != ("encoder",)},
        )()
        for learner in (compiled("before", loop, rule) for loop in (unbounded, bounded))
    )
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), found, expected)


def test_states_and_traces_move_forward_through_a_loop():
    """D-RTRL differentiates a loop between the weight and the state forward."""
    learners = [compiled("between", loop) for loop in (unbounded, bounded)]
    for learner in learners:
        learner.etrace_evolve(XS)
    found, expected = (learner.eligibility("w") for learner in learners)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), found, expected)


@pytest.mark.parametrize("way", ["etrace_grad", "functional", "lower"])
def test_a_loop_of_the_step_function_is_named(way):
    learner = compiled("behind", lambda x: x)

    def step(x):
        return jnp.sum(unbounded(learner(x)))

    calls = {
        "etrace_grad": lambda: learner.etrace_grad(XS, step_fn=step),
        "functional": lambda: learner.functional().grad(
            learner.functional().state(), XS, step_fn=step
        ),
        "lower": lambda: learner.lower("etrace_grad", XS, step_fn=step),
    }
    with pytest.raises(
        braintrace.OptionError,
        match=r"`while` loop of unknown length in `step_fn`.*test_one_way.py",
    ):
        calls[way]()

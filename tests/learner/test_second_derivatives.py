"""Derivatives of what a learner returns: exact, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

T, BATCH, INPUTS, UNITS = 4, 2, 3, 4


def step(params, state, x):
    leak = jax.nn.sigmoid(braintrace.element_wise(params["leak"]))
    h = leak * state["h"] + jnp.tanh(braintrace.matmul(x, params["w"]))
    return {"h": h}, h**2


def plain_outputs(params, xs, start=0.0):
    """The same steps without the library; the last hidden state, and outputs."""

    def run(h, x):
        h = jax.nn.sigmoid(params["leak"]) * h + jnp.tanh(x @ params["w"])
        return h, h**2

    return jax.lax.scan(run, jnp.zeros((BATCH, UNITS)) + start, xs)


@pytest.fixture
def setting(float64):
    return made()


@functools.cache
def made():
    """Of functions of the state, which leave the learner as it is."""
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(INPUTS, UNITS)), "leak": random.normal(size=UNITS)}
    params, xs = jax.tree.map(jnp.asarray, (params, random.normal(size=(T, BATCH, INPUTS))))
    model = braintrace.from_function(step, params, {"h": jnp.zeros((BATCH, UNITS))})
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH)
    pure = learner.functional()
    start = pure.state()

    def state_of(own):
        parameters = {("params", name): value for name, value in own.items()}
        return dataclasses.replace(start, parameters=parameters)

    return learner, pure, state_of, params, xs


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def gradient_of_sequence(learner, pure, state, xs):
    return pure.grad(state, xs, step_fn=lambda x: jnp.sum(learner(x)), chunk_size=2)[1]


def gradient_of_steps(learner, pure, state, xs):
    def loss(parameters):
        own = dataclasses.replace(state, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, own, xs)[1])

    return jax.grad(loss)(state.parameters)


def states_after_evolution(learner, pure, state, xs):
    return pure.evolve(state, xs)[0].hidden


REFUSED = {
    "gradients of `etrace_grad`": gradient_of_sequence,
    "gradient of a learner's step": gradient_of_steps,
    "states after it, are differentiated": states_after_evolution,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_traces_hold_constant_has_no_derivative(setting, message):
    """Of parameters, of inputs, or below a function of JAX; a stopped value has one of zero."""
    learner, pure, state_of, params, xs = setting

    def of(params, xs, through=lambda value: value):
        return squares(through(REFUSED[message](learner, pure, state_of(params), xs)))

    for around in (lambda f: f, jax.jit, jax.checkpoint):
        for argument in (0, 1):
            gradient = jax.grad(around(of), argument)
            with pytest.raises(braintrace.OptionError, match=message):
                jax.make_jaxpr(gradient)(params, xs)
    with pytest.raises(braintrace.OptionError, match=message):
        jax.grad(of)(params, xs)
    stopped = jax.jit(jax.grad(lambda params: of(params, xs, jax.lax.stop_gradient)))(params)
    assert not any(map(np.any, jax.tree.leaves(stopped)))


def test_losses_and_auxiliary_results_have_the_derivative_of_backpropagation(setting):
    learner, pure, state_of, params, xs = setting

    def step_fn(x):
        output = learner(x)
        return jnp.sum(jnp.sin(output)), output

    def of_learner(params, xs):
        options = {"has_aux": True, "return_value": True, "chunk_size": 2}
        state, (_, losses, outputs) = pure.grad(state_of(params), xs, step_fn=step_fn, **options)
        return jnp.sum(losses) + squares(outputs) + squares(state.hidden)

    def of_plain(params, xs):
        h, outputs = plain_outputs(params, xs)
        return jnp.sum(jnp.sin(outputs)) + squares(outputs) + squares(h)

    found = jax.jit(jax.grad(of_learner, (0, 1)))(params, xs)
    expected = jax.jit(jax.grad(of_plain, (0, 1)))(params, xs)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-10), found, expected)


WAYS = {
    "derivative by inputs": lambda pure, state, x: jax.grad(
        lambda x: jnp.sum(pure.step(state, x)[1])
    )(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_penalty_on_another_derivative_is_exact_or_refused(setting, way):
    """It differentiates twice, but only once by the parameters; a window is exact."""
    learner, pure, state_of, params, xs = setting
    of = WAYS[way]

    def of_learner(params, x, pure=pure, through=lambda value: value):
        return squares(through(of(pure, state_of(params), x)))

    def of_plain(params, x):
        h = jnp.zeros((BATCH, UNITS))
        output = lambda x, h: jnp.sum(plain_outputs(params, x[None], h)[1])  # noqa: E731
        return squares(jax.grad(output, 0)(x, h))

    for around in (lambda f: f, jax.jit, jax.checkpoint):
        gradient = jax.grad(around(of_learner))
        with pytest.raises(braintrace.OptionError, match="derivative through a learner's step"):
            jax.make_jaxpr(gradient)(params, xs[0])
    with pytest.raises(braintrace.OptionError, match="derivative through a learner's step"):
        jax.grad(of_learner)(params, xs[0])
    held = functools.partial(of_learner, through=jax.lax.stop_gradient)
    windowed = braintrace.compile(learner.module, "d_rtrl", xs[0], batch_size=BATCH, window=1)
    of_window = functools.partial(of_learner, pure=windowed.functional())
    gradients = (
        *(jax.grad(held), jax.grad(of_learner, 1)),
        *(jax.grad(of_plain, (0, 1)), jax.grad(of_window)),
    )
    all_at_once = jax.jit(lambda *arguments: [gradient(*arguments) for gradient in gradients])
    stopped, own, expected, found = all_at_once(params, xs[0])
    assert not any(map(np.any, jax.tree.leaves(stopped)))
    np.testing.assert_allclose(own, expected[1], rtol=1e-10)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-10), found, expected[0])


def test_backpropagation_may_be_differentiated_twice(setting):
    """What the errors recommend."""
    _, pure, state_of, params, xs = setting

    def second(outputs):
        gradient = jax.grad(lambda params: jnp.sum(outputs(params)))
        return jax.jit(jax.grad(lambda params: squares(gradient(params))))(params)

    found = second(lambda params: pure.predict(state_of(params), xs)[1])
    expected = second(lambda params: plain_outputs(params, xs)[1])
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-10), found, expected)

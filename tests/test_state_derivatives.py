"""Derivatives with respect to hidden states: those of the model's own steps."""

import dataclasses

import brainstate
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drivers import build_learner
from rules import OTHERS, RULES

import braintrace

STEPS = 3
ROWS = [(rule.case, name) for name, rule in RULES.items()]
MODELS = [(name, "d_rtrl") for name in ("lstm_fused", "two_layers", "tanh_rnn", "leaky_with_bias")]
close = {"rtol": 2e-5, "atol": 1e-6}


def in_the_middle(name, algorithm, vjp_method):
    """A learner in the middle of a sequence, with its data."""
    case = cases.BY_NAME[name]
    learner = build_learner(case, algorithm, vjp_method=vjp_method)
    xs, targets = case.sequences(2, 2 * STEPS)
    learner.etrace_evolve(xs[:STEPS])
    return case, learner, xs[STEPS:], targets[STEPS:]


def hidden_of(learner):
    return learner.algorithm.model.states(brainstate.HiddenState)


def of_plain_steps(case, learner, xs, targets):
    """The derivative by brainstate of the model's own `update`, from the same values."""
    model, before = learner.algorithm.model, learner.functional().state()

    def loss():
        outputs = [model.update(x) for x in xs]
        last = sum(jnp.sum(jnp.sin(s.value)) for s in hidden_of(learner).values())
        return last + sum(map(case.loss, outputs, targets))

    found = brainstate.transform.grad(loss, hidden_of(learner))()
    learner.functional().restore(before)
    return found


def assert_close(found, expected):
    assert set(found) == set(expected)
    assert any(np.any(np.asarray(value)) for value in expected.values())
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, **close)


def pure_loss(case, pure, start, xs, targets, scanned=False):
    """The loss of a few steps as a function of hidden states and parameters."""

    def loss(hidden, parameters=start.parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        if scanned:
            state, outputs = jax.lax.scan(pure.step, state, xs)
        else:
            outputs = []
            for x in xs:
                state, output = pure.step(state, x)
                outputs.append(output)
        hidden = [state.hidden[path] for path in hidden_of(pure._learner)]
        return sum(jnp.sum(jnp.sin(h)) for h in hidden) + sum(map(case.loss, outputs, targets))

    return loss


@pytest.mark.by_day(
    "alif_late_threshold-d_rtrl-single-step",
    "alif_late_threshold-immediate-multi-step",
    "two_layers-rtrl-multi-step",
    "two_layers-ostl_feedforward-multi-step",
    "tanh_rnn-uoro-single-step",
    "two_layers-d_rtrl-single-step",
)
@pytest.mark.parametrize("vjp_method", ["single-step", "multi-step"])
@pytest.mark.parametrize(("name", "algorithm"), ROWS + MODELS)
def test_derivative_of_steps(name, algorithm, vjp_method):
    """Of one and of several, as a function, through States, and in one window."""
    case, learner, xs, targets = in_the_middle(name, algorithm, vjp_method)
    pure = learner.functional()
    start = pure.state()
    paths = hidden_of(learner)
    for length, scanned in ((1, False), (STEPS, True)):
        expected = of_plain_steps(case, learner, xs[:length], targets[:length])
        data = xs[:length], targets[:length]
        found = jax.grad(pure_loss(case, pure, start, *data, scanned))(start.hidden)
        assert_close({path: found[path] for path in paths}, expected)

    def through_states():
        if vjp_method == "multi-step":
            outputs = learner(braintrace.MultiStepData(xs))
        else:
            outputs = brainstate.transform.for_loop(learner, xs)
        last = sum(jnp.sum(jnp.sin(s.value)) for s in paths.values())
        return last + sum(map(case.loss, outputs, targets))

    found = brainstate.transform.grad(through_states, paths)()
    assert_close(found, expected)


@pytest.mark.by_day(
    "lstm_fused-d_rtrl-single-step",
    "alif_late_threshold-immediate-single-step",
    "alif_late_threshold-snap-single-step",
    "alif_late_threshold-ottt-single-step",
)
@pytest.mark.parametrize("vjp_method", ["single-step", "multi-step"])
@pytest.mark.parametrize(
    ("name", "algorithm"), [("lstm_fused", "d_rtrl"), *((r.case, r.name) for r in OTHERS)]
)
def test_derivative_of_parameters_is_the_online_one(name, algorithm, vjp_method):
    """To the last bit, whether or not hidden states are asked for too; these count as constants."""
    case, learner, xs, targets = in_the_middle(name, algorithm, vjp_method)
    pure = learner.functional()
    start = pure.state()
    loss = pure_loss(case, pure, start, xs, targets)
    alone = jax.jit(jax.grad(loss, 1))(start.hidden, start.parameters)
    hidden, together = jax.jit(jax.grad(loss, (0, 1)))(start.hidden, start.parameters)
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    assert not any(np.any(hidden[path]) for path in hidden_of(learner))


def test_programs_without_that_derivative_have_nothing_of_it():
    """A derivative with respect to parameters has not one equation more for it."""
    case, learner, xs, targets = in_the_middle("lstm_fused", "d_rtrl", "single-step")
    pure = learner.functional()
    start = pure.state()
    loss = pure_loss(case, pure, start, xs[:1], targets[:1])
    text = jax.jit(jax.grad(loss, 1)).lower(start.hidden, start.parameters).as_text()
    assert "custom_jvp" not in text


@pytest.mark.parametrize("outside", ["argument", "parameter"])
def test_what_depends_on_parameters_stops_at_old_states(outside):
    """An encoder in front of the model has the gradient of each step, as the model's own have."""
    _, learner, xs, _ = in_the_middle("leaky", "d_rtrl", "single-step")
    weight = brainstate.ParamState(jnp.eye(xs.shape[-1]))
    own = {("encoder",): weight}
    if outside == "parameter":
        own |= learner.algorithm.param_states
    before = learner.functional().state()

    def total():
        return sum(jnp.sum(learner(x @ weight.value)) for x in xs)

    together = brainstate.transform.grad(total, own)()
    learner.functional().restore(before)
    by_step = [
        brainstate.transform.grad(lambda x=x: jnp.sum(learner(x @ weight.value)), own)() for x in xs
    ]
    expected = jax.tree.map(lambda *parts: sum(parts), *by_step)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, **close), together, expected)


def test_learned_initial_states():
    """By their own derivative, next to the online one of the parameters."""
    case, learner, xs, targets = in_the_middle("lstm_fused", "d_rtrl", "single-step")
    learner.reset_state()
    pure = learner.functional()
    start, losses = pure.state(), []
    loss = pure_loss(case, pure, start, xs, targets, scanned=True)
    descend = jax.jit(jax.value_and_grad(loss))
    hidden = start.hidden
    for _ in range(5):
        value, gradient = descend(hidden)
        hidden = jax.tree.map(lambda h, g: h - 0.1 * g, hidden, gradient)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)


# --- parameters and hidden states of one loss -----------------------------------------------


class Diagonal(brainstate.nn.Module):
    """A state that keeps its units apart, so that D-RTRL is exact."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(1).normal
        self.w = brainstate.ParamState(jnp.asarray(draw(size=(3, 4)), jnp.float32))

    def init_state(self, batch_size=2):
        self.h = brainstate.HiddenState(jnp.full((batch_size, 4), 0.3))

    def update(self, x):
        self.h.value = jnp.tanh(0.8 * self.h.value + braintrace.matmul(x, self.w.value))
        return self.h.value


XS = jnp.asarray(np.random.default_rng(0).normal(size=(2 * STEPS, 2, 3)), jnp.float32)


def by_bptt(h, w, before, xs):
    """The loss of the last steps, of the state before them and of a weight in all steps."""
    for x in before:
        h = jnp.tanh(0.8 * h + x @ w)
    return _rest(h, w, xs)


def _rest(h, w, xs):
    total = 0.0
    for x in xs:
        h = jnp.tanh(0.8 * h + x @ w)
        total = total + jnp.sum(h**2)
    return total


def two_by_states(learner, xs):
    hidden, parameters = hidden_of(learner), learner.algorithm.param_states
    before, found = learner.functional().state(), {}
    for states in (hidden, parameters):
        learner.functional().restore(before)
        loss = lambda: jnp.sum(brainstate.transform.for_loop(learner, xs) ** 2)  # noqa: E731
        found |= brainstate.transform.grad(loss, states)()
    return found[("h",)], found[("w",)]


def two_by_functions(learner, xs):
    pure = learner.functional()
    start = pure.state()

    def loss(hidden, parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, xs)[1] ** 2)

    found = [jax.jit(jax.grad(loss, place))(start.hidden, start.parameters) for place in (0, 1)]
    return found[0][("h",)], found[1][("w",)]


def two_by_lanes(learner, xs):
    """Inside a map of somebody else: over copies of the hidden state."""
    pure = learner.functional()
    start = pure.state()

    def loss(hidden, parameters):
        state = dataclasses.replace(start, hidden=hidden, parameters=parameters)
        return jnp.sum(jax.lax.scan(pure.step, state, xs)[1] ** 2)

    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), start.hidden)
    found = [
        jax.vmap(jax.grad(loss, place), in_axes=(0, None))(copies, start.parameters)
        for place in (0, 1)
    ]
    jax.tree.map(lambda leaf: np.testing.assert_allclose(leaf[0], leaf[1], **close), found)
    return found[0][("h",)][0], found[1][("w",)][0]


@pytest.mark.parametrize("place", ["start", "middle", "after a reset"])
@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("two", [two_by_states, two_by_functions, two_by_lanes])
def test_two_gradients_equal_backpropagation(two, rule, place):
    """One with respect to the hidden states, one with respect to the parameters, of one loss."""
    learner = braintrace.compile(Diagonal(), rule, XS[0], batch_size=2)
    before, xs = XS[:0], XS[STEPS:]
    if place != "start":
        learner.etrace_evolve(XS[:STEPS])
        before = XS[:STEPS]
    if place == "after a reset":
        learner.reset_state(2)
        before = XS[:0]
    model = learner.algorithm.model
    start, w = jnp.full((2, 4), 0.3), model.w.value
    expected = jax.grad(_rest)(model.h.value, w, xs), jax.grad(by_bptt, 1)(start, w, before, xs)
    for found, value in zip(two(learner, xs), expected, strict=True):
        np.testing.assert_allclose(found, value, **close)

"""An optimizer in `etrace_online` is the same optimizer written out by its user."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_models
import saiunit as u
from learners import (
    LEAKY,
    TARGETS,
    XS,
    assert_same,
    learner_of,
    squared_error,
    step_of,
    weights_of,
)
from random_models import BATCH, STEPS

import braintrace

pytestmark = pytest.mark.usefixtures("float64")


def of_matrices(parameters):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, parameters)


OPTIMIZERS = {
    "schedule": optax.adam(optax.cosine_decay_schedule(0.05, 5)),
    "masked": optax.adamw(0.01, weight_decay=0.1, mask=of_matrices),
    "injected": optax.chain(
        optax.clip_by_global_norm(0.1), optax.inject_hyperparams(optax.adam)(learning_rate=0.02)
    ),
}


def by_itself(learner, optimizer, **options):
    options = {"step_fn": step_of(learner), **options}
    return learner.etrace_online(XS, TARGETS, optimizer=optimizer, **options)


class ByHand:
    """What a user writes in `update_fn`."""

    def __init__(self, learner, optimizer):
        self.learner, self.weights = learner, learner.param_states
        self.optimizer = optimizer
        self.state = brainstate.State(self.optimizer.init(self.values()))

    def values(self):
        return {path: weight.value for path, weight in self.weights.items()}

    def update(self, gradients):
        changes, self.state.value = self.optimizer.update(
            gradients, self.state.value, self.values()
        )
        for path, value in optax.apply_updates(self.values(), changes).items():
            self.weights[path].value = value

    def run(self):
        options = {"step_fn": step_of(self.learner), "update_fn": self.update}
        return self.learner.etrace_online(XS, TARGETS, **options)


@pytest.mark.core
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_the_one_written_out(name):
    """Over two calls: its state goes on."""
    found, other = (learner_of(which=which) for which in range(2))
    expected = ByHand(other, OPTIMIZERS[name])
    for _ in range(2):
        assert_same(by_itself(found, OPTIMIZERS[name]), expected.run())
    assert_same(weights_of(found), weights_of(other))
    assert_same(found.optimizer_state, expected.state.value)


class Momentum:
    """Descent as optimizers with States are written: its `update` is an `update_fn`."""

    def __init__(self, weights):
        self.weights = weights
        zeros = {path: jnp.zeros_like(weight.value) for path, weight in weights.items()}
        self.kept = brainstate.State(zeros)

    def update(self, grads):
        self.kept.value = jax.tree.map(lambda m, g: 0.9 * m + g, self.kept.value, grads)
        for path, weight in self.weights.items():
            weight.value = weight.value - 0.1 * self.kept.value[path]


def test_an_optimizer_with_states_is_an_update_function():
    sgd = optax.sgd(0.1, momentum=0.9)
    found, expected = (learner_of(which=which) for which in range(2))
    momentum = Momentum(found.param_states)
    with pytest.raises(AttributeError, match="init") as caught:
        by_itself(found, momentum)
    assert "update_fn=optimizer.update" in "".join(caught.value.__notes__)
    losses = by_itself(found, None, update_fn=momentum.update)
    assert_same(losses, by_itself(expected, sgd))
    assert_same(weights_of(found), weights_of(expected))


# --- parameters of other kinds


def test_optimizers_see_the_pytree_of_a_function():
    """So labels fit."""
    params = {"cell": {"w": jnp.ones((3, 4))}, "gain": jnp.full(4, 0.9), "size": 3}

    def step(params, h, x):
        gain = braintrace.element_wise(params["gain"])
        h = gain * h + braintrace.matmul(x, params["cell"]["w"])
        return h, jnp.tanh(h)

    model = braintrace.from_function(step, params, jnp.zeros((BATCH, 4)))
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
    labels = {"cell": {"w": "fast"}, "gain": "still", "size": None}
    parts = {"fast": optax.adam(0.1), "still": optax.set_to_zero()}
    options = {"optimizer": optax.multi_transform(parts, labels)}
    learner.etrace_online(XS, step_fn=lambda x: jnp.mean(learner(x) ** 2), **options)
    after = model.get_params()
    assert_same(after["gain"], params["gain"], 0)
    assert np.any(after["cell"]["w"] != 1)


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_computes_in_the_units_of_the_parameters(every):
    model = random_models.Module(LEAKY, random_models.Marked(), np.float64)
    model.out.value = model.out.value * u.mS
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)

    def step_fn(x, target):
        return squared_error(learner(x) / u.mS, target)

    options = {"every": every, "optimizer": optax.adam(0.01)}
    learner.etrace_online(XS, TARGETS, step_fn=step_fn, **options)
    other = learner_of()
    by_itself(other, optax.adam(0.01), every=every)
    assert model.out.value.unit == u.mS
    assert_same(model.out.value.mantissa, weights_of(other)["out"])


class Complex(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones(2, jnp.complex128))

    def init_state(self, batch_size):
        self.re, self.im = (brainstate.HiddenState(jnp.zeros((batch_size, 2))) for _ in range(2))

    def update(self, x):
        drive = braintrace.element_wise(self.w.value)
        self.re.value = 0.1 * self.re.value + x * drive.real
        self.im.value = 0.1 * self.im.value + x * drive.imag
        return self.re.value, self.im.value


def test_complex_parameters_go_downhill():
    model, xs = Complex(), jnp.full((100, 1, 2), 0.9)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=1)

    def step_fn(x):
        re, im = learner(x)
        return jnp.sum((re - 3) ** 2 + (im - 4) ** 2)

    learner.etrace_online(xs, step_fn=step_fn, optimizer=optax.sgd(0.1))
    np.testing.assert_allclose(model.w.value, 3 + 4j, rtol=1e-2)


# --- its state in the learner


def test_an_optimizer_that_is_made_anew_goes_on():
    learner, traced = learner_of(), []

    def step_fn(x, y):
        traced.append(None)
        return squared_error(learner(x), y)

    for call in range(3):
        by_itself(learner, optax.adam(0.05), step_fn=step_fn)
        assert learner.optimizer_state[0].count == (call + 1) * STEPS
        count = count if call else len(traced)  # noqa: F821
    assert len(traced) == count


def test_another_optimizer_is_refused_until_told_so():
    learner = learner_of()
    by_itself(learner, optax.adam(0.05))
    before = learner.optimizer_state
    with pytest.raises(braintrace.OptionError, match="optimizer_state"):
        by_itself(learner, optax.sgd(0.1))
    assert learner.optimizer_state is before
    learner.optimizer_state = None
    by_itself(learner, optax.sgd(0.1))


def test_inside_a_transformation_an_optimizer_is_initialised_before():
    outside, inside = (learner_of(which=which) for which in range(2))
    expected = by_itself(outside, optax.adam(0.05))
    pure = inside.functional()
    options = {"step_fn": step_of(inside), "optimizer": optax.adam(0.05)}
    by_brainstate = brainstate.transform.jit(lambda: by_itself(inside, optax.adam(0.05)))
    by_jax = jax.jit(lambda state: pure.online(state, XS, TARGETS, **options))
    for run in (by_brainstate, lambda: by_jax(pure.state())):
        with pytest.raises(braintrace.OptionError, match="init_optimizer"):
            run()
    inside.init_optimizer(optax.adam(0.05))
    assert pure.state().optimizer[0].mu.keys() == inside.param_states.keys()
    assert_same(by_jax(pure.state())[1], expected)
    assert_same(by_brainstate(), expected)
    assert_same(inside.optimizer_state, outside.optimizer_state)

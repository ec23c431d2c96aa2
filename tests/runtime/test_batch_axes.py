"""`reset_state` with another batch size resizes what is the batch, whatever else has its size."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close

import braintrace

OLD, NEW = 4, 2


class Leaky(brainstate.nn.Module):
    """Features, units and batch have one size."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, OLD * OLD).reshape(OLD, OLD))
        self.bias = brainstate.ParamState(jnp.linspace(0.0, 1.0, OLD))

    def init_state(self, batch_size=None):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, OLD)))

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x, self.w.value, self.bias.value))
        self.h.value = 0.5 * self.h.value + drive
        return self.h.value


class Windowed(Leaky):
    """Time leads in the input, with as many steps as samples."""

    def update(self, window):
        return super().update(window.sum(0))


class Masked(Leaky):
    """An argument without a batch, before the one that has it."""

    def update(self, mask, x):
        return super().update(mask * x)


class Normalised(Leaky):
    """Samples are coupled, so that no axis of the input has samples apart."""

    def update(self, x):
        return super().update(x - x.mean(0))


class Sideways(Leaky):
    """The batch is the last axis of the state and of the input."""

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((OLD, batch_size)))

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x.T, self.w.value, self.bias.value))
        self.h.value = 0.5 * self.h.value + drive.T
        return self.h.value


class TwoSizes(Leaky):
    """Another state is as wide as the batch is now, or will be."""

    def __init__(self):
        super().__init__()
        self.narrow = brainstate.ParamState(jnp.linspace(-1.0, 1.0, OLD * NEW).reshape(OLD, NEW))

    def init_state(self, batch_size=None):
        super().init_state(batch_size)
        self.k = brainstate.HiddenState(jnp.zeros((batch_size, NEW)))

    def update(self, x):
        lower = super().update(x)
        self.k.value = 0.7 * self.k.value + braintrace.matmul(lower, self.narrow.value)
        return self.k.value


class Grouped(Leaky):
    """Two states in the last axis of one State."""

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenGroupState(jnp.zeros((batch_size, OLD, 2)))

    def update(self, x):
        v, a = self.h.value[..., 0], self.h.value[..., 1]
        v = 0.5 * v - 0.1 * a + jnp.tanh(braintrace.matmul(x, self.w.value, self.bias.value))
        self.h.value = jnp.stack([v, 0.9 * a + v], axis=-1)
        return v


def batch_first(batch):
    return [(batch, OLD)]


MODELS = {
    "features and units": (Leaky, batch_first, {}),
    "mapped": (Leaky, batch_first, {"vmap": True}),
    "time window": (Windowed, lambda batch: [(OLD, batch, OLD)], {}),
    "argument without a batch": (Masked, lambda batch: [(OLD,), (batch, OLD)], {}),
    "coupled samples": (Normalised, batch_first, {}),
    "batch last": (Sideways, lambda batch: [(OLD, batch)], {}),
    "two sizes": (TwoSizes, batch_first, {}),
    "group state": (Grouped, batch_first, {}),
}


MODELS_BY_CLASS = {model: shapes for model, shapes, _ in MODELS.values()}


def sequences(shapes, steps=3):
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(steps, *shape)), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("name", ["features and units", "argument without a batch"])
def test_equals_a_learner_of_that_size(name):
    model, shapes, options = MODELS[name]
    inputs = sequences(shapes(NEW))

    def compiled(batch):
        example = [part[0] for part in sequences(shapes(batch))]
        return braintrace.compile(model(), "d_rtrl", *example, batch_size=batch, **options)

    def run(learner):
        gradients = learner.etrace_grad(*inputs, step_fn=lambda *x: (learner(*x) ** 2).sum())
        return gradients, learner.algorithm.traces.value

    learner = compiled(OLD)
    learner.reset_state(NEW)
    found, traces = run(learner)
    expected, traces_then = run(compiled(NEW))
    assert_gradients_close(found, expected, 1e-6, name)
    assert_states_close(traces, traces_then)


@pytest.mark.parametrize("model", [Leaky, Windowed, Masked])
def test_another_size_is_traced_once(model):
    """And no other size is tried."""
    shapes, traced = MODELS_BY_CLASS[model], []

    class Counted(model):
        def update(self, *inputs):
            traced.append([x.shape for x in inputs])
            return super().update(*inputs)

    example = [part[0] for part in sequences(shapes(OLD))]
    learner = braintrace.compile(Counted(), "d_rtrl", *example, batch_size=OLD)
    traced.clear()
    learner.reset_state(NEW)
    assert traced == [shapes(NEW)]


def test_states_of_a_known_size_that_are_made_by_hand_are_reset():
    learner = braintrace.compile(Leaky(), "d_rtrl", jnp.ones((OLD, OLD)), batch_size=OLD)
    learner.reset_state(NEW)
    learner.reset_state(OLD)
    brainstate.nn.init_all_states(learner.algorithm.model, batch_size=NEW)
    learner.reset_state()
    assert learner(jnp.ones((NEW, OLD))).shape == (NEW, OLD)

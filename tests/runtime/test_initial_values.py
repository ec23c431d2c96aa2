"""The values that states start from: of which type, and made how often."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

X = jnp.ones((2, 3))
EVERY_STEP = np.ones(1, bool)


def is_weak(states):
    values = [state.value for state in states.values()]
    return any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(values))


@pytest.mark.parametrize("entry", catalogue.LAYERS, ids=lambda entry: entry.name)
def test_layers_start_as_their_steps_leave_them(entry):
    model = entry.module()
    for start in (brainstate.nn.init_all_states, brainstate.nn.reset_all_states):
        start(model, batch_size=2)
        assert not is_weak(model.states())


RUNS = []


class Started(brainstate.nn.Module):
    """A model whose initial value is made by a function."""

    def __init__(self, initial=lambda model: jnp.zeros(4)):
        super().__init__()
        self.w = brainstate.ParamState(0.3 * jnp.ones((3, 4)))
        self.gain = 1.0
        self.initial = initial

    def init_state(self, batch_size=None):
        RUNS.append(batch_size)
        start = self.initial(self)
        self.h = brainstate.HiddenState(jnp.broadcast_to(start, (batch_size, 4)))
        self.z = brainstate.ShortTermState(jnp.broadcast_to(0.0, (batch_size, 4)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        self.z.value = jnp.where(self.h.value > 1, 1.0, 0.0)  # of a weak type
        return self.z.value + self.h.value


def compiled(*initial, **options):
    return braintrace.compile(Started(*initial), "d_rtrl", X, batch_size=2, **options)


def single_steps(learner):
    """One step by each driver, from the start."""

    def step(x):
        return learner(x).sum()

    def descend(gradients):
        weight = learner.algorithm.model.w
        weight.value = weight.value - 0.1 * gradients["w",]

    def run():
        learner(X)
        learner.reset_state()
        learner.etrace_grad(X[None], step_fn=step, reset=EVERY_STEP)
        learner.etrace_grad(X[None], step_fn=step)
        learner.etrace_online(X[None], step_fn=step, update_fn=descend, reset=EVERY_STEP)
        learner.etrace_evolve(X[None], reset=EVERY_STEP)

    return run


TRACES = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: TRACES.append(event) if "trace" in event else None
)


@pytest.mark.core
def test_nothing_is_traced_or_initialised_again():
    """Neither for a state of a weak type at the start, nor for one that the step leaves."""
    learner = compiled(lambda model: jnp.full(4, 0.5))
    assert not is_weak(learner.states())
    run = single_steps(learner)
    run()
    TRACES.clear()
    RUNS.clear()
    run()
    assert TRACES == RUNS == []
    assert not is_weak(learner.states())


def start_of(learner):
    learner.reset_state()
    return np.asarray(learner.algorithm.model.h.value)


def test_values_follow_the_parameters_and_attributes_that_they_are_made_of():
    learner = compiled(lambda model: model.gain * model.w.value.sum(0))
    model = learner.algorithm.model
    for weight, gain in ((1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (4.0, 3.0)):
        model.w.value, model.gain = jnp.full((3, 4), weight), gain
        np.testing.assert_allclose(start_of(learner), 3 * weight * gain, rtol=1e-6)
        learner.predict(X[None], reset=EVERY_STEP)
        model.h.value = jnp.zeros((2, 4))


class Joined(Started):
    """Samples and units share an axis, so that no axis has the size of the batch."""

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros(batch_size * 4))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.5 * self.h.value + drive.reshape(-1)
        return self.h.value


def test_states_without_a_batch_axis_start_with_the_size_of_before():
    learner = braintrace.compile(Joined(), "d_rtrl", X, batch_size=2)
    xs, weight = jnp.ones((3, 2, 3)), learner.algorithm.model.w
    calls = {"step_fn": lambda x: learner(x).sum(), "update_fn": lambda gradients: None}
    for size in (None, 2):
        learner.reset_state(size)
        learner.reset_state()
        np.testing.assert_array_equal(learner.algorithm.model.h.value, jnp.zeros(8))
        losses = learner.etrace_online(xs, reset=np.array([False, True, True]), **calls)
        np.testing.assert_allclose(losses, np.full(3, (xs[0] @ weight.value).sum()), rtol=1e-6)


def test_values_follow_what_is_changed_inside_attributes():
    class Settings:
        def __init__(self):
            self.start, self.scale = {"by layer": [1.0]}, np.ones(4)

    model = Started(lambda m: m.settings.start["by layer"][0] * m.settings.scale * m.factors)
    model.settings, model.factors = Settings(), np.ones(4)
    learner = braintrace.compile(model, "d_rtrl", X, batch_size=2)
    np.testing.assert_array_equal(start_of(learner), 1.0)
    model.settings.start["by layer"][0] = 3.0
    np.testing.assert_array_equal(start_of(learner), 3.0)
    model.factors[:] = 2.0
    learner.predict(X[None], reset=EVERY_STEP)
    np.testing.assert_array_equal(start_of(learner), 6.0)
    model.settings.scale[1:] = 5.0
    np.testing.assert_array_equal(start_of(learner)[0], [6.0, 30.0, 30.0, 30.0])


def test_values_follow_the_environment():
    learner = compiled(lambda model: brainstate.environ.get("start", 1.0) * jnp.ones(4))
    for start in (2.0, 3.0, 2.0):
        with brainstate.environ.context(start=start):
            np.testing.assert_array_equal(start_of(learner), start)
    np.testing.assert_array_equal(start_of(learner), 1.0)


def test_a_random_state_may_make_its_key_when_a_step_first_reads_it():
    """A key that is made while the step is traced has another type than the next one."""

    class Noisy(Started):
        def __init__(self):
            super().__init__()
            self.generator = brainstate.random.RandomState()

        def update(self, x):
            return super().update(x) + self.generator.normal(size=4)

    learner = braintrace.compile(Noisy(), "d_rtrl", X, batch_size=2)
    first, second = (learner(0 * X) for _ in range(2))  # nothing but the numbers drawn
    assert not np.allclose(first, second)


def test_random_values_are_those_of_init_state():
    learner = compiled(lambda model: brainstate.random.rand(4))
    model = learner.algorithm.model
    start_of(learner)
    with brainstate.random.seed_context(5):
        found = [start_of(learner) for _ in range(3)]
    with brainstate.random.seed_context(5):
        for value in found:
            brainstate.nn.init_all_states(model, batch_size=2)
            np.testing.assert_allclose(value, model.h.value, rtol=1e-6)
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (lambda model: jnp.ones(4) * float(np.asarray(model.w.value).sum()), 12.0),  # no tracer
        (lambda model: jnp.full(4, len(RUNS), float), None),
    ],
)
def test_what_is_no_function_of_states_is_run_as_it_is(initial, expected):
    learner = compiled(initial)
    learner.algorithm.model.w.value = jnp.ones((3, 4))
    first, second = start_of(learner), start_of(learner)
    if expected is None:
        assert np.all(second > first)
    else:
        np.testing.assert_array_equal(second, expected)


def test_a_clone_starts_from_its_own_parameters():
    learner = compiled(lambda model: model.w.value.sum(0))
    start_of(learner)
    twin = brainstate.graph.clone(learner)
    twin.algorithm.model.w.value = jnp.ones((3, 4))
    np.testing.assert_array_equal(start_of(twin), 3.0)
    np.testing.assert_allclose(start_of(learner), 0.9, rtol=1e-6)

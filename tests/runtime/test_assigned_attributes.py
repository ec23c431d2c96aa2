"""Plain attributes that `init_state` assigns: a reset assigns them in the model."""

import functools
import types

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from gradient_paths import RUNS, sequence

import braintrace

XS = {size: 0.1 * np.arange(9.0 * size, dtype=np.float32).reshape(3, size, 3) for size in (2, 4)}


def by_number(model, size):
    model.scale = 1.0 / size


def by_array(model, size):
    model.scale = jnp.full(4, 1.0 / size)


def by_numpy(model, size):
    model.scale = np.full(4, 1.0 / size, np.float32)


def by_part(model, size):
    model.part.scale = model.scale = 1.0 / size


class Part(brainstate.nn.Module):
    scale = 1.0


class Model(brainstate.nn.Module):
    """A leaky cell whose outputs are scaled by a function of the batch size."""

    def __init__(self, assign=by_number):
        super().__init__()
        self.w = brainstate.ParamState(0.3 * np.ones((3, 4), np.float32))
        self.part, self.assign, self.starts = Part(), assign, 0

    def init_state(self, batch_size=None, shift=0.0):
        self.assign(self, batch_size)
        self.starts += 1
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)) + shift)
        self.states_of_mine = [self.h]

    def update(self, x):
        self.h.value = 0.5 * self.h.value + self.part.scale * braintrace.matmul(x, self.w.value)
        return self.scale * self.h.value


def expected(xs, in_part):
    """The gradient by backpropagation, without the library."""
    size = xs.shape[1]

    def loss(w):
        h, total = jnp.zeros((size, 4)), 0.0
        for x in xs:
            h = 0.5 * h + (1.0 / size if in_part else 1.0) * x @ w
            total = total + ((h / size) ** 2).sum()
        return total

    return {("w",): jax.grad(loss)(0.3 * jnp.ones((3, 4)))}


def learner_of(*options):
    return braintrace.compile(Model(*options), "d_rtrl", XS[2][0], batch_size=2)


@pytest.mark.parametrize("assign", [by_number, by_array, by_numpy, by_part])
def test_a_reset_with_another_batch_size_assigns_them(assign):
    learner = learner_of(assign)
    for size in (2, 4, 2):
        learner.reset_state(size)
        oracle = expected(XS[size], assign is by_part)
        assert_gradients_close(sequence(learner, XS[size]), oracle, 1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_each_path_has_them(run):
    learner = learner_of()
    learner.reset_state(4)
    assert_gradients_close(RUNS[run](learner, XS[4]), expected(XS[4], False), 1e-5)


def test_a_reset_with_options_assigns_them():
    learner = learner_of()
    learner.reset_state(4, shift=0.0)
    assert learner.algorithm.model.scale == 0.25


def test_a_value_that_the_user_has_replaced_is_assigned_again():
    learner = learner_of()
    learner.algorithm.model.scale = 7.0
    learner.reset_state()
    assert_gradients_close(sequence(learner, XS[2]), expected(XS[2], False), 1e-5)


def test_each_reset_runs_functions_of_what_they_have_left():
    learner = learner_of()
    model = learner.algorithm.model
    before = model.starts
    for _ in range(6):
        learner.reset_state()
    assert model.starts == before + 6


def test_states_are_not_among_them():
    learner = learner_of()
    model = learner.algorithm.model
    state = model.h
    learner.reset_state(4)
    assert model.h is state
    assert model.states_of_mine[0] is state


def test_a_reset_that_fails_leaves_the_model_as_it_was():
    learner = learner_of()
    model = learner.algorithm.model

    def fails(x):
        raise RuntimeError("no step")

    model.update = fails
    before = vars(model).copy()
    with pytest.raises(RuntimeError, match="no step"):
        learner.reset_state(4)
    assert vars(model) == before
    assert model.h.value.shape == (2, 4)


def test_a_compiled_function_cannot_change_what_the_step_reads():
    learner = learner_of()
    model = learner.algorithm.model
    model.assign = lambda model, size: setattr(model, "scale", 5.0)
    with pytest.raises(braintrace.OptionError, match=r"`init_state` of `Model` .* to 'scale'"):
        brainstate.transform.jit(learner.reset_state)()
    assert model.scale == 0.5


def refer(model, size):
    """Assign what refers to the model, or contains arrays out of sight."""
    model.gain, model.scale, array = 0.5, 1.0, jnp.full(4, 1.0)
    model.method, model.bound = model.update, functools.partial(scaled, model)
    model.function = lambda h: array * model.gain * h
    model.names = types.SimpleNamespace(part=model.part, array=array)


def scaled(model, h):
    return model.gain * h


class Referring(Model):
    def update(self, x):
        super().update(x)
        return self.scale * self.bound(self.function(self.h.value))


@pytest.mark.parametrize("around", [lambda reset: reset, brainstate.transform.jit])
def test_what_refers_to_the_model_is_no_copy_after_a_reset(around):
    learner = braintrace.compile(Referring(refer), "d_rtrl", XS[2][0], batch_size=2)
    model = learner.algorithm.model
    before = sequence(learner, XS[2])["w",]
    around(learner.reset_state)()
    np.testing.assert_allclose(sequence(learner, XS[2])["w",], before, rtol=1e-5)
    assert model.method.__self__ is model and model.bound.args[0] is model
    model.gain = 1.0
    learner.reset_state()
    assert model.gain == 0.5
    model.gain = 1.0
    np.testing.assert_allclose(sequence(learner, XS[2])["w",], 16 * before, rtol=1e-5)


def test_a_compiled_function_changes_what_the_step_does_not_read():
    learner = learner_of()
    starts = learner.algorithm.model.starts
    sequence(learner, XS[2])
    brainstate.transform.jit(learner.reset_state)()
    assert learner.algorithm.model.starts > starts
    assert_gradients_close(sequence(learner, XS[2]), expected(XS[2], False), 1e-5)


def test_a_reset_of_some_samples_leaves_them():
    learner = learner_of()
    learner.algorithm.model.scale = 7.0
    learner.reset_state(where=np.array([True, False]))
    assert learner.algorithm.model.scale == 7.0

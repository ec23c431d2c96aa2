"""Samples are known by the role of an axis: per-sample resets, and another batch size.

The oracle is `jax.grad` through the whole sequence, with resets written out.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close
from drivers import summed

import braintrace

F, STEPS = 2, 4


class Shared(brainstate.nn.Module):
    """A state for each sample, beside one that all samples share and add to."""

    sideways = False

    def __init__(self, units):
        super().__init__()
        values = np.random.default_rng(0).normal(size=(2, F, units)).astype(np.float32)
        self.w, self.v = (brainstate.ParamState(jax.device_put(x)) for x in values)
        self.units = units

    def init_state(self, batch_size=None):
        batch = () if batch_size is None else (batch_size,)
        shape = (self.units, *batch) if self.sideways else (*batch, self.units)
        self.h = brainstate.HiddenState(jnp.full(shape, 0.2))
        self.theta = brainstate.HiddenState(jnp.full(self.units, 0.5))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        common = braintrace.matmul(x, self.v.value)
        self.h.value = 0.5 * self.h.value + (drive.T if self.sideways else drive)
        self.theta.value = 0.9 * self.theta.value + (common.mean(0) if x.ndim > 1 else common)
        return (self.h.value.T if self.sideways else self.h.value) * self.theta.value


class Sideways(Shared):
    """The batch is the last axis of the state."""

    sideways = True


class Fixed(Shared):
    """The states of one batch are made in the constructor."""

    def __init__(self, units, batch=3):
        super().__init__(units)
        super().init_state(batch)

    def init_state(self, **_):
        pass


def data(batch):
    generator = np.random.default_rng(1)
    xs = generator.normal(size=(STEPS, batch, F)).astype(np.float32)
    flags = generator.random((STEPS, batch)) < 0.4
    flags[STEPS // 2] = True  # all samples at once: the shared state as well
    return xs, flags


def expected(model, xs, flags):
    def total(w, v):
        h, theta, total = jnp.full((xs.shape[1], w.shape[1]), 0.2), jnp.full(w.shape[1], 0.5), 0.0
        for x, new in zip(xs, flags, strict=True):
            h = 0.5 * jnp.where(new[:, None], 0.2, h) + x @ w
            theta = 0.9 * (0.5 if new.all() else theta) + (x @ v).mean(0)
            total = total + jnp.sum((h * theta) ** 2)
        return total

    gradients = jax.grad(total, argnums=(0, 1))(model.w.value, model.v.value)
    return dict(zip((("w",), ("v",)), gradients, strict=True))


def grad_of(learner, xs, **options):
    step_fn = lambda x: (learner(x) ** 2).sum()  # noqa: E731
    return learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options)


@pytest.mark.parametrize(("batch", "units"), [(3, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("model_of", [Shared, Sideways])
def test_shared_states_go_on_until_all_samples_are_reset(model_of, batch, units):
    xs, flags = data(batch)
    model = model_of(units)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=batch)
    found = grad_of(learner, xs, reset=flags, chunk_size=3)
    assert_gradients_close(found, expected(model, xs, flags), 2e-5)
    learner.reset_state()
    found = []
    for x, new in zip(xs, flags, strict=True):
        learner.reset_state(where=new)
        found.append(grad_of(learner, x[None]))
    assert_gradients_close(summed(found), expected(model, xs, flags), 2e-5)


def test_first_axes_of_the_given_size_are_batch_axes_if_nothing_follows_it():
    xs, flags = data(3)
    model = Fixed(4)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=3)
    found = grad_of(learner, xs, reset=flags)
    assert_gradients_close(found, expected(model, xs, flags), 2e-5)


def test_units_are_no_samples():
    xs = data(1)[0][:, 0]
    learner = braintrace.compile(Shared(3), "d_rtrl", xs[0])
    with pytest.raises(braintrace.ShapeError, match=r"no batch axis.*'h' of shape \(3,\)"):
        learner.reset_state(where=np.array([True, False, False]))


def test_an_axis_of_all_samples_and_units_is_refused_by_name():
    class Flat(Shared):
        def init_state(self, batch_size=None):
            super().init_state(batch_size)
            self.flat = brainstate.ShortTermState(jnp.zeros(batch_size * self.units))

        def update(self, x):
            self.flat.value = 0.5 * self.flat.value + self.h.value.ravel()
            return super().update(x)

    xs, flags = data(3)
    learner = braintrace.compile(Flat(4), "d_rtrl", xs[0], batch_size=3)
    with pytest.raises(braintrace.ShapeError, match=r"'flat' is unknown"):
        grad_of(learner, xs, reset=flags)


def test_rtrl_refuses_a_state_that_all_samples_share():
    xs, _ = data(3)
    with pytest.raises(braintrace.CompilationError, match=r"'theta' of shape \(3,\).* no axis"):
        braintrace.compile(Shared(3), "rtrl", xs[0], batch_size=3)


def test_what_is_not_finite_in_a_shared_state_resets_all_samples():
    xs, _ = data(3)
    model = Shared(3)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=3)
    xs[1, 0] = np.nan
    options = {"step_fn": lambda x: (learner(x) ** 2).sum(), "update_fn": lambda gradients: None}
    with pytest.warns(braintrace.NonFiniteWarning, match="All samples were reset"):
        learner.etrace_online(xs[:2], **options)
    fresh = [np.full((3, 3), 0.2, np.float32), np.full(3, 0.5, np.float32)]
    assert_states_close([model.h.value, model.theta.value], fresh)


@pytest.mark.parametrize("vmap", [False, True])
def test_a_batch_of_another_size_equals_a_learner_of_that_size(vmap):
    def compiled(batch):
        model = braintrace.nn.GRUCell(F, 5)
        example = jnp.ones((batch, F))
        with brainstate.random.seed_context(0):
            brainstate.nn.init_all_states(model)
        return braintrace.compile(model, "d_rtrl", example, batch_size=batch, vmap=vmap)

    xs, flags = data(3)
    learner, other = compiled(4), compiled(3)
    for path, state in learner.algorithm.param_states.items():
        state.value = other.algorithm.param_states[path].value
    learner.reset_state(3)
    found = [grad_of(own, xs, reset=flags) for own in (learner, other)]
    assert_gradients_close(*found, 1e-6)
    assert_states_close(learner.algorithm.traces.value, other.algorithm.traces.value)

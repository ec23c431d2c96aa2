"""What a stream does where a loss or a gradient is NaN or infinite.

`nonfinite="skip"` leaves the update out and resets the samples that were reached; `"raise"` and
`"ignore"` are on request. The first sentences are in ``tests/contract/test_contract.py``.
"""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learners import (
    ADAPTING,
    TARGETS,
    XS,
    assert_same,
    learner_of,
    squared_error,
    state_of,
    step_of,
    weights_of,
)
from random_models import BATCH, STEPS

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
OPTIMIZER = optax.sgd(0.01, momentum=0.9)


def warns(*found):
    return pytest.warns(braintrace.NonFiniteWarning, match=".*".join(found))


def learn(learner, xs=XS, targets=TARGETS, **options):
    options = {"step_fn": step_of(learner), "optimizer": OPTIMIZER, **options}
    return learner.etrace_online(xs, targets, **options)


def spoiled(*steps):
    """Inputs of which the first sample is NaN in some steps."""
    xs = XS.copy()
    xs[list(steps), 0] = np.nan
    return xs


def without_count(state):
    """A state but for the number of skipped updates."""
    return state.parameters, state.hidden, state.traces, state.optimizer


# --- skipped


@pytest.mark.core
@pytest.mark.parametrize("every", [1, 3])
def test_an_update_is_left_out_and_the_sample_starts_anew(every):
    """As if the block were masked, and the sample reset after it."""
    found, expected = (learner_of(ADAPTING, which=which) for which in range(2))
    with warns(f"step {0 if every == 3 else 2} ", "skipped: 1"):
        learn(found, spoiled(2), every=every)
    assert found.skipped_updates == 1
    assert "1" in str(found.report()).rpartition("kipped")[2]
    mask, reset = np.arange(STEPS) // every != 2 // every, np.zeros((STEPS, BATCH), bool)
    reset[3, 0] = True
    learn(expected, mask=mask, reset=reset, every=every)
    assert_same(without_count(state_of(found)), without_count(state_of(expected)))


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_without_weight_spoils_no_later_one(every):
    """A sample that it has spoiled starts anew after its block, in this call or in the next."""
    counts, reset = np.arange(STEPS) != 2, np.zeros((STEPS, BATCH), bool)
    reset[3, 0] = True
    expected = learner_of(ADAPTING, which=1)
    learn(expected, reset=reset, mask=counts, every=every)
    for parts in ([slice(None)], [slice(0, 3), slice(3, None)]):
        learner = learner_of(ADAPTING)
        for part in parts:
            learn(learner, spoiled(2)[part], TARGETS[part], mask=counts[part], every=every)
        assert learner.skipped_updates == 0
        assert_same(state_of(learner), state_of(expected))


def test_a_loss_that_is_not_finite_spoils_no_sample():
    found, expected = (learner_of(which=which) for which in range(2))
    targets = TARGETS.copy()
    targets[4] = np.inf
    with warns("step 3 ", "finite"):
        learn(found, XS, targets, every=3)
    assert found.skipped_updates == 1
    learn(expected, mask=np.arange(STEPS) < 3, every=3)
    assert_same(without_count(state_of(found)), without_count(state_of(expected)))


class RunningMaximum(brainstate.nn.Module):
    """A state beside the memory starts at minus infinity."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
        self.top = brainstate.ShortTermState(jnp.full((batch_size, 3), -jnp.inf))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        self.top.value = jnp.where(x[:, :1] > 3, self.h.value, self.top.value)
        return self.h.value


def test_a_state_that_starts_at_infinity_is_not_spoiled():
    xs = np.ones((4, 2, 2))
    xs[2, 0] = np.nan
    learner = braintrace.compile(RunningMaximum(), "d_rtrl", xs[0], batch_size=2)
    with warns("step 2 "):
        learner.etrace_online(
            xs, step_fn=lambda x: jnp.mean(learner(x) ** 2), optimizer=optax.sgd(0.0)
        )
    np.testing.assert_allclose(learner.module.h.value[:, 0], [2.0, 3.75])


class FilledGaps(RunningMaximum):
    """A state beside the memory has the last input, which may be NaN."""

    def init_state(self, batch_size):
        super().init_state(batch_size)
        self.last = brainstate.ShortTermState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        filled = jnp.where(jnp.isnan(x), self.last.value, x)
        self.last.value = x
        return super().update(jnp.nan_to_num(filled))


def test_a_nan_that_a_model_stores_itself_resets_nothing():
    xs = np.ones((4, 2, 2))
    xs[2, 0] = np.nan
    learner = braintrace.compile(FilledGaps(), "d_rtrl", xs[0], batch_size=2)
    learner.etrace_online(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2), optimizer=optax.sgd(0.0))
    np.testing.assert_allclose(learner.module.h.value, 3.75)


def test_a_single_gradient_is_looked_at_before_the_update_hides_it():
    learner = learner_of()

    def hide(gradients):
        gradients.update(jax.tree.map(jnp.nan_to_num, gradients))

    def step(nonfinite):
        options = {"optimizer": None, "update_fn": hide, "nonfinite": nonfinite}
        learn(learner, XS[:1], np.inf * TARGETS[:1], **options)

    with pytest.raises(braintrace.NonFiniteError):
        step("raise")
    with warns("step 0 "):
        step("skip")
        assert learner.skipped_updates == 1
    step("ignore")
    assert learner.skipped_updates == 1


def test_learners_that_are_mapped_skip_for_themselves():
    learner = learner_of()
    learner.init_optimizer(OPTIMIZER)
    pure = learner.functional()

    def run(xs):
        options = {"step_fn": step_of(learner), "optimizer": OPTIMIZER}
        return pure.online(pure.state(), xs, TARGETS, **options)

    state, losses = jax.vmap(run)(jnp.stack([XS, spoiled(2)]))
    np.testing.assert_array_equal(state.others["braintrace", "skipped_updates"], [0, 1])
    assert all(np.isfinite(leaf).all() for leaf in state.parameters.values())
    assert_same(losses[0], learn(learner))


def test_initial_states_are_drawn_for_a_skipped_update_alone():
    class Noisy(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones(3))

        def init_state(self, batch_size=None):
            self.h = brainstate.HiddenState(
                brainstate.random.normal(size=(batch_size, 3), dtype=float)
            )

        def update(self, x):
            self.h.value = jnp.tanh(0.5 * self.h.value + braintrace.element_wise(self.w.value) * x)
            return self.h.value

    brainstate.random.seed(0)
    model, xs = Noisy(), jnp.ones((4, BATCH, 3))
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH)
    options = {"step_fn": lambda x: jnp.sum(learner(x)), "optimizer": optax.sgd(0.1)}

    def key():
        return np.asarray(jax.random.key_data(brainstate.random.DEFAULT.value))

    before = key()
    learner.etrace_online(xs, **options)
    np.testing.assert_array_equal(key(), before)
    with warns("step 3 ", "fill them"):
        learner.etrace_online(xs.at[3, 1].set(jnp.nan), **options)
    assert np.any(key() != before)
    assert np.isfinite(model.w.value).all()
    assert np.unique(model.h.value[1]).size == 3


# --- raised


@pytest.mark.core
@pytest.mark.parametrize(("where", "every"), [("loss", 1), ("gradient", 3)])
def test_an_error_names_step_and_loss(where, every):
    """The learner is as it was."""
    learner = learner_of()
    learner.init_optimizer(OPTIMIZER)
    before = state_of(learner)

    @jax.custom_jvp
    def cut(h, scale):
        return h

    cut.defjvp(lambda primals, tangents: (primals[0], tangents[0] * primals[1]))

    def step_fn(x, target, scale):
        y = learner(x)
        return squared_error(cut(y, scale) if where == "gradient" else scale * y, target)

    scales = np.where(np.arange(STEPS) == 4, np.inf, 1.0)
    options = {"step_fn": step_fn, "optimizer": OPTIMIZER, "nonfinite": "raise", "every": every}
    with pytest.raises(braintrace.NonFiniteError) as caught:
        learner.etrace_online(XS, TARGETS, scales, **options)
    error = caught.value
    assert isinstance(error, FloatingPointError)
    assert error.step == (3 if where == "gradient" else 4)
    assert error.steps == every
    assert np.isfinite(error.loss) == (where == "gradient")
    assert f"{where} is not finite" in str(error) and str(error.step) in str(error)
    assert_same(state_of(learner), before, 0)


# --- when it is told


@pytest.mark.core
@pytest.mark.parametrize("every", [1, 2])
def test_a_call_warns_once(every):
    """A reset in the same step is no other warning."""
    learner, reset = learner_of(), np.arange(STEPS) == 4
    with warns("step 2 ") as caught:
        learn(learner, spoiled(2, 4), every=every, reset=reset)
    assert len(caught) == 1
    assert learner.skipped_updates == 2
    assert all(np.isfinite(leaf).all() for leaf in weights_of(learner).values())


def test_a_call_of_one_step_warns_at_the_latest_in_the_eighth_call_after_it():
    learner = learner_of()
    with warns("step 0 of a call"):
        for step in [0] + 8 * [1]:
            learn(learner, spoiled(0)[step : step + 1], TARGETS[step : step + 1])
    assert learner.skipped_updates == 1


def test_the_next_warning_follows_at_ten_times_as_many():
    learner, counts = learner_of(), []
    for bad in ([3], range(STEPS), [1, 2], [5]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", braintrace.NonFiniteWarning)
            learn(learner, spoiled(*bad))
        counts.append((learner.skipped_updates, len(caught)))
    assert counts == [(1, 1), (7, 0), (9, 0), (10, 1)]


@pytest.mark.parametrize("kind", ["jax", "brainstate"])
def test_updates_that_a_transformation_skips_are_counted(kind):
    learner = learner_of(which=kind)
    learner.init_optimizer(OPTIMIZER)
    if kind == "jax":
        pure = learner.functional()
        options = {"step_fn": step_of(learner), "optimizer": OPTIMIZER}
        run = jax.jit(lambda state: pure.online(state, spoiled(2), TARGETS, **options)[0])
        pure.restore(run(pure.state()))
    else:
        brainstate.transform.jit(lambda: learn(learner, spoiled(2)))()
    assert learner.skipped_updates == 1
    assert all(np.isfinite(leaf).all() for leaf in weights_of(learner).values())


def test_the_count_is_part_of_a_state():
    learner, other = (learner_of(which=which) for which in range(2))
    with warns("skipped: 1"):
        learn(learner, spoiled(2))
    other.init_optimizer(OPTIMIZER)
    other.functional().restore(learner.functional().state())
    assert other.skipped_updates == 1
    learn(other, spoiled(2))  # 2 is less than ten times as many
    assert other.skipped_updates == 2

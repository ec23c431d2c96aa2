"""Learning at every step of a stream, by `etrace_online`."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
import references
import saiunit as u
from assertions import assert_gradients_close, assert_gradients_differ, assert_states_close
from drivers import build_learner, named, snapshot, weights_of

import braintrace

RATE, ALPHA, LENGTH, BATCH = 0.3, 0.7, 6, 2
SOME = [
    catalogue.BY_NAME[name]
    for name in (
        "ALIFLateThreshold",
        "LSTMFused",
        "LeakyWithBypass",
        "IndRNN",
        "Synapse",
    )
]
METHODS = {"d_rtrl": {}, "es_d_rtrl": {"algorithm": "es_d_rtrl", "decay_or_rank": ALPHA}}
SNAP = {"algorithm": "snap"}
ORACLES = {"es_d_rtrl": {"alpha": ALPHA}, "snap": {"snap": True}}
each_method = pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)


def descent(learner, rate=RATE):
    """Plain gradient descent."""
    weights = weights_of(learner.algorithm.model)

    def update(gradients):
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - rate * g, weight.value, gradients[path])

    return update


def loss_of(case, learner):
    return lambda x, target: case.loss(learner(x), target)


def values(learner):
    found = weights_of(learner.algorithm.model)
    return named({path: state.value for path, state in found.items()})


def changes(after, before):
    return jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), after, dict(before))


def descend(case, learner, **options):
    """The losses of a whole sequence, in which the parameters descend."""
    functions = {"step_fn": loss_of(case, learner), "update_fn": descent(learner)}
    return learner.etrace_online(*case.sequences(BATCH, LENGTH), **functions, **options)


@pytest.mark.parametrize(
    ("options", "case"),
    [
        ({}, catalogue.BY_NAME["ALIFLateThreshold"]),
        ({}, catalogue.BY_NAME["LeakyWithBypass"]),
        ({}, catalogue.BY_NAME["IndRNN"]),
        ({"algorithm": "es_d_rtrl", "decay_or_rank": 0.7}, catalogue.BY_NAME["ALIFLateThreshold"]),
        ({"algorithm": "es_d_rtrl", "decay_or_rank": 0.7}, catalogue.BY_NAME["Synapse"]),
        ({"algorithm": "snap"}, catalogue.BY_NAME["LSTMFused"]),
    ],
)
@pytest.mark.core
def test_equals_the_dense_recursion_with_changing_parameters(case, options):
    learner = build_learner(case, **options)
    before = jax.device_get(values(learner))
    losses = descend(case, learner)
    oracle = ORACLES.get(options.get("algorithm"), {})
    expected, expected_losses = references.dense_online(case, rate=RATE, **oracle)
    found = changes(values(learner), before)
    assert_gradients_close(found, changes(expected, before), 1e-5, case.name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    at_fixed = references.dense_es_d_rtrl if "alpha" in oracle else references.dense_d_rtrl
    by_fixed = jax.tree.map(lambda gradient: -RATE * gradient, at_fixed(case, **oracle))
    assert_gradients_differ(found, by_fixed, 1e-3, case.name)


@pytest.mark.core
@catalogue.each(SOME[:2])
@each_method
def test_samples_are_reset_one_by_one(case, options):
    """A sample that starts anew learns as in a stream of its own."""
    flags = np.isin(np.arange(LENGTH)[:, None], [[3]]) & np.array([[True, False]])
    xs, targets = map(np.asarray, case.sequences(BATCH, LENGTH))

    learner = build_learner(case, batch=BATCH, **options)
    weights = weights_of(learner.algorithm.model)
    last = brainstate.State({path: state.value for path, state in weights.items()})

    def step_fn(x, target, sample):
        return jnp.sum((learner(x) - target)[sample] ** 2)

    def update_fn(gradients):
        last.value = gradients

    never = np.zeros_like(flags)

    def gradients(reset, steps, sample):
        """Gradients of the steps, at fixed parameters, of the loss of one sample."""
        kept = []
        learner.reset_state(BATCH)
        for t in steps:
            now = slice(t, t + 1)
            functions = {"step_fn": step_fn, "update_fn": update_fn}
            sequences = xs[now], targets[now], np.asarray([sample])
            learner.etrace_online(*sequences, **functions, reset=reset[now])
            kept.append(named(last.value))
        return kept

    after_reset = gradients(flags, range(LENGTH), 0)
    alone = gradients(never, range(3, LENGTH), 0)
    for found, expected in zip(after_reset[3:], alone, strict=True):
        assert_gradients_close(found, expected, 2e-5, case.name)
    other = gradients(flags, range(LENGTH), 1)
    undisturbed = gradients(never, range(LENGTH), 1)
    for found, expected in zip(other, undisturbed, strict=True):
        assert_gradients_close(found, expected, 2e-5, case.name)
    assert_gradients_differ(after_reset[-1], gradients(never, range(LENGTH), 0)[-1], 1e-3)


@catalogue.each([SOME[0], catalogue.BY_NAME["LearntLeak"]])
def test_an_optimizer_with_states_of_its_own(case):
    """Adam from optax, against the loop that users would write themselves."""
    adam = optax.adam(0.01)

    def updating(learner):
        weights = weights_of(learner.algorithm.model)
        moments = brainstate.State(adam.init({k: w.value for k, w in weights.items()}))

        def update(gradients, scale=1.0):
            steps, moments.value = adam.update(gradients, moments.value)
            for path, weight in weights.items():
                change = jax.tree.map(lambda leaf: scale * leaf, steps[path])
                weight.value = jax.tree.map(jnp.add, weight.value, change)

        return update

    learner, other = build_learner(case), build_learner(case)
    losses, scales = learner.etrace_online(
        *case.sequences(BATCH, LENGTH),
        step_fn=lambda x, target: (case.loss(learner(x), target), 3.0),
        update_fn=updating(learner),
        has_aux=True,
    )
    step_fn, update = loss_of(case, other), updating(other)
    weights = weights_of(other.algorithm.model)

    def by_hand(x, target):
        gradients, loss = brainstate.transform.grad(step_fn, weights, return_value=True)(x, target)
        update(gradients, 3.0)  # what the step function above gives besides its loss
        return loss

    expected = brainstate.transform.for_loop(by_hand, *case.sequences(BATCH, LENGTH))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(scales, np.full(LENGTH, 3.0))
    assert_states_close(snapshot(learner), snapshot(other))


def test_gradients_with_units():
    model = models.Conductance()
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    unit = u.mA**2
    found = []

    def update(gradients):
        found.append(u.get_unit(gradients[("w",)]))
        model.w.value = model.w.value - 0.01 * gradients[("w",)] * u.mS**2 / unit

    losses = learner.etrace_online(
        jnp.ones((5, 2, 3)),
        step_fn=lambda x: (learner(x) ** 2).mean(),
        update_fn=update,
        unit_aware=True,
    )
    assert u.get_unit(losses).has_same_dim(unit)
    assert found[0].has_same_dim(unit / u.mS)
    with pytest.raises(braintrace.OptionError, match="unit_aware=True"):
        learner.etrace_online(
            jnp.ones((5, 2, 3)), step_fn=lambda x: (learner(x) ** 2).mean(), update_fn=update
        )


@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "other"])
def test_states_that_change_their_kind_are_refused(is_weight):
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case)
    state = learner.algorithm.model.w_in if is_weight else brainstate.State(jnp.zeros((3, 4)))

    def update(gradients):
        state.value = state.value.astype(jnp.bfloat16)

    words = "w_in" if is_weight else "State"
    with pytest.raises(braintrace.OptionError, match=rf"'{words}'.*float32\[3, 4\].*bfloat16"):
        learner.etrace_online(
            *case.sequences(BATCH, 2), step_fn=loss_of(case, learner), update_fn=update
        )

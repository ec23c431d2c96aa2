"""Late labels and regressors of river, against loops over two learners and a model."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.streams import LateLabels

STEPS = 12
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, 1, 3)).astype(np.float32)
YS = RNG.normal(size=(STEPS, 1, 1)).astype(np.float32)
OPTIMIZER = optax.adam(1e-2)


def loss(output, y):
    return jnp.mean((output - y) ** 2)


def built():
    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(braintrace.nn.GRUCell(3, 5), brainstate.nn.Linear(5, 1))
    return braintrace.compile(model, "d_rtrl", jnp.asarray(XS[0]), batch_size=1)


def oracle(delay, is_missing, passed=lambda t: False):
    """Return outputs, losses and parameters: one learner learns, and another one runs ahead.

    With ``delay=0`` there is nothing to run ahead of.
    """
    learner, ahead = built(), built()
    outputs, losses = [], []
    for t in range(STEPS):
        for path, weight in ahead.param_states.items():
            weight.value = learner.param_states[path].value
        if not delay:
            for path, state in ahead.hidden_states.items():
                state.value = learner.hidden_states[path].value
        outputs.append(ahead.module.update(jnp.asarray(XS[t])))
        s = t - delay
        if s >= 0 and is_missing(s):
            learner.etrace_evolve(XS[s][None])
        elif s >= 0:
            step = XS[s][None], YS[s][None]
            found = learner.etrace_online(
                *step, step_fn=lambda x, y: loss(learner(x), y), optimizer=OPTIMIZER
            )
            losses.append(found[0])
    return outputs, losses, {p: w.value for p, w in learner.param_states.items()}


@pytest.mark.parametrize("delay", [0, 3])
def test_late_and_missing_labels(delay):
    learner, outputs, losses = built(), [], []
    stream = LateLabels(learner, loss, pending=delay + 1, optimizer=OPTIMIZER)
    for t in range(STEPS):
        outputs.append(stream.predict(XS[t]))
        if t >= delay and (t - delay) % 3:
            losses.append(stream.learn(YS[t - delay], delay=delay))
    expected = oracle(delay, lambda s: s % 3 == 0)
    found = outputs, losses, stream.state.parameters
    for own, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)
    learner.functional().restore(stream.state)
    assert learner.optimizer_state is not None


def test_labels_wait_for_at_most_so_many_forecasts():
    stream = LateLabels(built(), loss, pending=2, optimizer=OPTIMIZER)
    for x in XS[:5]:
        stream.predict(x)
    with pytest.raises(braintrace.OptionError, match="last 2 samples wait"):
        stream.learn(YS[0], delay=2)
    stream.learn(YS[3], delay=1)
    stream.learn(YS[4])
    with pytest.raises(braintrace.OptionError, match="last 0 samples wait"):
        stream.learn(YS[4])


def test_a_nan_costs_one_update():
    stream = LateLabels(built(), loss, pending=2, optimizer=OPTIMIZER)
    inputs = XS.copy()
    inputs[3] = np.nan
    outputs = []
    for t in range(STEPS):
        outputs.append(stream.predict(inputs[t]))
        if t:
            stream.learn(YS[t - 1], delay=1)
    is_finite = np.isfinite(np.ravel(outputs))
    assert not is_finite[3]
    assert is_finite[5:].all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stream.state.parameters))


def test_river():
    pytest.importorskip("river")
    from river import evaluate, metrics

    rows = [dict(zip("abc", map(float, x[0]), strict=True)) for x in XS]
    model = braintrace.river_regressor(built(), loss, optimizer=OPTIMIZER)
    pairs = [(row, float(y[0, 0])) for row, y in zip(rows, YS, strict=True)]
    found = evaluate.progressive_val_score(pairs, model, metrics.MSE()).get()
    outputs, _, _ = oracle(0, lambda s: False)
    np.testing.assert_allclose(found, np.mean((np.ravel(outputs) - np.ravel(YS)) ** 2), rtol=1e-5)
    with pytest.raises(braintrace.OptionError, match="share its learner"):
        model.clone()
    late = braintrace.river_regressor(built(), loss, pending=4, optimizer=OPTIMIZER)
    found = evaluate.progressive_val_score(pairs, late, metrics.MSE(), moment=None, delay=3)
    assert np.isfinite(found.get())

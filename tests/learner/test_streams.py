"""Live streams against a literal recursion; regressors of river."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

STEPS, RATE = 9, 0.1
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, 1, 3))
YS = RNG.normal(size=(STEPS, 1, 2))
W, U = RNG.normal(size=(3, 2)), RNG.normal(size=2)

pytestmark = pytest.mark.usefixtures("float64")


class Model(brainstate.nn.Module):
    """Independent units ``h = tanh(x W + u h)``."""

    def __init__(self):
        super().__init__()
        self.w, self.u = (
            brainstate.ParamState(jnp.asarray(W)),
            brainstate.ParamState(jnp.asarray(U)),
        )

    def init_state(self, batch_size=1):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        own = braintrace.element_wise(self.u.value) * self.h.value
        self.h.value = jnp.tanh(braintrace.matmul(x, self.w.value) + own)
        return self.h.value


def built():
    return braintrace.compile(Model(), "d_rtrl", jnp.asarray(XS[0]), batch_size=1)


def loss(output, y):
    return jnp.sum((output - y) ** 2)


class Literal:
    """One stream, by the recursions of a hidden state and of its derivatives by W and u."""

    def __init__(self):
        self.parameters = {("w",): W, ("u",): U}
        self.now = np.zeros(2), np.zeros((3, 2)), np.zeros(2)
        self.before, self.last = {}, None

    def step(self, t, before):
        (w, u), (h, of_w, of_u) = self.parameters.values(), before
        new = np.tanh(XS[t, 0] @ w + u * h)
        slope = 1 - new**2
        return new, slope * (XS[t, 0][:, None] + u * of_w), slope * (h + u * of_u)

    def predict(self, t):
        if self.last is not None:
            self.before[self.last], self.now = self.now, self.step(self.last, self.now)
        self.last = t
        return self.step(t, self.now)[0][None]

    def learn(self, t):
        after = self.step(t, self.now if t == self.last else self.before[t])
        new, *derivatives = after
        signal = 2 * (new - YS[t, 0])
        values = zip(self.parameters.items(), derivatives, strict=True)
        self.parameters = {k: value - RATE * signal * own for (k, value), own in values}
        if t == self.last:
            self.now, self.last = after, None
        return np.sum((new - YS[t, 0]) ** 2)


P, L = "predict", "learn"
ORDERS = {
    "at once": [(kind, t) for t in range(STEPS) for kind in (P, L)],
    "late": [(P, 0), (P, 1), *[e for t in range(2, STEPS) for e in ((P, t), (L, t - 2))]],
    "in any order": [(P, 0), (P, 1), (P, 2), (L, 1), (P, 3), (L, 3), (L, 0), (P, 4), (L, 2)],
    "some never": [(P, 0), (L, 0), (P, 1), (P, 2), (P, 3), (L, 3), (P, 4), (P, 5), (L, 5)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_labels_arrive(order):
    learner, literal = built(), Literal()
    stream = learner.live(lambda x, y: loss(learner(x), y), optax.sgd(RATE), pending=4)
    for kind, t in ORDERS[order]:
        if kind == P:
            found = stream.predict(XS[t], id=f"sample {t}")
        else:
            found = stream.learn(YS[t], id=f"sample {t}")
        np.testing.assert_allclose(found, getattr(literal, kind)(t), rtol=1e-10, err_msg=(kind, t))
    assert stream.dropped == 0
    before = {path: weight.value for path, weight in learner.param_states.items()}
    assert {path: value.tolist() for path, value in before.items()} == {
        ("w",): W.tolist(),
        ("u",): U.tolist(),
    }
    pure = learner.functional()
    pure.restore(stream.state)
    for path, value in literal.parameters.items():
        np.testing.assert_allclose(learner.param_states[path].value, value, rtol=1e-10)
    literal.predict(0)  # takes the step of the last sample
    np.testing.assert_allclose(learner.module.h.value[0], literal.now[0], rtol=1e-10)


def test_samples_are_numbered_and_dropped():
    learner = built()
    stream = learner.live(lambda x, y: loss(learner(x), y), optax.sgd(RATE), pending=2)
    for x in XS[:5]:
        stream.predict(x)
    assert (stream.waiting, stream.dropped) == ((3, 4), 3)
    with pytest.raises(braintrace.OptionError, match="Sample 2 does not wait"):
        stream.learn(YS[2], id=2)
    with pytest.raises(braintrace.OptionError, match="Sample 3 waits"):
        stream.predict(XS[5], id=3)
    stream.learn(YS[3])
    stream.learn(YS[4])
    with pytest.raises(braintrace.OptionError, match="does not wait"):
        stream.learn(YS[4])


@pytest.mark.parametrize("delay", [0, 1])
def test_a_nan_costs_one_update(delay):
    learner = built()
    stream = learner.live(lambda x, y: loss(learner(x), y), optax.sgd(RATE), pending=2)
    inputs = XS.copy()
    inputs[3] = np.nan
    outputs = []
    for t in range(STEPS):
        outputs.append(stream.predict(inputs[t]))
        if t >= delay:
            stream.learn(YS[t - delay])
    is_finite = np.isfinite(np.reshape(outputs, (STEPS, -1))).all(1)
    assert not is_finite[3]
    assert is_finite[[0, 1, 2, *range(4, STEPS)]].all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stream.state.parameters))


def test_river():
    pytest.importorskip("river")
    from river import evaluate, metrics

    model = brainstate.nn.Sequential(Model(), brainstate.nn.Linear(2, 1))
    learner = braintrace.compile(model, "d_rtrl", jnp.asarray(XS[0]), batch_size=1)
    other = braintrace.compile(model, "d_rtrl", jnp.asarray(XS[0]), batch_size=1)
    rows = [dict(zip("abc", map(float, x[0]), strict=True)) for x in XS]
    pairs = [(row, float(y[0, 0])) for row, y in zip(rows, YS, strict=True)]
    regressor = braintrace.river_regressor(learner, loss, optimizer=optax.sgd(RATE))
    found = evaluate.progressive_val_score(pairs, regressor, metrics.MSE()).get()
    late = braintrace.river_regressor(learner, loss, pending=4, optimizer=optax.sgd(RATE))
    of_late = evaluate.progressive_val_score(pairs, late, metrics.MSE(), moment=None, delay=3)
    assert np.isfinite(of_late.get())
    with pytest.raises(braintrace.OptionError, match="share its learner"):
        regressor.clone()
    losses = other.etrace_online(
        XS, YS[:, :, :1], step_fn=lambda x, y: loss(other(x), y), optimizer=optax.sgd(RATE)
    )
    np.testing.assert_allclose(found, losses.mean(), rtol=1e-5)

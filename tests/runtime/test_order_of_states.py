"""A change of the model may make it read its States in another order; they stay what they are."""

import functools

import brainstate
import compilation
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import calls_gradient, stream_gradient

import braintrace

BATCH = 2
XS = np.random.default_rng(0).normal(size=(3, BATCH, 3)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
DECAYS = {"fast": 0.2, "slow": 0.9}


class TwoStates(brainstate.nn.Module):
    """Leaky states of one shape, and weights; an attribute says in which order they are read."""

    def __init__(self):
        super().__init__()
        self.read_as_written()
        self.weights = {
            k: brainstate.ParamState(jnp.asarray(d * WEIGHT)) for k, d in DECAYS.items()
        }

    def read_as_written(self):
        self.order = ("fast", "slow")

    def init_state(self, batch_size=None):
        self.leaks = {k: brainstate.HiddenState(jnp.zeros((batch_size, 4))) for k in DECAYS}

    def update(self, x):
        weights = {name: self.weights[name].value for name in self.order}
        before = {name: self.leaks[name].value for name in self.order}
        for name, decay in DECAYS.items():
            drive = braintrace.matmul(x, weights[name])
            self.leaks[name].value = decay * before[name] + drive
        return self.leaks["fast"].value - self.leaks["slow"].value


class Coupled(TwoStates):
    """States that drive each other; an attribute also says in which order they are written."""

    def read_as_written(self):
        self.order = self.order_of_writes = ("fast", "slow")

    def update(self, x):
        before = {name: self.leaks[name].value for name in self.order}
        drives = {k: braintrace.matmul(x, w.value) for k, w in self.weights.items()}
        for name in self.order_of_writes:
            other = before["slow" if name == "fast" else "fast"]
            self.leaks[name].value = DECAYS[name] * before[name] + 0.3 * other + drives[name]
        return self.leaks["fast"].value - self.leaks["slow"].value


@compilation.cache
def compiled_once(model, rule):
    return braintrace.compile(model(), rule, XS[0], batch_size=BATCH)


def shared(model, rule):
    """Return a learner that rows share, at the start of a sequence in the first order."""
    learner = compiled_once(model, rule)
    learner.algorithm.model.read_as_written()
    learner.reset_state()
    return learner


@functools.lru_cache(maxsize=4)
def loss_of(learner):
    """One function for all calls, which are compiled once."""
    return lambda x: (learner(x) ** 2).sum()


def pure_step(learner, x):
    functional = learner.functional()
    state, output = functional.step(functional.state(), x)
    functional.restore(state)
    return output


def pure_gradient(learner, x):
    functional = learner.functional()
    state, found = functional.grad(functional.state(), x[None], step_fn=loss_of(learner))
    functional.restore(state)
    return found


RUNS = {
    "step": lambda learner, x: learner(x),
    "window": lambda learner, x: learner(braintrace.MultiStepData(x[None])),
    "pure step": pure_step,
    "own gradient": lambda learner, x: calls_gradient(
        learner.algorithm.model, loss_of(learner), x[None]
    ),
    "sequence": lambda learner, x: learner.etrace_grad(x[None], step_fn=loss_of(learner)),
    "stream": lambda learner, x: stream_gradient(learner, x[None], step_fn=loss_of(learner)),
    "pure gradient": pure_gradient,
    "evolve": lambda learner, x: learner.etrace_evolve(x[None]),
    "predict": lambda learner, x: learner.predict(x[None]),
}


@pytest.mark.core
@pytest.mark.parametrize("run", RUNS)
def test_each_state_stays_its_own(run):
    """From where the learner is, each call gives the same as without the change."""
    results = []
    for order in (("fast", "slow"), ("slow", "fast")):
        learner = shared(TwoStates, "d_rtrl")
        learner(XS[0])
        model = learner.algorithm.model
        model.order = order
        found = [by_name(RUNS[run](learner, x)) for x in XS[1:]]
        results.append([*found, by_name({k: s.value for k, s in model.leaks.items()})])
    for expected, found in zip(*results, strict=True):
        assert_gradients_close(found, expected, 1e-6)


ORDERS = ("order", "order_of_writes")


@pytest.mark.parametrize(
    ("rule", "changed", "run"),
    [
        ("d_rtrl", ORDERS, "own gradient"),
        ("d_rtrl", ORDERS, "pure gradient"),
        ("d_rtrl", ORDERS, "sequence"),
        ("d_rtrl", ORDERS, "stream"),
        ("rtrl", ORDERS[1:], "own gradient"),
        ("rtrl", ORDERS[1:], "sequence"),
    ],
)
def test_traces_stay_with_their_states(rule, changed, run):
    """The gradient is exact from where the learner is, as without the change."""
    results = []
    for order in (("fast", "slow"), ("slow", "fast")):
        learner = shared(Coupled, rule)
        RUNS[run](learner, XS[0])
        gradients = []
        for name in changed:
            setattr(learner.algorithm.model, name, order)
            gradients.append(by_name(RUNS[run](learner, XS[1])))
        results.append(gradients)
    for expected, found in zip(*results, strict=True):
        assert_gradients_close(found, expected, 1e-6)


@pytest.mark.parametrize(
    ("rule", "options", "run"),
    [
        ("rtrl", {}, "own gradient"),
        ("rtrl", {}, "pure gradient"),
        ("rtrl", {}, "stream"),
        ("snap", {"n": 2}, "sequence"),
        ("uoro", {}, "sequence"),
    ],
)
def test_traces_with_one_axis_for_all_states_refuse_another_order(rule, options, run):
    model = Coupled()
    learner = braintrace.compile(model, rule, XS[0], batch_size=BATCH, **options)
    expected = by_name(RUNS[run](learner, XS[0]))
    assert all(np.abs(leaf).max() > 0 for leaf in expected.values())
    model.order = ("slow", "fast")
    with pytest.raises(braintrace.NotCompiledError, match=r"needs other traces.*`order\[0\]`"):
        RUNS[run](learner, XS[1])


def test_a_checkpoint_of_traces_in_another_order_is_refused(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="the extra `checkpoint` is not installed")
    learners = []
    for order in (("fast", "slow"), ("slow", "fast")):
        model = Coupled()
        model.order = order
        learners.append(braintrace.compile(model, "rtrl", XS[0], batch_size=BATCH))
    learners[0](XS[0])
    braintrace.save(tmp_path / "saved", learners[0])
    with pytest.raises(braintrace.CheckpointError, match=r"`order of states` is .*fast.*slow"):
        braintrace.restore(tmp_path / "saved", learners[1])


def by_name(found):
    found = found if isinstance(found, dict) else {"output": found}
    return {str(name): np.asarray(value) for name, value in found.items()}

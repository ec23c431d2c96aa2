"""A change of the model may make it read its States in another order; they stay what they are."""

import brainstate
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
        self.order = ("fast", "slow")
        self.weights = {
            k: brainstate.ParamState(jnp.asarray(d * WEIGHT)) for k, d in DECAYS.items()
        }

    def init_state(self, batch_size=None):
        self.leaks = {k: brainstate.HiddenState(jnp.zeros((batch_size, 4))) for k in DECAYS}

    def update(self, x):
        weights = {name: self.weights[name].value for name in self.order}
        before = {name: self.leaks[name].value for name in self.order}
        for name, decay in DECAYS.items():
            drive = braintrace.matmul(x, weights[name])
            self.leaks[name].value = decay * before[name] + drive
        return self.leaks["fast"].value - self.leaks["slow"].value


def loss_of(learner):
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
    learners = [
        braintrace.compile(TwoStates(), "d_rtrl", XS[0], batch_size=BATCH) for _ in range(2)
    ]
    for learner in learners:
        learner(XS[0])
    learners[0].algorithm.model.order = ("slow", "fast")
    for x in XS[1:]:
        found, expected = (by_name(RUNS[run](learner, x)) for learner in learners)
        assert_gradients_close(found, expected, 1e-6)
    after = [learner.algorithm.model.leaks for learner in learners]
    assert_gradients_close(
        *(by_name({k: s.value for k, s in leaks.items()}) for leaks in after), 1e-6
    )


def by_name(found):
    found = found if isinstance(found, dict) else {"output": found}
    return {str(name): np.asarray(value) for name, value in found.items()}

"""One NumPy array for all samples of a stream: its contents at the call count.

JAX reads arrays after a call has returned, so these calls overwrite theirs at once.
"""

import brainstate
import jax
import numpy as np
import optax
import pytest

import braintrace

FEATURES = 400
XS = np.random.default_rng(0).normal(size=(20, 8, FEATURES)).astype(np.float32)
YS = XS[..., :16]
OPTIMIZER = optax.sgd(0.01)


def loss_fn(output, y):
    return ((output - y) ** 2).mean()


def sequences(method, **options):
    def run(learner):
        step_fn = lambda x, y: loss_fn(learner(x), y)  # noqa: E731
        return lambda x, y: getattr(learner, method)(x[None], y[None], step_fn=step_fn, **options)

    return run


def of_inputs(function):
    return lambda learner: lambda x, y: function(learner, x)


def late(learner):
    def run(x, y):
        learner.forecast(x)
        x[:] = 0.0
        return learner.learn(loss_fn, y, optimizer=OPTIMIZER)

    return run


def pure(learner):
    functional, state = learner.functional(), [learner.functional().state()]

    def run(x, y):
        state[0], output = functional.step(state[0], x)
        return output

    return run


CALLS = {
    "call": of_inputs(lambda learner, x: learner(x)),
    "several steps": of_inputs(lambda learner, x: learner(braintrace.MultiStepData(x[None]))),
    "gradient": sequences("etrace_grad"),
    "stream": sequences("etrace_online", optimizer=OPTIMIZER),
    "evolve": of_inputs(lambda learner, x: learner.etrace_evolve(x[None])),
    "predict": of_inputs(lambda learner, x: learner.predict(x[None])),
    "late label": late,
    "pure step": pure,
}


@pytest.mark.parametrize("call", CALLS)
def test_an_array_may_be_overwritten_after_a_call(call):
    found = []
    for is_reused in (False, True):
        brainstate.random.seed(0)
        model = braintrace.nn.IndRNN(FEATURES, 16)
        run = CALLS[call](braintrace.compile(model, "d_rtrl", XS[0], batch_size=8))
        x, y = np.empty_like(XS[0]), np.empty_like(YS[0])
        results = []
        for one, label in zip(XS, YS, strict=True):
            if is_reused:
                x[:], y[:] = one, label
            else:
                x, y = one.copy(), label.copy()
            results.append(run(x, y))
            if is_reused:
                x[:], y[:] = 0.0, 0.0
        found.append(jax.tree.map(np.asarray, results))
    jax.tree.map(np.testing.assert_array_equal, *found)

"""Learners of small random models, which tests share, and what they should give.

All in double precision: tests that use them take the fixture `float64`.
"""

import dataclasses
import functools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from random_models import BATCH, INPUTS, OUTPUTS, STEPS, Layer, RandomModel, model_of, named

import braintrace

LEAKY = RandomModel((Layer("bias", "none", "leak"),))
"""D-RTRL is exact for it."""

LSTM = RandomModel((Layer("joined", "matmul", "lstm"),))
ADAPTING = RandomModel((Layer("function", "matmul", "adapting"),), "late")
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS))
TARGETS = np.random.default_rng(1).normal(size=(STEPS, BATCH, OUTPUTS))


def squared_error(y, target):
    return jnp.sum((y - target) ** 2)


def quietly_compiled(model, rule, *example, **options):
    """`braintrace.compile`, whatever the rule leaves out of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        return braintrace.compile(model, rule, *example, **options)


@functools.cache
def _compiled(model, rule, which, form, options):
    learner = quietly_compiled(
        model_of(model, form), rule, XS[0], batch_size=BATCH, **dict(options)
    )
    return learner, jax.tree.map(jnp.copy, learner.functional().state())


def learner_of(model=LEAKY, rule="d_rtrl", which=0, form="module", **options):
    """A learner at its beginning; what has been compiled for it stays.

    which: its number, where a test has several that are alike.
    """
    learner, start = _compiled(model, rule, which, form, tuple(options.items()))
    brainstate.random.seed(0)
    learner.reset_state(BATCH)  # so traces are known to be zero
    now = learner.functional().state()
    if jax.tree.map(jnp.shape, now.traces) == jax.tree.map(jnp.shape, start.traces):
        now = dataclasses.replace(now, traces=start.traces)  # of random rules they go on
    now = dataclasses.replace(now, parameters=start.parameters, others=start.others, optimizer=None)
    learner.functional().restore(jax.tree.map(jnp.copy, now))
    learner.reset_state()
    return learner


def step_of(learner):
    return lambda x, target: squared_error(learner(x), target)


def gradient(learner, xs=XS, targets=TARGETS, **options):
    """The gradient of the summed loss by parameter."""
    options = {"step_fn": step_of(learner), "reduction": "sum", **options}
    return named(learner.etrace_grad(xs, targets, **options))


def expected_gradient(model=LEAKY, rule="d_rtrl", **options):
    def loss(t, y):
        return squared_error(y, jnp.asarray(TARGETS)[t])

    return oracle.gradient_by_rule(model, rule, model.params(), XS, loss, **options)


def loss_of_sample(t, y, sample):
    return squared_error(y, jnp.asarray(TARGETS)[t, sample])


def state_of(learner):
    """All that a learner knows."""
    return jax.device_get(learner.functional().state())


def weights_of(learner):
    return named({path: state.value for path, state in learner.param_states.items()})


def assert_same(found, expected, tolerance=1e-9):
    """Two pytrees agree, NaN with NaN; to the last bit with a tolerance of zero."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)

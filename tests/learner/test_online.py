"""`etrace_online`: every update is that of the gradient of its step, or of its block of steps."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from learners import (
    LSTM,
    TARGETS,
    XS,
    assert_same,
    learner_of,
    loss_of_sample,
    squared_error,
    state_of,
    step_of,
    weights_of,
)
from random_models import BATCH, STEPS, Layer, RandomModel

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
RATE = 0.05
LINEAR = RandomModel((Layer("bias", "none", "synapse"),), "late")


def online(learner, *sequences, **options):
    sequences = sequences or (XS, TARGETS)
    if "update_fn" not in options:
        options = {"optimizer": optax.sgd(RATE, momentum=0.5), **options}
    return learner.etrace_online(*sequences, **{"step_fn": step_of(learner), **options})


@pytest.mark.core
@pytest.mark.parametrize("model", [LINEAR, LSTM])
def test_a_stream_is_the_recursion_at_parameters_that_change(model):
    """For operations that are linear in their weights; of others the trace is of their outputs."""
    learner = learner_of(model)
    losses = online(learner, optimizer=optax.sgd(RATE))
    params, expected = oracle.descend(model, model.params(), XS, loss_of_sample, RATE)
    oracle.assert_close(weights_of(learner), params, 1e-9)
    assert_same(losses, expected)


def written_out(learner, every, mask, reset, targets, optimizer):
    """The same by gradients of blocks, each from where the last one ended."""
    state = optimizer.init(weights_of(learner))
    for start in range(0, STEPS, every):
        now = slice(start, start + every)
        if not mask[now].any():
            learner.etrace_evolve(XS[now], reset=reset[now])
            continue
        found = learner.etrace_grad(
            *(XS[now], targets[now]),
            step_fn=step_of(learner),
            mask=mask[now],
            reset=reset[now],
        )
        values = {path: weight.value for path, weight in learner.param_states.items()}
        named = {path[-1]: gradient for path, gradient in found.items()}
        changes, state = optimizer.update(named, state, weights_of(learner))
        for path, weight in learner.param_states.items():
            weight.value = values[path] + changes[path[-1]]


@pytest.mark.parametrize(
    ("every", "mask"),
    [
        (1, (1, 1, 0, 0.5, 1, 0)),
        (2, (0, 0, 2, 0.5, 0, 1)),
        (4, (1, 0, 0, 1, 0, 0)),
        (4, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_a_block_has_the_gradient_of_its_weighted_mean(every, mask):
    """Padding, NaN or not, changes neither parameters nor optimizer; samples may start anew."""
    mask, reset = np.array(mask, float), np.zeros((STEPS, BATCH), bool)
    reset[3, 1] = True
    targets = np.where(mask[:, None, None] == 0, np.nan, TARGETS)
    found, expected = (learner_of(LSTM, which=which) for which in range(2))
    losses = online(found, XS, targets, every=every, mask=mask, reset=reset)
    np.testing.assert_array_equal(losses == 0, mask == 0)
    written_out(expected, every, mask, reset, targets, optax.sgd(RATE, momentum=0.5))
    oracle.assert_close(weights_of(found), weights_of(expected), 1e-9)
    assert_same(state_of(found).traces, state_of(expected).traces)
    assert_same(state_of(found).hidden, state_of(expected).hidden)


@pytest.mark.parametrize("every", [1, 3])
def test_a_function_of_the_user_updates_where_the_mask_counts(every):
    learner, own = learner_of(), brainstate.State(jnp.zeros((), int))
    weights, seen = learner.param_states, []

    def update_fn(gradients, aux):
        seen.append(jax.tree.map(jnp.shape, aux))
        own.value = own.value + 1
        for path, gradient in gradients.items():
            weights[path].value = weights[path].value - RATE * gradient

    def step_fn(x, target):
        output = learner(x)
        return squared_error(output, target), {"output": output}

    mask = np.array([1, 0, 1, 0, 0, 0.0])
    options = {"every": every, "mask": mask}
    losses, aux = online(learner, step_fn=step_fn, update_fn=update_fn, has_aux=True, **options)
    assert own.value == (2 if every == 1 else 1)
    assert {*seen[0]} == {"output"}
    other = learner_of(which=1)
    assert_same(losses, online(other, optimizer=optax.sgd(RATE), **options))
    assert aux["output"].shape == TARGETS.shape
    oracle.assert_close(weights_of(learner), weights_of(other), 1e-9)


def zero(state):
    state.value = jax.tree.map(jnp.zeros_like, state.value)


FORBIDDEN = {
    "call the learner": lambda learner: learner(XS[0]),
    "write a hidden state": lambda learner: zero(learner.module.h0),
    "reset": lambda learner: learner.reset_state(),
    "reset a sample": lambda learner: learner.reset_state(where=np.ones(BATCH, bool)),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_an_update_function_may_read_and_not(name):
    learner = learner_of()
    before, seen = state_of(learner), []
    with pytest.raises((braintrace.OptionError, braintrace.ShapeError), match="update_fn"):
        online(learner, update_fn=lambda gradients: FORBIDDEN[name](learner))
    assert_same(state_of(learner), before, 0)
    online(learner, update_fn=lambda gradients: seen.append(learner.module.h0.value.shape))
    assert {*seen} == {learner.module.h0.value.shape}


def test_sequences_are_pytrees_of_any_arrays():
    found, expected = (learner_of(which=which) for which in range(2))

    def step_fn(both):
        return squared_error(found(both["x"]), both["y"])

    losses = online(found, {"x": jnp.asarray(XS), "y": TARGETS}, step_fn=step_fn)
    assert_same(losses, online(expected))
    assert isinstance(losses, jax.Array)

"""`predict`, `etrace_evolve`, and calls that show progress or write logs."""

import sys

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
)
from oracle import Plain
from random_models import BATCH, STEPS, model_of

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = RESET[4, 1] = True
MASK = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])


def outputs_in_plain_jax():
    states, found = ADAPTING.start(BATCH), []
    for x, flags in zip(XS, RESET, strict=True):
        start = ADAPTING.start(BATCH)
        states = {k: jnp.where(flags[:, None], start[k], v) for k, v in states.items()}
        states, y = ADAPTING.step(Plain(), ADAPTING.params(), states, x)
        found.append(y)
    return jnp.stack(found)


@pytest.mark.core
def test_outputs_are_those_of_the_model():
    learner, other = (learner_of(ADAPTING, which=which) for which in range(2))
    expected = outputs_in_plain_jax()
    assert_same(learner.etrace_evolve(XS, reset=RESET, chunk_size=4), expected)
    assert_same(other.predict(XS, reset=RESET), expected)
    assert_same(state_of(other).hidden, state_of(learner).hidden)
    learner.reset_state()
    assert learner.etrace_evolve(XS, reset=RESET, return_outputs=False) is None
    assert_same(state_of(learner).hidden, state_of(other).hidden)


def test_predict_is_the_model_run_alone():
    learner, model = learner_of(ADAPTING), model_of(ADAPTING)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    outputs = brainstate.transform.for_loop(model.update, jnp.asarray(XS))
    assert_same(learner.predict(XS), outputs)


def test_a_step_function_reads_the_states_of_a_prediction():
    learner, other = (learner_of(ADAPTING, which=which) for which in range(2))
    states = learner.hidden_states

    def probe(x):
        return {"output": learner(x), "states": {path: s.value for path, s in states.items()}}

    found = learner.predict(XS, step_fn=probe, reset=RESET)
    assert_same(found["output"], outputs_in_plain_jax())
    traces = state_of(learner).traces
    for t in range(STEPS):
        other.predict(XS[t : t + 1], reset=RESET[t : t + 1])
        for path, values in found["states"].items():
            assert_same(values[t], other.hidden_states[path].value)
    assert_same(state_of(other).traces, traces)
    with pytest.raises(braintrace.OptionError, match="0 times"):
        learner.predict(XS, step_fn=lambda x: x)


# --- progress and logs


def online(learner, **options):
    def step_fn(x, y):
        loss = squared_error(learner(x), y)
        return loss, {"twice": 2 * loss}

    options = {"step_fn": step_fn, "optimizer": optax.adam(0.01), "has_aux": True, **options}
    return learner.etrace_online(XS, TARGETS, **options)


def test_a_logged_call_does_what_it_does_without_logs(capsys):
    found, expected, told = learner_of(ADAPTING), learner_of(ADAPTING, which=1), []

    def on_log(step, metrics):
        told.append((step, metrics, state_of(found)))

    options = {"every": 3, "mask": MASK, "reset": np.arange(STEPS) == 4}
    result = online(found, progress=True, log_every=3, on_log=on_log, **options)
    compared = online(expected, **options)
    assert_same(result, compared)
    assert_same(state_of(found), state_of(expected))
    bar = capsys.readouterr().err
    assert "etrace_online" in bar and "6/6" in bar and "loss=" in bar
    assert [step for step, *_ in told] == [3, 6]
    assert_same(told[-1][2], state_of(expected))
    assert np.any(told[0][2].hidden["v0",] != told[1][2].hidden["v0",])
    for _, metrics, _ in told:
        assert metrics["steps_per_second"] > 0
    every = compared.losses, compared.aux["twice"]
    losses, aux = (leaf[3:][MASK[3:] > 0].mean() for leaf in every)
    assert_same([told[1][1]["loss"], told[1][1]["aux"]["twice"]], [losses, aux])


def test_errors_of_a_log_function_come_as_they_are():
    """What is done stays done; and it may use the learner."""
    learner = learner_of(ADAPTING)

    def on_log(step, metrics):
        learner.functional().state()
        if step == 4:
            raise KeyError(step)

    with pytest.raises(KeyError):
        online(learner, log_every=2, on_log=on_log)
    assert learner.optimizer_state[0].count == 4


def test_a_step_that_is_not_finite_is_counted_from_the_beginning_of_a_logged_call():
    learner, targets = learner_of(ADAPTING), TARGETS.copy()
    targets[3] = np.inf
    options = {"step_fn": lambda x, y: squared_error(learner(x), y), "optimizer": optax.adam(0.01)}
    for logs, done in (({}, 0), ({"log_every": 2, "on_log": lambda *_: None}, 2)):
        with pytest.raises(braintrace.NonFiniteError) as caught:
            learner.etrace_online(XS, targets, nonfinite="raise", **options, **logs)
        assert caught.value.step == 3
        state = learner.optimizer_state
        assert (0 if state is None else state[0].count) == done


def test_a_log_is_not_within_a_block():
    with pytest.raises(braintrace.OptionError, match="log_every"):
        online(learner_of(ADAPTING), every=3, log_every=4, on_log=print)


def test_without_tqdm_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="tqdm"):
        online(learner_of(ADAPTING), progress=True)


def test_a_call_is_compiled_once(compilations):
    learner = learner_of(ADAPTING)
    step_fn = lambda x, y: squared_error(learner(x), y)  # noqa: E731
    options = {"step_fn": step_fn, "optimizer": optax.sgd(0.01)}
    learner.etrace_online(XS, TARGETS, **options)
    learner.etrace_online(XS, TARGETS, **options)
    compilations.clear()
    jax.block_until_ready(learner.etrace_online(XS, TARGETS, **options))
    assert not compilations

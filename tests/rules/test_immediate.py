"""The immediate gradient is `jax.grad` of each step, and truncated BPTT that of each window."""

import brainstate
import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ, assert_states_close
from drivers import (
    build_algorithm,
    build_learner,
    learnt_online,
    named,
    sequence_gradient,
    snapshot,
    weights_of,
)
from no_past import NoPast
from single_steps import BATCH, LENGTH, plain_gradient, plain_steps

import braintrace

NAMES = (
    "learnt_leak",
    "alif_late_threshold",
    "lstm_fused",
    "two_layers",
    "gru",
    "layer_norm_rnn",
    "plain_input_rnn",
    "leaky_with_bypass",
)
MASK = np.float32([1, 0, 2, 0.5, 1, 0])
ALL_AT_3 = np.arange(LENGTH) == 3
SOME = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)


BY_RECORDS = ("lstm_fused", "two_layers", "alif_late_threshold")
"""Models of which a rule from outside the package learns all, by the records of a step."""


each_model = cases.each([cases.BY_NAME[name] for name in NAMES])
each_model_and_rule = pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(cases.BY_NAME[name], rule, id=f"{name}-{rule.names[0]}")
        for rule, names in {braintrace.Immediate: NAMES, NoPast: BY_RECORDS}.items()
        for name in names
    ],
)


@pytest.mark.by_day(
    "learnt_leak-immediate-batch axis-2 and 6",
    "alif_late_threshold-immediate-mapped-6 alone",
    "two_layers-immediate-mapped-1 and 4",
    "plain_input_rnn-immediate-batch axis-1 and 4",
)
@pytest.mark.parametrize(
    "some",
    [(1, 4), (2, LENGTH), (LENGTH,), (1, 2, 4, LENGTH)],
    ids=["1 and 4", "2 and 6", "6 alone", "all"],
)
@pytest.mark.parametrize("style", ["batch axis", "mapped"])
@each_model_and_rule
def test_the_gradient_of_a_sequence(case, rule, style, some):
    learner = build_learner(case, rule.names[0], style, BATCH)
    data = case.sequences(BATCH, LENGTH)
    runs = {1: {}, 4: {"mask": MASK}, LENGTH: {"reset": SOME}}
    if style == "batch axis":
        runs |= {2: {"reset": ALL_AT_3, "mask": MASK}}
    runs = {chunk: runs[chunk] for chunk in some if chunk in runs}
    for chunk_size, options in runs.items():
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, *data, chunk_size=chunk_size, **options)
        context = f"{case.name}, chunks of {chunk_size}, {list(options)}"
        assert_gradients_close(found, plain_gradient(case, **options), 1e-5, context)


@pytest.mark.by_day("layer_norm_rnn-immediate", "alif_late_threshold-no_past")
@each_model_and_rule
def test_learning_at_every_step_of_a_stream(case, rule):
    found, losses = learnt_online(build_learner(case, rule.names[0], batch=BATCH), case, 0.1, SOME)
    expected = list(plain_steps(case, 0.1, SOME))
    np.testing.assert_allclose(losses, [loss for loss, _, _ in expected], rtol=1e-5)
    assert_gradients_close(found, expected[-1][2], 1e-5, case.name)
    assert_gradients_differ(found, case.params(), 1e-3, case.name)


@pytest.mark.by_day("gru")
@each_model
def test_the_gradient_after_steps_without_a_loss(case):
    learner = build_learner(case, "immediate", batch=BATCH)
    xs, targets = case.sequences(BATCH, LENGTH)
    learner.etrace_evolve(xs[:4], chunk_size=3)
    found = sequence_gradient(learner, case, xs[4:], targets[4:])
    expected = plain_gradient(case, mask=np.arange(LENGTH) >= 4)
    assert_gradients_close(found, expected, 1e-5, case.name)


@pytest.mark.by_day("lstm_fused-immediate", "two_layers-no_past")
@each_model_and_rule
def test_single_steps_in_a_gradient_of_the_users_own(case, rule):
    model, algorithm = build_algorithm(case, rule, BATCH)
    gradient = brainstate.transform.jit(
        brainstate.transform.grad(
            lambda x, target: case.loss(algorithm(x), target), weights_of(model)
        )
    )
    steps = zip(*case.sequences(BATCH, LENGTH), plain_steps(case), strict=True)
    for x, target, (_, expected, _) in steps:
        assert_gradients_close(named(gradient(x, target)), expected, 1e-5, case.name)


def test_samples_start_anew_between_two_steps():
    case = cases.BY_NAME["alif_late_threshold"]
    learner = build_learner(case, "immediate", batch=BATCH)
    xs, targets = case.sequences(BATCH, LENGTH)
    flags = np.asarray([True, False])
    parts = [sequence_gradient(learner, case, xs[:2], targets[:2])]
    learner.reset_state(where=flags)
    parts.append(sequence_gradient(learner, case, xs[2:], targets[2:]))
    reset = np.where(np.arange(LENGTH)[:, None] == 2, flags, False)
    found = jax.tree.map(np.add, *parts)
    assert_gradients_close(found, plain_gradient(case, reset=reset), 1e-5)


def test_what_is_not_finite_before_a_reset_is_forgotten():
    case = cases.BY_NAME["lstm_fused"]
    learner = build_learner(case, "immediate", batch=BATCH)
    xs, targets = case.sequences(BATCH, LENGTH)
    padded = xs.at[:3].set(jnp.nan)
    options = {"reset": ALL_AT_3, "mask": np.float32(np.arange(LENGTH) >= 3)}
    expected = plain_gradient(case, **options)
    for chunk_size in (2, LENGTH):
        found = sequence_gradient(learner, case, padded, targets, chunk_size=chunk_size, **options)
        assert_gradients_close(found, expected, 1e-5, f"chunks of {chunk_size}")


# --- truncated backpropagation through time ------------------------------------------------------


def truncated(case, window):
    """`jax.grad` of each window, with the states before it held constant; their sum."""
    params, states, xs, targets = references.arguments(case, BATCH, LENGTH)
    total = jax.tree.map(np.zeros_like, params)
    for start in range(0, LENGTH, window):
        part = slice(start, start + window)
        gradient = oracles.bptt(case, params, states, xs[part], targets[part])
        total = jax.tree.map(np.add, total, gradient)
        for x in xs[part]:
            ops = oracles.PlainOps()
            case.step(ops, params, states, x)
            states = ops.hidden
    return total


@pytest.mark.by_day("plain_input_rnn")
@each_model
def test_every_window_is_differentiated_in_full(case):
    learner = build_learner(case, "immediate", batch=BATCH, window=1)
    data, exact = case.sequences(BATCH, LENGTH), references.bptt(case, BATCH, LENGTH)
    for window in (1, 4, LENGTH):
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, *data, window=window)
        with jax.enable_x64(True):
            expected = jax.device_get(truncated(case, window))
        assert_gradients_close(found, expected, 1e-5, f"{case.name}, windows of {window}")
        if window < LENGTH:
            assert_gradients_differ(found, exact, 1e-3, case.name)
    assert_gradients_close(found, exact, 1e-5, case.name)


def test_windows_of_a_users_own():
    case = cases.BY_NAME["leaky_rnn"]
    model, algorithm = build_algorithm(case, braintrace.Immediate, BATCH, window=3)
    xs, targets = case.sequences(BATCH, LENGTH)

    def window_loss(xs, targets):
        return jax.vmap(case.loss)(algorithm(braintrace.MultiStepData(xs)), targets).sum()

    gradient = brainstate.transform.grad(window_loss, weights_of(model))
    parts = [named(gradient(xs[s : s + 3], targets[s : s + 3])) for s in (0, 3)]
    with jax.enable_x64(True):
        expected = jax.device_get(truncated(case, 3))
    assert_gradients_close(jax.tree.map(np.add, *parts), expected, 1e-5)


# --- what it tells and keeps ---------------------------------------------------------------------


def test_it_reports_and_saves_no_trace():
    case = cases.BY_NAME["gru"]
    learner = build_learner(case, "immediate", batch=BATCH, strict=True)
    report = learner.report()
    assert report.stored_bytes == report.possible_bytes == report.carried_bytes == 0
    assert {d.kind for d in report.diagnostics} == {"no-trace", "no-hidden-state"}
    reasons = {row.parameter: row.reason for row in report.without_trace}
    assert reasons["w_z"] == "no-trace"
    assert reasons["w_out"] == "used by ordinary operations only"
    saved = snapshot(learner)
    assert saved[1] == {}
    with pytest.raises(braintrace.OptionError, match="'w_z', which has no trace"):
        learner.eligibility("w_z")
    learner.algorithm.traces.value = {}
    with pytest.raises(braintrace.ShapeError, match="'w' is unexpected"):
        learner.algorithm.traces.value = {"w": jnp.zeros(3)}
    assert_states_close(snapshot(learner), saved)


class Unmarked(brainstate.nn.Module):
    """No call of the library."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x @ self.w.value)
        return self.h.value


def test_marks_are_not_needed():
    xs = jnp.sin(jnp.arange(8.0)).reshape(4, 1, 2)
    learner = braintrace.compile(Unmarked(), "immediate", xs[0], batch_size=1)
    found = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")

    def total(w):
        h, value = jnp.zeros((1, 3)), 0.0
        for x in xs:
            h = jnp.tanh(0.5 * jax.lax.stop_gradient(h) + x @ w)
            value = value + h.sum()
        return value

    np.testing.assert_allclose(found[("w",)], jax.grad(total)(jnp.ones((2, 3))), rtol=1e-6)


def test_the_check_of_a_gradient():
    """Windows of it are what other gradients are held against."""
    case = cases.BY_NAME["leaky_rnn"]
    data = case.sequences(BATCH, LENGTH)
    check = braintrace.gradient_check(case.build(), "immediate", *data, case.loss, batch_size=BATCH)
    found, exact = plain_gradient(case), references.bptt(case, BATCH, LENGTH)
    for row in check.rows[:-1]:
        wanted, reference = found[row.parameter], exact[row.parameter]
        deviation = np.linalg.norm(wanted - reference) / np.linalg.norm(reference)
        np.testing.assert_allclose(row.deviation, deviation, atol=1e-5)


class Relaxing(brainstate.nn.Module):
    """A loop of unknown length follows the state, and perhaps the weight."""

    def __init__(self, of_weight):
        super().__init__()
        self.w, self.of_weight = brainstate.ParamState(jnp.ones((2, 3))), of_weight

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.ones((batch_size, 3)))

    def update(self, x):
        drive = x @ self.w.value
        start = self.h.value + drive if self.of_weight else self.h.value
        h = jax.lax.while_loop(lambda h: jnp.abs(h).max() > 1, lambda h: h / 2, start)
        self.h.value = h if self.of_weight else h + drive
        return self.h.value


def test_a_loop_of_unknown_length_behind_a_weight_is_refused_by_name():
    x = jnp.ones((1, 2))

    def compiled(of_weight, **options):
        return braintrace.compile(Relaxing(of_weight), "immediate", x, batch_size=1, **options)

    for options in ({"of_weight": True}, {"of_weight": False, "window": 2}):
        with pytest.raises(braintrace.CompilationError, match=r"`Immediate` .*`while`.*update"):
            compiled(**options)
    learner = compiled(of_weight=False)
    found = learner.etrace_grad(x[None], step_fn=lambda x: learner(x).sum(), reduction="sum")
    np.testing.assert_array_equal(found[("w",)], np.ones((2, 3)))

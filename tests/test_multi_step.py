"""`vjp_method='multi-step'`: BPTT inside a window, the traces for everything before it."""

import brainstate
import cases
import jax
import numpy as np
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ
from drivers import build_algorithm, catalogue_gradient, named, weights_of

import braintrace

SOME = [
    cases.BY_NAME[name]
    for name in ("leaky_rnn", "gru", "lstm_fused", "lif_recurrent", "two_layers_plain_link")
]


def windowed_gradient(case, window):
    """One gradient around calls with `MultiStepData`, one call per window."""
    model, algorithm = build_algorithm(case, vjp_method="multi-step")
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def window_loss(inputs, wanted):
        outputs = algorithm(braintrace.MultiStepData(inputs))
        return jax.vmap(case.loss)(outputs, wanted).sum()

    def total():
        windows = (part.reshape(-1, window, *part.shape[1:]) for part in (xs, targets))
        return brainstate.transform.for_loop(window_loss, *windows).sum()

    gradient = brainstate.transform.grad(total, weights_of(model))
    return named(brainstate.transform.jit(gradient)())


@pytest.mark.core
@cases.each(SOME[3:4], SOME[1:3])
def test_one_window_over_the_whole_sequence_is_bptt(case):
    actual = windowed_gradient(case, references.LENGTH)
    assert_gradients_close(actual, references.bptt(case), 1e-5, case.name)


@cases.each(SOME[1:])
def test_shorter_windows(case):
    actual = windowed_gradient(case, 2)
    expected = references.dense_multi_step(case, window=2)
    assert_gradients_close(actual, expected, 1e-5, case.name)
    assert_gradients_differ(actual, references.bptt(case), 1e-3, case.name)


@cases.each(SOME[-1:], SOME[-2:-1])
def test_chunk_of_etrace_grad_is_the_window(case):
    actual = catalogue_gradient(case, vjp_method="multi-step", chunk_size=4)
    expected = references.dense_multi_step(case, window=4)
    assert_gradients_close(actual, expected, 1e-5, case.name)


@cases.each(SOME[1:2], SOME[2:3])
def test_traces_of_es_d_rtrl_before_a_window(case):
    options = {"algorithm": "es_d_rtrl", "decay_or_rank": 0.7}
    actual = catalogue_gradient(case, vjp_method="multi-step", chunk_size=3, **options)
    expected = references.dense_multi_step(case, window=3, alpha=0.7)
    assert_gradients_close(actual, expected, 1e-5, case.name)
    assert_gradients_differ(actual, references.bptt(case), 1e-3, case.name)


def test_sequence_of_single_steps():
    """Without the option a `MultiStepData` is a loop of single steps."""
    case = cases.BY_NAME["leaky_rnn"]
    model, algorithm = build_algorithm(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def sequence_loss():
        outputs = algorithm(braintrace.MultiStepData(xs))
        return jax.vmap(case.loss)(outputs, targets).sum()

    gradient = brainstate.transform.grad(sequence_loss, weights_of(model))
    actual = named(brainstate.transform.jit(gradient)())
    assert_gradients_close(actual, references.dense_d_rtrl(case), 1e-5, case.name)


@pytest.mark.parametrize("algorithm", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_calls_with_one_step_are_windows_of_one_step(algorithm):
    case = cases.BY_NAME["leaky_rnn"]
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def gradient_of(wrap):
        model, instance = build_algorithm(case, algorithm, vjp_method="multi-step")

        def step_loss(x, target):
            return case.loss(wrap(instance, x), target)

        gradient = brainstate.transform.grad(step_loss, weights_of(model))
        gradient = brainstate.transform.jit(gradient)
        each = [named(gradient(x, target)) for x, target in zip(xs, targets, strict=True)]
        return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *each)

    windows = gradient_of(lambda instance, x: instance(braintrace.MultiStepData(x[None]))[0])
    assert_gradients_close(gradient_of(lambda instance, x: instance(x)), windows, 1e-5)
    if algorithm is braintrace.D_RTRL:
        assert_gradients_close(windows, references.dense_multi_step(case, window=1), 1e-5)

"""The oracles agree with each other where theory says so, and differ where it says so."""

import catalogue
import jax
import numpy as np
import oracles
import pytest
import references
from assertions import assert_gradients_close
from references import arguments

pytestmark = pytest.mark.usefixtures("float64")

SMOOTH = [case for case in catalogue.BASIC if not case.spiking]
SOME = [catalogue.BY_NAME[n] for n in ("PlainEncoder", "GRU", "LSTMFused", "TwoLayersPlainLink")]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.by_day(
    "Leaky",
    "LeakyWithMaskedWeight",
    "TiedPair",
    "LearntLeak",
    "Synapse",
    "TanhRNN",
    "PlainInputRNN",
    "PlainEncoder",
    "GRUResetAfter",
    "LSTMSeparate",
    "TwoLayersPlainLink",
)
@catalogue.each(SMOOTH)
def test_bptt_agrees_with_finite_differences(case):
    gradient = flat(references.bptt(case))
    entries = np.linspace(0, gradient.size - 1, 9).astype(int)
    differences = oracles.finite_differences(case, *arguments(case), entries)
    np.testing.assert_allclose(differences, gradient[entries], atol=1e-7 * np.abs(gradient).max())


@catalogue.each(SOME)
def test_window_over_everything_is_bptt(case):
    actual = references.dense_multi_step(case, window=6)
    assert_gradients_close(actual, references.bptt(case), 1e-12, case.name)


@catalogue.each([*SOME, catalogue.BY_NAME["ALIFLateThreshold"]])
def test_rtrl_is_bptt_on_every_recurrence(case):
    assert_gradients_close(references.dense_rtrl(case), references.bptt(case), 1e-12, case.name)


def test_rtrl_with_resets_and_masked_steps_is_bptt_of_parts():
    case = catalogue.BY_NAME["TwoLayers"]
    params, states, xs, targets = arguments(case)
    counts, resets = np.array([1, 1, 0, 0.5, 1, 2]), np.zeros((6, 2), bool)
    resets[[1, 3, 4], [1, 0, 0]] = True
    found = oracles.dense_rtrl(case, params, states, xs, targets, counts, resets)
    expected = jax.tree.map(np.zeros_like, params)
    for sample in range(2):
        of_sample = slice(sample, sample + 1)
        start = case.initial_states(1, np.float64)
        for steps in np.split(np.arange(6), np.flatnonzero(resets[:, sample])):
            # As long as all parts, by steps that do not count: a single program.
            padded = np.pad(steps, (0, 6 - len(steps)), mode="edge")
            weights = np.pad(counts[steps] / 2, (0, 6 - len(steps)))
            part = (np.asarray(data)[padded, of_sample] for data in (xs, targets))
            gradient = oracles.bptt(case, params, start, *part, weights)
            expected = jax.tree.map(np.add, expected, gradient)
    assert_gradients_close(found, expected, 1e-12, case.name)


def test_es_d_rtrl_in_closed_form():
    """h = 0.8 h + x w: D = 0.8 and Df = 1 everywhere, so both traces are geometric sums."""
    case, alpha, leak = catalogue.BY_NAME["Leaky"], 0.7, 0.8
    params, states, xs, targets = arguments(case)
    h, output_weight, expected = states["h"], params["w_out"], 0.0
    for t in range(1, len(xs) + 1):
        h = leak * h + xs[t - 1] @ params["w_in"]
        signal = 2 * (h @ output_weight - targets[t - 1]) / targets[0].size @ output_weight.T
        eps_x = sum(alpha ** (t - s) * xs[s - 1] for s in range(1, t + 1))
        eps_f = (1 - alpha) * sum((alpha * leak) ** k for k in range(t)) / (1 - alpha**t)
        expected = expected + eps_x.T @ (signal * eps_f)
    actual = references.dense_es_d_rtrl(case, alpha=alpha)["w_in"]
    np.testing.assert_allclose(actual, expected, rtol=1e-12)

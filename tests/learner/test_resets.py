"""Resets inside a sequence are the same as separate sequences."""

import catalogue
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ, assert_states_close
from drawn import drawn
from drivers import build_learner, named, sequence_gradient, shared_learner, snapshot, summed
from rules import OF_SOME_MODELS, OTHERS

LENGTH, BATCH = 8, 2
NAMES = ("IndRNN", "ALIFLateThreshold", "LSTMFused", "Rotation")
METHODS = [
    ("d_rtrl", "batch axis", {}),
    ("d_rtrl", "mapped", {}),
    ("es_d_rtrl", "batch axis", {"decay_or_rank": 0.8}),
    ("es_d_rtrl", "mapped", {"decay_or_rank": 0.8}),
    ("d_rtrl", "batch axis", {"window": 4}),
    *((rule.name, "batch axis", {}) for rule in OTHERS),
]
MODELS_AND_METHODS = pytest.mark.parametrize(
    ("case", "algorithm", "style", "options"),
    [
        pytest.param(catalogue.BY_NAME[name], *method, id="-".join([name, *map(str, method)]))
        for name in NAMES
        for method in METHODS
    ]
    + [
        pytest.param(
            catalogue.BY_NAME[rule.case], rule.name, "batch axis", {}, id=f"{rule.case}-{rule.name}"
        )
        for rule in OF_SOME_MODELS
    ],
)


def data(case):
    return tuple(map(np.asarray, case.sequences(BATCH, LENGTH)))


def flags(*steps):
    """Booleans (LENGTH,), true at the given steps."""
    return np.isin(np.arange(LENGTH), steps)


@pytest.mark.parametrize(
    ("case", "algorithm", "style", "options"),
    [
        (catalogue.BY_NAME["IndRNN"], "es_d_rtrl", "mapped", {"decay_or_rank": 0.8}),
        (catalogue.BY_NAME["ALIFLateThreshold"], "immediate", "batch axis", {}),
        (catalogue.BY_NAME["ALIFLateThreshold"], "snap", "batch axis", {}),
    ],
)
@pytest.mark.core
def test_one_flag_per_step_is_as_separate_sequences(case, algorithm, style, options):
    """In chunks of any length, and with steps of any weight.

    Separate sequences are learned in calls of one length, so that two programs serve for all.
    """
    learner = shared_learner(case, algorithm, style, BATCH, **options)
    xs, targets = data(case)
    starts, chunks = ([4], [4, LENGTH]) if "window" in options else ([2, 4, 6], range(1, 10))
    steps = starts[0]
    weights = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=LENGTH, max_size=LENGTH)

    @drawn(3, st.sets(st.sampled_from(starts), min_size=1), st.sampled_from(chunks), weights)
    def check(starts, chunk_size, mask):
        mask, bounds = np.float32([*mask[1:], 1]), {0, *starts}
        each = []
        for start in range(0, LENGTH, steps):
            if start in bounds:
                learner.reset_state()
            part = slice(start, start + steps)
            given = {"mask": mask[part], "chunk_size": steps}
            each.append(sequence_gradient(learner, case, xs[part], targets[part], **given))
        states = snapshot(learner)
        given = {"mask": mask, "reset": flags(*bounds), "chunk_size": chunk_size}
        found = sequence_gradient(learner, case, xs, targets, **given)
        assert_gradients_close(found, summed(each), 2e-5, case.name)
        assert_states_close(snapshot(learner), states, case.name)


@pytest.mark.parametrize(
    ("chunk_size", "case", "algorithm", "style", "options"),
    [
        (3, catalogue.BY_NAME["IndRNN"], "es_d_rtrl", "mapped", {"decay_or_rank": 0.8}),
        (3, catalogue.BY_NAME["ALIFLateThreshold"], "d_rtrl", "mapped", {}),
        (3, catalogue.BY_NAME["ALIFLateThreshold"], "immediate", "batch axis", {}),
        (3, catalogue.BY_NAME["ALIFLateThreshold"], "ottt", "batch axis", {}),
        (3, catalogue.BY_NAME["LSTMFused"], "d_rtrl", "batch axis", {"window": 4}),
    ],
)
def test_samples_are_reset_one_by_one(case, algorithm, style, options, chunk_size):
    learner = shared_learner(case, algorithm, style, BATCH, **options)
    xs, targets = data(case)
    per_sample = np.stack([flags(3), flags(0, 5)], axis=1)

    def step_loss(x, target, weight):
        return jnp.sum(weight[:, None] * (learner(x) - target) ** 2)

    def gradient(weights, reset):
        learner.reset_state()
        weights = np.broadcast_to(np.asarray(weights, np.float32), (LENGTH, BATCH))
        options = {"step_fn": step_loss, "reduction": "sum", "chunk_size": chunk_size}
        return named(learner.etrace_grad(xs, targets, weights, reset=reset, **options))

    def alike(column):
        return np.repeat(column[:, None], BATCH, axis=1)

    apart = [gradient(row, alike(per_sample[:, b])) for b, row in enumerate(np.eye(BATCH))]
    found = gradient(np.ones(BATCH), per_sample)
    assert_gradients_close(found, jax.tree.map(np.add, *apart), 2e-5, case.name)
    going_on = gradient(np.ones(BATCH), np.zeros_like(per_sample))
    assert_gradients_differ(found, going_on, 1e-3, case.name)


@catalogue.each([catalogue.BY_NAME["ALIF"]])
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_sequences_without_a_loss(case, algorithm):
    learner = build_learner(case, algorithm, batch=BATCH)
    xs, targets = data(case)
    per_sample = np.stack([flags(2), flags(0, 5)], axis=1)
    sequence_gradient(learner, case, xs, targets, reset=per_sample)
    expected = snapshot(learner)
    learner.reset_state()
    learner.etrace_evolve(xs, reset=per_sample, chunk_size=3)
    assert_states_close(snapshot(learner), expected)
    learner.reset_state()
    outputs = np.asarray(learner.predict(xs, reset=flags(4)))
    assert_states_close(outputs[4:], np.asarray(learner.predict(xs[4:], reset=flags(0)[:4])))
    learner.reset_state()
    assert_states_close(outputs[:4], np.asarray(learner.predict(xs[:4], reset=flags()[:4])))

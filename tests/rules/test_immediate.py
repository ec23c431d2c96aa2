"""The immediate gradient is `jax.grad` of each step, and truncated BPTT that of each window."""

import catalogue
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close
from drivers import (
    build_learner,
    sequence_gradient,
    snapshot,
)
from single_steps import BATCH, LENGTH, plain_gradient

import braintrace

MASK = np.float32([1, 0, 2, 0.5, 1, 0])
SOME = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)
RUNS = {1: {}, 4: {"mask": MASK}, LENGTH: {"reset": SOME}}


def test_masks_and_resets():
    """All models without these are in `test_catalogue`."""
    case = catalogue.BY_NAME["ALIFLateThreshold"]
    learner, data = build_learner(case, "immediate", "mapped", BATCH), case.sequences(BATCH, LENGTH)
    for chunk_size, options in RUNS.items():
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, *data, chunk_size=chunk_size, **options)
        assert_gradients_close(found, plain_gradient(case, **options), 1e-5, str(options))


def test_it_reports_and_saves_no_trace():
    case = catalogue.BY_NAME["GRU"]
    learner = build_learner(case, "immediate", batch=BATCH, strict=True)
    report = learner.report()
    assert report.stored_bytes == report.possible_bytes == report.carried_bytes == 0
    assert {d.kind for d in report.diagnostics} == {"no-trace"}
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

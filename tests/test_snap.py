"""SnAp-1 is what its definition says: D-RTRL with the diagonal of what goes through one product."""

import cases
import numpy as np
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ
from drivers import build_learner, catalogue_gradient, sequence_gradient

STYLES = ("batch axis", "mapped")
WITH_PRODUCTS = [
    c
    for c in cases.RECURRENT
    if c.name not in ("plain_encoder", "two_layers", "two_layers_plain_link")
]


@pytest.mark.core
@cases.each(cases.RECURRENT)
def test_the_literal_recursion(case):
    style = STYLES[cases.RECURRENT.index(case) % 2]
    found = catalogue_gradient(case, "snap", style)
    assert_gradients_close(found, references.dense_d_rtrl(case, snap=True), 1e-5, case.name)
    if case in WITH_PRODUCTS:
        assert_gradients_differ(found, references.dense_d_rtrl(case), 1e-3, case.name)


@pytest.mark.usefixtures("float64")
@cases.each([cases.BY_NAME["gru"], cases.BY_NAME["lstm_fused"]])
def test_chunks_of_all_lengths(case):
    learner = build_learner(case, "snap", dtype=np.float64)
    _, _, xs, targets = references.arguments(case)
    for chunk_size in (1, 4, 6):
        learner.reset_state(batch_size=2)
        found = sequence_gradient(learner, case, xs, targets, chunk_size=chunk_size)
        expected = references.dense_d_rtrl(case, snap=True)
        assert_gradients_close(found, expected, 1e-10, f"{case.name}, {chunk_size}")

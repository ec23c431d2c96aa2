"""Where every path from state to state is elementwise, D-RTRL equals BPTT."""

import catalogue
import jax
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from drivers import (
    build_learner,
    catalogue_gradient,
    sequence_gradient,
)


@pytest.mark.parametrize("case", [catalogue.BY_NAME["Rotation"], catalogue.BY_NAME["ALIF"]])
def test_a_sample_without_a_batch_axis_equals_bptt(case):
    found = catalogue_gradient(case, style="single")
    assert_gradients_close(found, references.bptt(case, None), 1e-5, case.name)


@pytest.mark.core
@pytest.mark.parametrize("case", [catalogue.BY_NAME["ALIF"]])
def test_traces_carry_on_from_call_to_call(case):
    learner = build_learner(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)
    first = sequence_gradient(learner, case, xs[:4], targets[:4])
    second = sequence_gradient(learner, case, xs[4:], targets[4:], chunk_size=3)
    found = jax.tree.map(np.add, first, second)
    assert_gradients_close(found, references.bptt(case), 1e-5, case.name)

"""Where every path from state to state is position by position, D-RTRL equals BPTT."""

import brainstate
import catalogue
import jax
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from drivers import (
    build_algorithm,
    build_learner,
    catalogue_gradient,
    named,
    sequence_gradient,
    weights_of,
)

TOLERANCE = {np.float32: 1e-5, np.float64: 1e-10}
ONE_STATE, TWO_STATES = catalogue.BY_NAME["IndRNN"], catalogue.BY_NAME["ALIF"]
FEW = [ONE_STATE, TWO_STATES, catalogue.BY_NAME["SynapseReadOut"], catalogue.BY_NAME["Rotation"]]


def check(actual, case, dtype=np.float32, **reference):
    expected = references.bptt(case, **reference)
    assert_gradients_close(actual, expected, TOLERANCE[dtype], case.name)


@pytest.mark.by_day("IndRNN", "SynapseReadOut", "ALIFLateThreshold")
@pytest.mark.usefixtures("float64")
@catalogue.each(catalogue.DIAGONAL)
def test_float64_in_several_chunks_and_a_remainder(case):
    check(catalogue_gradient(case, dtype=np.float64, chunk_size=4), case, np.float64)


@catalogue.each(
    [TWO_STATES, catalogue.BY_NAME["Rotation"]], [ONE_STATE, catalogue.BY_NAME["SynapseReadOut"]]
)
def test_a_sample_without_a_batch_axis_equals_bptt(case):
    check(catalogue_gradient(case, style="single"), case, batch=None)


@pytest.mark.core
@catalogue.each([TWO_STATES], [ONE_STATE, FEW[2]])
def test_traces_carry_on_from_call_to_call(case):
    learner = build_learner(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)
    first = sequence_gradient(learner, case, xs[:4], targets[:4])
    second = sequence_gradient(learner, case, xs[4:], targets[4:], chunk_size=3)
    check(jax.tree.map(np.add, first, second), case)


@catalogue.each([TWO_STATES], [ONE_STATE])
def test_one_gradient_around_a_loop_of_calls(case):
    model, algorithm = build_algorithm(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def sequence_loss():
        def step_loss(x, target):
            return case.loss(algorithm(x), target)

        return brainstate.transform.for_loop(step_loss, xs, targets).sum()

    check(named(brainstate.transform.grad(sequence_loss, weights_of(model))()), case)

"""OSTL of feed-forward networks is D-RTRL of each layer, and refuses recurrent products."""

import dataclasses

import oracle
import pytest
from paths import PATHS
from random_models import Layer, RandomModel
from test_gradients import Case, expected_of, learner_of, squared_error

import braintrace

FEEDFORWARD = RandomModel((Layer("bias", "gain", "adapting", "spike"), Layer("heads", cell="leak")))

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("path", ["by_chunks", "by_stream"])
def test_equals_its_definition(path):
    case = Case(FEEDFORWARD, "ostl_feedforward", path, mask="some", reset="each", chunk_size=4)
    found = PATHS[path](learner_of(case), case.request(), squared_error)
    oracle.assert_close(found, expected_of(dataclasses.replace(case, rule="d_rtrl")), 1e-9)


@pytest.mark.parametrize("layer", [Layer("joined", "matmul"), Layer("shared", cell="lstm")])
@pytest.mark.parametrize("marks", ["marked", "auto"])
def test_refuses_recurrence_through_a_product(layer, marks):
    case = Case(RandomModel((layer,)), "ostl_feedforward", marks=marks)
    with pytest.raises(braintrace.CompilationError, match="OSTLFeedforward"):
        learner_of(case)

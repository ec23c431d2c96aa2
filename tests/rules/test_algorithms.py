"""Algorithms by name and by class, and a learner of one that is compiled."""

import brainstate
import catalogue
import pytest
from assertions import assert_same_bits
from drivers import build_algorithm, build_learner, sequence_gradient

import braintrace


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("D_RTRL", "D_RTRL"),
        ("Es_D_Rtrl", "ES_D_RTRL"),
        ("ESD_RTRL", "ES_D_RTRL"),
        ("PP_prop", "ES_D_RTRL"),
    ],
)
def test_case_does_not_matter(name, algorithm):
    learner = build_learner(catalogue.BY_NAME["Leaky"], name)
    assert type(learner.algorithm) is getattr(braintrace, algorithm)


def test_a_subclass_has_names_of_its_own():
    class Slower(braintrace.D_RTRL):
        """The same, by no name."""

    assert type(build_learner(catalogue.BY_NAME["Leaky"], "D_RTRL").algorithm) is braintrace.D_RTRL
    assert type(build_learner(catalogue.BY_NAME["Leaky"], Slower).algorithm) is Slower


def test_a_learner_of_an_algorithm_that_somebody_has_compiled():
    case = catalogue.BY_NAME["Leaky"]
    model, algorithm = build_algorithm(case)
    learners = braintrace.Learner(algorithm), build_learner(case)
    sequences = case.sequences(2, 3)
    found, expected = (sequence_gradient(learner, case, *sequences) for learner in learners)
    assert_same_bits(found, expected)
    assert learners[0].is_compiled and not braintrace.Learner(braintrace.D_RTRL(model)).is_compiled
    assert algorithm.param_states == dict(model.states(brainstate.ParamState))
    assert algorithm.hidden_states == dict(model.states(brainstate.HiddenState))
    assert {*algorithm.graph.hidden_paths} == {*algorithm.hidden_states}

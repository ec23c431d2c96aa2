"""Algorithms by name and by class, and a learner of one that is compiled."""

import jax.numpy as jnp
import numpy as np
import pytest
from catalogue_cells import Leaky
from catalogue_models import BATCH, INPUTS

import braintrace

X = jnp.ones((BATCH, INPUTS))


def build_learner(algorithm):
    options = {"decay_or_rank": 0.9} if "d_rtrl" not in str(algorithm).lower()[:6] else {}
    return braintrace.compile(Leaky(), algorithm, X, batch_size=BATCH, **options)


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
    assert type(build_learner(name).algorithm) is getattr(braintrace, algorithm)


def test_a_subclass_has_names_of_its_own():
    class Slower(braintrace.D_RTRL):
        """The same, by no name."""

    assert type(build_learner("D_RTRL").algorithm) is braintrace.D_RTRL
    learner = braintrace.compile(Leaky(), Slower, X, batch_size=BATCH)
    assert type(learner.algorithm) is Slower


def test_a_learner_of_a_compiled_algorithm_gives_the_same_outputs():
    model = Leaky()
    model.init_state(BATCH)
    algorithm = braintrace.D_RTRL(model)
    algorithm.compile_graph(X)
    np.testing.assert_array_equal(braintrace.Learner(algorithm)(X), build_learner("D_RTRL")(X))

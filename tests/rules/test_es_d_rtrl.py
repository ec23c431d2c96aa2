"""ES-D-RTRL and OTTT equal the recursions of their papers, on every path."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_gradients
from paths import PATHS
from random_models import Layer, RandomModel
from test_gradients import TARGETS, Case, learner_of, squared_error

import braintrace

ALPHA = 0.7
OPTIONS = {"es_d_rtrl": {"decay_or_rank": ALPHA}, "ottt": {"decay": ALPHA}}
LSTM = RandomModel((Layer("joined", "matmul", "lstm"),))
SPIKING = RandomModel((Layer("bias", "gain", "adapting", "spike"),), "late")
STACK = RandomModel(
    (Layer("conv", "masked", "gru"), Layer("shared", "none", "synapse", "sine")), "bypass"
)
LOW_RANK = RandomModel((Layer("low rank", "matmul", "plain"),))
LOOKED_UP = RandomModel((Layer("embedding", "shared gain", "leak", "softplus"),))
DOUBLED = RandomModel((Layer("doubled", "gain", "branches"),))
CASES = [
    Case(LSTM, "es_d_rtrl", "by_chunks", mask="some", reset="each", chunk_size=4),
    Case(SPIKING, "es_d_rtrl", "by_stream", reset="one sample"),
    Case(STACK, "es_d_rtrl", "by_two_calls", reset="each", chunk_size=2),
    Case(LOW_RANK, "es_d_rtrl", "by_mapped_learners", mask="some", form="function", vmap=True),
    Case(LOOKED_UP, "es_d_rtrl", "by_own_gradient", reset="all"),
    Case(DOUBLED, "es_d_rtrl", "by_another_start", mask="some", nan=True, chunk_size=4),
    Case(LSTM, "ottt", "by_own_gradient", mask="some", reset="each"),
    Case(SPIKING, "ottt", "by_chunks", mask="some", reset="each", chunk_size=2),
    Case(STACK, "ottt", "by_pure_function", mask="end", reset="each", vmap=True),
    Case(LOOKED_UP, "ottt", "by_stream"),
]

pytestmark = pytest.mark.usefixtures("float64")


def loss(t, y, sample):
    return squared_error(y, jnp.asarray(TARGETS)[t, sample])


def literal(case):
    asked, recursion = case.request(), getattr(oracle, case.rule)
    xs = np.nan_to_num(asked.xs)
    return recursion(case.model, case.model.params(), xs, loss, ALPHA, asked.mask, asked.reset)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.path}")
def test_the_gradient_is_that_of_the_recursion(case):
    learner = learner_of(case, **OPTIONS[case.rule])
    found = PATHS[case.path](learner, case.request(), squared_error)
    oracle.assert_close(found, literal(case), 1e-9, str(case))


def test_a_window_is_exact_and_goes_on_from_the_traces():
    case = Case(SPIKING, "es_d_rtrl", window=test_gradients.STEPS)
    found = PATHS[case.path](learner_of(case), case.request(), squared_error)
    bptt = test_gradients.expected_of(dataclasses.replace(case, rule="rtrl", window=None))
    oracle.assert_close(found, bptt, 1e-9)


def test_a_rank_is_a_decay():
    """r factors are a decay of (r - 1) / (r + 1)."""
    case, found = Case(SPIKING, "es_d_rtrl"), []
    for given in (4, 0.6):
        learner = learner_of(case, decay_or_rank=given)
        found.append(PATHS[case.path](learner, case.request(), squared_error))
    oracle.assert_close(*found, 1e-12)


def test_names_and_the_decay_that_has_no_default():
    assert issubclass(braintrace.ES_D_RTRL, braintrace.ETraceAlgorithm)
    assert braintrace.pp_prop is braintrace.IODimVjpAlgorithm is braintrace.ES_D_RTRL
    with pytest.raises(TypeError, match="decay"):
        learner_of(Case(SPIKING, "ottt"))

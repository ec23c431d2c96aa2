"""On recurrent models the algorithms equal their dense oracles, and are not BPTT."""

import cases
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ
from drivers import catalogue_gradient

SOME_DIAGONAL = (
    *("leaky_pair_with_tied_weight", "independent_rnn", "learnt_leak", "rotation", "lif"),
)
ALPHA = 0.7
ES_OPTIONS = {"algorithm": "es_d_rtrl", "decay_or_rank": ALPHA}


def check(actual, expected, case, tolerance=1e-5):
    assert_gradients_close(actual, expected, tolerance, case.name)
    assert_gradients_differ(actual, references.bptt(case), 1e-3, case.name)


@pytest.mark.by_day("lif_recurrent", "two_layers_plain_link")
@pytest.mark.core
@cases.each(cases.RECURRENT)
def test_d_rtrl(case):
    check(catalogue_gradient(case), references.dense_d_rtrl(case), case)


@pytest.mark.by_day("plain_encoder", "lstm_separate")
@pytest.mark.core
@cases.each([*cases.RECURRENT, *(cases.BY_NAME[name] for name in SOME_DIAGONAL)])
def test_es_d_rtrl(case):
    expected = references.dense_es_d_rtrl(case, alpha=ALPHA)
    check(catalogue_gradient(case, **ES_OPTIONS), expected, case)


@pytest.mark.parametrize(("rank", "alpha"), [(1, 0.0), (3, 0.5), (0.5, 0.5)])
def test_rank_of_es_d_rtrl(rank, alpha):
    case = cases.BY_NAME["leaky_rnn"]
    actual = catalogue_gradient(case, algorithm="pp_prop", decay_or_rank=rank)
    check(actual, references.dense_es_d_rtrl(case, alpha=alpha), case)

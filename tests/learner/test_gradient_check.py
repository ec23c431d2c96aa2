"""What the gradient check says about an algorithm, against numbers found without it."""

import functools
import json

import catalogue
import drivers
import numpy as np
import pytest
import references
from models import Noisy

import braintrace

DIAGONAL, RECURRENT = catalogue.BY_NAME["ALIF"], catalogue.BY_NAME["LeakyRNN"]


@functools.cache
def checked(case, algorithm, length=6, **options):
    xs, targets = case.sequences(2, length)
    with drivers.expected_warnings(case, algorithm):
        return braintrace.gradient_check(
            case.build(), algorithm, xs, targets, case.loss, batch_size=2, **options
        )


def rows(check):
    return {row.parameter: row for row in check.rows}


def test_d_rtrl_is_exact_for_a_diagonal_model():
    assert max(row.deviation for row in checked(DIAGONAL, "d_rtrl").rows) < 1e-5


@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_deviation_and_cosine_are_those_of_the_oracles(algorithm):
    options = {"decay_or_rank": 0.7} if algorithm == "es_d_rtrl" else {}
    oracle = references.dense_es_d_rtrl if options else references.dense_d_rtrl
    wanted = oracle(RECURRENT, **({"alpha": 0.7} if options else {}))
    exact = references.bptt(RECURRENT)
    found = rows(checked(RECURRENT, algorithm, **options))
    assert found["w_rec"].deviation > 1e-3
    for name in ("w_in", "w_rec", "bias", "w_out"):
        online, bptt = np.ravel(wanted[name]), np.ravel(exact[name])
        cosine = online @ bptt / np.linalg.norm(online) / np.linalg.norm(bptt)
        deviation = np.linalg.norm(online - bptt) / np.linalg.norm(bptt)
        np.testing.assert_allclose(found[name].cosine, cosine, atol=1e-5)
        np.testing.assert_allclose(found[name].deviation, deviation, atol=1e-5)


def test_the_last_row_is_all_parameters_together():
    *single, together = checked(RECURRENT, "d_rtrl").rows
    assert together.parameter == "all parameters"
    np.testing.assert_allclose(together.norm**2, sum(row.norm**2 for row in single), rtol=1e-5)


def test_mapped_models_and_noise_are_compared_on_the_same_random_numbers():
    xs, ys = RECURRENT.sequences(2, 6)
    check = braintrace.gradient_check(
        Noisy(),
        braintrace.D_RTRL,
        xs,
        ys,
        lambda h, y: ((h.sum(-1) - y.sum(-1)) ** 2).mean(),
        vmap=True,
    )
    assert rows(check)["w"].deviation < 1e-5
    assert rows(check)["w"].norm > 0


def test_printed_and_as_data():
    check = checked(RECURRENT, "d_rtrl")
    for row in check.rows:
        assert row.parameter in str(check)
    data = json.loads(json.dumps(check.to_dict()))
    assert data["algorithm"] == "D_RTRL"
    assert data["steps"] == 6
    assert data["rows"][0] == {
        "parameter": check.rows[0].parameter,
        "deviation": check.rows[0].deviation,
        "cosine": check.rows[0].cosine,
        "norm": check.rows[0].norm,
        "bptt_norm": check.rows[0].bptt_norm,
    }


def test_a_loss_without_gradient_is_refused():
    xs, targets = DIAGONAL.sequences(2, 3)
    with pytest.raises(braintrace.OptionError, match="all zero"):
        braintrace.gradient_check(
            DIAGONAL.build(), "d_rtrl", xs, targets, lambda out, y: 0.0 * out.sum(), batch_size=2
        )

"""Several rules in one model: the gradient of each weight is that of its rule alone."""

import dataclasses

import numpy as np
import oracle
import pytest
from own_rules import Decaying
from paths import PATHS
from random_models import Layer, RandomModel
from test_gradients import Case, learner_of, squared_error

import braintrace

ES, OTTT = ("es_d_rtrl", {"decay_or_rank": 0.7}), ("ottt", {"decay": 0.7})
STACK = RandomModel((Layer("bias", "gain", "adapting"), Layer("heads", "masked", "lstm")), "late")
CASES = {
    "by name": ({"w0": ES}, Case(STACK, reset="each")),
    "by a filter": (
        {"w1": OTTT, ("r1",): "immediate", lambda path: path == ("g0",): ES},
        Case(STACK, path="by_stream", vmap=True),
    ),
    "of one's own": (
        {"w0": (Decaying(0.6), {})},
        Case(STACK, path="by_own_gradient", reset="one sample"),
    ),
}

pytestmark = pytest.mark.usefixtures("float64")


def gradient(case, **options):
    return PATHS[case.path](learner_of(case, **options), case.request(), squared_error)


@pytest.mark.parametrize("name", CASES)
def test_each_weight_has_the_gradient_of_its_rule(name):
    rules, case = CASES[name]
    given = {k: r[0] if isinstance(r, tuple) and not r[1] else r for k, r in rules.items()}
    if "w0" in given:  # a bias of the same operation goes with its weight
        given["b0"] = given["w0"]
    found, rest = gradient(case, rules=given), gradient(case)
    for path, rule in given.items():
        parameter = next(p for p in rest if matches(path, p))
        alone, options = rule if isinstance(rule, tuple) else (rule, {})
        own = gradient(dataclasses.replace(case, rule=alone), **options)
        assert np.abs(own[parameter] - rest[parameter]).max() > 1e-6
        rest[parameter] = own[parameter]
    oracle.assert_close(found, rest, 1e-9, name)


def matches(path, parameter):
    return path((parameter,)) if callable(path) else parameter in (path, path[0])


def test_rules_that_do_not_fit_are_refused():
    for rules in ({"w0": "rtrl"}, {"nothing": ES}):
        with pytest.raises(braintrace.BraintraceError):
            learner_of(Case(STACK), rules=rules)

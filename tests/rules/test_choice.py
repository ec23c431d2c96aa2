"""Rules are chosen by name, by class and by path: each weight has the gradient of its rule."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from catalogue_cells import Leaky
from catalogue_models import BATCH, INPUTS
from own_rules import Decaying
from paths import PATHS
from random_models import Layer, RandomModel
from test_gradients import Case, learner_of, squared_error

import braintrace

ES, OTTT = ("es_d_rtrl", {"decay_or_rank": 0.7}), ("ottt", {"decay": 0.7})
STACK = RandomModel((Layer("bias", "gain"), Layer("heads", "masked")), "late")
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

FLOAT64 = pytest.mark.usefixtures("float64")


def gradient(case, **options):
    return PATHS[case.path](learner_of(case, **options), case.request(), squared_error)


@FLOAT64
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


@FLOAT64
def test_rules_that_do_not_fit_are_refused():
    for rules in ({"w0": "rtrl"}, {"nothing": ES}):
        with pytest.raises(braintrace.BraintraceError):
            learner_of(Case(STACK), rules=rules)


# --- algorithms -----------------------------------------------------------------------------------

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
    assert type(build_learner(name)) is getattr(braintrace, algorithm)


def test_a_subclass_has_names_of_its_own():
    class Slower(braintrace.D_RTRL):
        """The same, by no name."""

    assert type(build_learner("D_RTRL")) is braintrace.D_RTRL
    learner = braintrace.compile(Leaky(), Slower, X, batch_size=BATCH)
    assert type(learner) is Slower


def test_a_class_makes_the_same_learner():
    model = Leaky()
    model.init_state(BATCH)
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(X)
    other = build_learner("D_RTRL")
    assert type(learner) is type(other)
    assert braintrace.ETraceAlgorithm is braintrace.Learner
    np.testing.assert_array_equal(learner(X), other(X))
    for one in (learner, other):
        one.reset_state()
    gradients = [
        one.etrace_grad(X[None], step_fn=lambda x, one=one: jnp.sum(one(x) ** 2))
        for one in (learner, other)
    ]
    for path, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradient, gradients[1][path])

"""Learning rules from outside the package, of public names alone, equal their definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import Plain, stop
from own_rules import Carrying, Decaying, Filtering
from paths import PATHS
from random_models import BATCH, STEPS, Layer, RandomModel
from test_gradients import TARGETS, Case, expected_of, learner_of, squared_error

import braintrace

FADE = 0.6
RECURRENT = RandomModel((Layer("bias", "matmul", "adapting", "spike"),), "late")
STACK = RandomModel((Layer("joined", "gain", "leak"), Layer("low rank", "masked", "synapse")))
READ_OUT = RandomModel((Layer("function", "gain", "adapting"),), "leaky")
PLAIN = RandomModel((Layer("function", "gain", "plain"),))

pytestmark = pytest.mark.usefixtures("float64")


def found_by(rule, case):
    case = dataclasses.replace(case, rule=rule)
    return PATHS[case.path](learner_of(case), case.request(), squared_error)


# --- what a rule is made of -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jacobian", "name", "case"),
    [
        ("elementwise", "d_rtrl", Case(RECURRENT, mask="some", reset="each", chunk_size=4)),
        ("elementwise", "d_rtrl", Case(READ_OUT, reset="each")),
        ("layered", "ostl_recurrent", Case(STACK, path="by_own_gradient", reset="each")),
        ("full", "rtrl", Case(STACK, path="by_pure_function", mask="some", vmap=True)),
    ],
)
def test_a_rule_that_carries_what_a_jacobian_gives_is_the_one_of_the_library(jacobian, name, case):
    rule = Carrying(jacobian)
    assert isinstance(rule, braintrace.Rule)
    found = found_by(rule, case)
    oracle.assert_close(found, expected_of(dataclasses.replace(case, rule=name)), 1e-9, jacobian)


@pytest.mark.parametrize(
    "case",
    [
        Case(RECURRENT, path="by_chunks", mask="some", reset="each", chunk_size=4),
        Case(STACK, path="by_mapped_learners", reset="all", vmap=True),
    ],
    ids=["chunks", "mapped"],
)
def test_a_trace_that_fades_by_a_factor(case):
    """E' = decay E + F x, whatever the model remembers."""
    found = found_by(Decaying(FADE), case)

    def fading(p, h, x):
        held = {k: stop(v) for k, v in h.items()}
        new, y = case.model.by_layer(Plain(), p, held, x, "cut")
        return {k: v + FADE * (h[k] - held[k]) for k, v in new.items()}, y

    def inside(p, h, x):
        """The same, but an output that reads old states reads what their traces tell."""
        new, _ = fading(p, h, x)

        def seen(name, value):
            return stop(value) + new[name] - stop(new[name])

        return new, case.model.by_layer(Plain(), p, h, x, "cut", seen)[1]

    asked, model = case.request(), case.model
    expected = oracle.loop(
        model.params(),
        model.start(BATCH),
        asked.xs,
        lambda t, y: squared_error(y, jnp.asarray(TARGETS)[t]),
        inside,
        inside,
        None,
        asked.mask,
        asked.reset,
    )
    oracle.assert_close(found, expected, 1e-9, str(case))


def test_a_filter_of_inputs_is_ottt():
    case = Case(STACK, path="by_two_calls", mask="some", reset="each")
    found, asked = found_by(Filtering(FADE), case), case.request()

    def loss(t, y, sample):
        return squared_error(y, jnp.asarray(TARGETS)[t, sample])

    model, rest = case.model, (loss, FADE, asked.mask, asked.reset)
    oracle.assert_close(found, oracle.ottt(model, model.params(), asked.xs, *rest), 1e-9)


def test_a_window_ends_in_the_traces_before_it():
    """Exact within the window; with the leak of the model as its decay, in all."""
    case = Case(PLAIN, window=2)
    whole = found_by(Decaying(FADE), dataclasses.replace(case, window=STEPS))
    bptt = expected_of(Case(PLAIN, "rtrl"))
    oracle.assert_close(whole, bptt, 1e-9)
    leaky = Case(RandomModel((Layer("function"),)), window=2)
    oracle.assert_close(found_by(Decaying(0.7), leaky), expected_of(leaky), 1e-9)


# --- traces of any form ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counting(Decaying):
    """It also counts the steps of each sample from a number on, and those of all sequences."""

    first: int = 3

    def init(self, site):
        every = braintrace.TraceSpec((), jnp.int32, (), outlives_reset=True)
        return {"E": site.zeros(), "steps": np.full(site.samples, self.first), "every": every}

    def advance(self, site, trace, J, x, F):
        E = super().advance(site, trace["E"], J, x, F)
        return {"E": E, "steps": trace["steps"] + 1, "every": trace["every"] + 1}

    def contract(self, site, trace, mu):
        return site.contract(mu, trace["E"])


def test_a_trace_is_any_pytree_of_arrays_and_starts_anew_by_sample():
    case = Case(RandomModel((Layer("bias"),)), Counting(FADE), reset="each")
    learner = learner_of(case)

    def counts():
        leaves = jax.tree.leaves(learner.traces.value)
        (every,) = (int(leaf) for leaf in leaves if leaf.shape == ())
        (steps,) = (leaf.tolist() for leaf in leaves if leaf.shape == (BATCH,))
        return steps, every

    assert counts() == ([3, 3], 0)
    PATHS[case.path](learner, case.request(), squared_error)
    assert counts() == ([3 + 3, 3 + 4], STEPS)
    learner.reset_state(where=np.array([True, False]))
    assert counts() == ([3, 3 + 4], STEPS)
    learner.reset_state()
    assert counts() == ([3, 3], STEPS)


# --- what is no rule ------------------------------------------------------------------------------


def wrong(**methods):
    return dataclasses.dataclass(frozen=True)(type("Wrong", (Decaying,), methods))(FADE)


cut_rows = functools.partial(jax.tree.map, lambda e: e[:1])
WRONG = {
    "a shape that changes": (
        {"advance": lambda self, site, E, J, x, F: cut_rows(E)},
        braintrace.ShapeError,
        "advance",
    ),
    "a structure that changes": (
        {"advance": lambda self, site, E, J, x, F: [*E.values()]},
        braintrace.ShapeError,
        "advance",
    ),
    "a gradient for each sample": (
        {"contract": lambda self, site, E, mu: E["h0"]},
        braintrace.ShapeError,
        "contract",
    ),
    "no axis of samples": (
        {"init": lambda self, site: np.zeros(7)},
        braintrace.ShapeError,
        "samples",
    ),
    "another Jacobian": ({"jacobian": "diagonal"}, braintrace.OptionError, "elementwise"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_told(name):
    methods, error, word = WRONG[name]
    with pytest.raises(error, match=word):
        found_by(wrong(**methods), Case(RandomModel((Layer("bias"),))))


def test_what_is_no_rule_is_refused():
    own = {name: getattr(Decaying, name) for name in ("jacobian", "init", "advance", "contract")}
    changing = dataclasses.make_dataclass("Rule", [], namespace=own)()
    for given in (Decaying, 3, changing):
        with pytest.raises(braintrace.OptionError, match="Rule"):
            learner_of(Case(PLAIN, given))

"""ES-D-RTRL, OTTT, UORO and KF-RTRL equal the recursions of their papers, on every path.

UORO and KF-RTRL equal theirs with the signs that a learner draws, and RTRL in the mean.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_gradients
from paths import PATHS
from random_models import BATCH, STEPS, Layer, RandomModel, named
from test_gradients import TARGETS, XS, Case, learner_of, squared_error

import braintrace

pytestmark = pytest.mark.usefixtures("float64")


def loss(t, y, sample):
    return squared_error(y, jnp.asarray(TARGETS)[t, sample])


# --- ES-D-RTRL and OTTT ---------------------------------------------------------------------------

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
FILTERED = [
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


def literal(case):
    asked, recursion = case.request(), getattr(oracle, case.rule)
    xs = np.nan_to_num(asked.xs)
    return recursion(case.model, case.model.params(), xs, loss, ALPHA, asked.mask, asked.reset)


@pytest.mark.parametrize("case", FILTERED, ids=lambda case: f"{case.rule}-{case.path}")
def test_filters_of_inputs_and_outputs(case):
    learner = learner_of(case, **OPTIONS[case.rule])
    found = PATHS[case.path](learner, case.request(), squared_error)
    oracle.assert_close(found, literal(case), 1e-9, str(case))


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


# --- UORO and KF-RTRL -----------------------------------------------------------------------------

HEADS = RandomModel((Layer("heads", "masked", "lstm"),))
SYNAPSE = RandomModel((Layer("bias", "gain", "synapse", "sine"),), "bypass")
PAIR = RandomModel((Layer("function", "matmul", "leak"), Layer("joined", "matmul", "plain")))
LATE = RandomModel((Layer("low rank", "shared gain", "loop"),), "late")
CONVOLUTION = RandomModel((Layer("conv", "matmul", "branches"),))
RANDOM = [
    Case(HEADS, "uoro", "by_chunks", mask="some", reset="each", chunk_size=4),
    Case(SYNAPSE, "uoro", "by_stream", reset="one sample"),
    Case(CONVOLUTION, "uoro", "by_pure_function", reset="all", vmap=True),
    Case(LATE, "uoro", "by_two_calls", mask="some", reset="each", form="function"),
    Case(HEADS, "kf_rtrl", "by_chunks", mask="some", reset="all", vmap=True),
    Case(PAIR, "kf_rtrl", "by_own_gradient", reset="each"),
    Case(LATE, "kf_rtrl", "by_stream", mask="some", reset="one sample"),
]


def signs_of(case):
    """(time, samples, signs): what a learner draws in its first steps.

    Of a step that starts anew only the noise is in the traces, and a reset leaves the stream of
    random numbers alone.
    """
    learner, found = learner_of(case), []
    for x in XS:
        learner.reset_state()
        learner.etrace_evolve(x[None])
        traces = jax.tree.map(np.asarray, learner.traces.value)
        if case.rule == "uoro":
            found.append(np.sign(traces["s"]))
        else:
            inputs = inputs_of_products(case, x)
            pairs = zip(traces["u"].values(), inputs, strict=True)
            found.append(np.stack([np.sign(np.sum(u * i, -1)) for u, i in pairs], -1))
    return np.stack(found)


def inputs_of_products(case, x):
    ops = oracle.Plain()
    case.model.step(ops, case.model.params(), case.model.start(BATCH), x)
    return [i for i in ops.inputs if i is not None]


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: f"{case.rule}-{case.path}")
def test_random_rules_with_the_signs_that_they_draw(case):
    asked, recursion = case.request(), getattr(oracle, case.rule)
    found = PATHS[case.path](learner_of(case), asked, squared_error)
    signs = signs_of(case)
    assert {*np.unique(signs)} == {-1.0, 1.0}
    params = case.model.params()
    expected = recursion(case.model, params, XS, loss, signs, asked.mask, asked.reset)
    oracle.assert_close(found, expected, 1e-9, str(case))


@functools.cache
def estimates(rule, count=1_000):
    """Gradients of one sequence with as many draws, one after the other."""
    case = Case(PAIR, rule)
    learner = learner_of(case)
    pure = learner.functional()

    def next_sequence(state, _):
        state, found = pure.grad(
            pure.reset(state),
            XS,
            TARGETS,
            step_fn=lambda x, y: squared_error(learner(x), y),
            reduction="sum",
        )
        return state, named(found)

    found = jax.lax.scan(next_sequence, pure.state(), None, length=count)[1]
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("rule", ["uoro", "kf_rtrl"])
def test_the_mean_is_the_gradient_of_rtrl(rule):
    expected = test_gradients.expected_of(Case(PAIR, "rtrl"))
    for name, draws in estimates(rule).items():
        error = np.abs(draws.mean(0) - expected[name])
        deviation = draws.std(0, ddof=1) / np.sqrt(len(draws))
        assert np.all(error <= 4.5 * deviation + 1e-9), name


def test_kronecker_factors_vary_less_than_rank_one():
    noise = {
        rule: sum(draws.var(0).sum() for draws in estimates(rule).values())
        for rule in ("uoro", "kf_rtrl")
    }
    assert 0 < noise["kf_rtrl"] < 0.5 * noise["uoro"]


def test_a_seed_says_what_is_drawn_and_samples_draw_apart():
    case = Case(HEADS, "uoro")

    def noise(seed):
        learner = learner_of(case, seed=seed)
        learner.etrace_evolve(XS)
        return np.asarray(learner.traces.value["s"])

    first, same, other = noise(5), noise(5), noise(6)
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
    signs = signs_of(case).reshape(STEPS * BATCH, -1)
    assert len(np.unique(signs, axis=0)) == STEPS * BATCH


@pytest.mark.parametrize("rule", ["uoro", "kf_rtrl"])
def test_norms_that_are_zero_make_no_nan(rule):
    """Silent inputs and a loss without a gradient."""
    learner = learner_of(Case(PAIR, rule))
    found = learner.etrace_grad(0 * XS, step_fn=lambda x: 0 * learner(x).sum())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_kf_rtrl_refuses_what_meets_its_input_in_several_places():
    for layer in (Layer("conv"), Layer("embedding")):
        with pytest.raises(braintrace.PrimitiveError, match="UORO"):
            learner_of(Case(RandomModel((layer,)), "kf_rtrl"))

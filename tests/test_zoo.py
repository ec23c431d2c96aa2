"""Every model of the zoo compiles as described, and learns what the dense oracle says."""

import functools

import jax
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close, assert_gradients_differ, assert_states_close
from recorded import RecordedCase
from rules import OTHERS, RULES
from zoo import BY_NAME, MODELS
from zoo_runs import CHUNK_SIZES, Runs, data, runs_of

import braintrace

TOLERANCE = 1e-9
DECAY = 0.7
CORE = {"LSTMPeephole", "LinearRecurrentUnit", "ALIF", "PopulationsAsSlices", "ReshapedStates"}
# Single steps of these have rules of their own, so that every path is run by day as well.
EVERY_PATH = CORE | {"ReadsAnOldState", "LSTMSeparate", "SharedDrive", "TwoCompartments"}
OPTIMISED = {"LSTMFused", "PooledConvolution", "SparseLIF"}
METHODS = {"d_rtrl": {}, "es_d_rtrl": {"decay_or_rank": DECAY}}
METHODS |= {rule.name: rule.options for rule in OTHERS}
STEP_BY_STEP = (Runs.by_own_gradient, Runs.in_a_stream)

pytestmark = pytest.mark.usefixtures("float64")


def each(models, *more):
    marks = [(CORE, pytest.mark.core), (OPTIMISED, pytest.mark.optimised)]
    return [
        pytest.param(m, id=m.name, marks=[*more, *(mark for of, mark in marks if m.name in of)])
        for m in models
    ]


# All oracles, and with them the filters of ES_D_RTRL, meet all models at night, and a sixth of
# them in a short run. The others are held against one oracle.
WITH_FILTERS = [m for i, m in enumerate(MODELS) if i % 6 == 0 or m.name in CORE]
WITHOUT = [m for m in MODELS if m not in WITH_FILTERS]
# The other rules meet all models at night, and a few of their own in a short run.
QUICK = [m for m in MODELS if m.name not in OPTIMISED]
SOME = {rule.name: QUICK[3 + i :: 20] for i, rule in enumerate(OTHERS)}


# The scope brings the tests of a model together, so that they share what they compile.
@pytest.fixture(scope="module", params=each(MODELS))
def entry(request):
    return request.param


@functools.cache
def case_of(entry):
    """The recorded model and what it starts from; without a hand-written description."""
    model = entry.build()
    case = RecordedCase(entry.name, model, data(entry)[0][0], entry.named_groups(), entry.canonical)
    return case, jax.tree.map(np.asarray, (case.params(), case.states()))


@oracles.compiled
def bptt(case, params, states, xs, targets):
    return jax.grad(lambda p: oracles.sequence_loss(case, p, states, xs, targets))(params)


@functools.cache
def expected(entry, oracle, **options):
    case, (params, states) = case_of(entry)
    return oracle(case, params, states, *data(entry), **options)


def expected_of(entry, algorithm):
    """The gradient of BPTT where that is what D-RTRL promises, else by the literal recursions."""
    if algorithm == "d_rtrl":
        return expected(entry, bptt if entry.diagonal else oracles.dense_d_rtrl)
    if algorithm == "es_d_rtrl":
        return expected(entry, oracles.dense_es_d_rtrl, alpha=DECAY)
    return expected(entry, RULES[algorithm].oracle)


def named(group):
    return ", ".join(sorted(state.name for state in group.states))


def described(relation):
    groups = [named(group) for group in relation.hidden_groups]
    paths = ["/".join(map(str, path)) for path in relation.parameter_paths]
    return f"{','.join(paths)} -> {' | '.join(groups)}"


def test_relations_groups_and_diagnostics(entry):
    graph = runs_of(entry, "d_rtrl").learner.graph
    found = tuple(described(relation) for relation in graph.hidden_param_op_relations)
    groups = tuple(named(group) for group in graph.hidden_groups)
    kinds = {diagnostic.kind for diagnostic in graph.diagnostics}
    assert (found, groups, kinds) == (entry.relations, entry.groups, set(entry.diagnostics))


@pytest.mark.by_day(9)
@pytest.mark.parametrize(
    "entry", [*each(WITH_FILTERS), *each(WITHOUT, pytest.mark.nightly)], indirect=True
)
def test_the_oracle_is_bptt_where_the_model_is_diagonal_and_only_there(entry):
    found, exact = expected(entry, oracles.dense_d_rtrl), expected(entry, bptt)
    if entry.diagonal:
        assert_gradients_close(found, exact, TOLERANCE, entry.name)
    else:
        assert_gradients_differ(found, exact, 1e-4, entry.name)


def test_every_weight_learns(entry):
    for name, leaves in expected_of(entry, "d_rtrl").items():
        assert all(np.abs(leaf).max() > 1e-6 for leaf in leaves), name


def check(entry, algorithm, chunk_sizes, step_by_step):
    """Every path gives the gradient of the oracle; those of single steps, the same traces."""
    message = RULES[algorithm].refused.get(entry.name)
    if message is not None:
        with pytest.raises(braintrace.CompilationError, match=message):
            Runs(entry, algorithm, **METHODS[algorithm])
        return
    runs, wanted = runs_of(entry, algorithm, **METHODS[algorithm]), expected_of(entry, algorithm)
    for chunk_size in chunk_sizes:
        found = runs.at_once(chunk_size)
        assert_gradients_close(found, wanted, TOLERANCE, f"{entry.name}, chunks of {chunk_size}")
    left = []
    for path in step_by_step:
        found = path(runs)
        assert_gradients_close(found, wanted, TOLERANCE, f"{entry.name}, {path.__name__}")
        left.append(runs.after())
    for after in left[1:]:
        assert_states_close(after, left[0], entry.name)


@pytest.mark.parametrize(
    ("entry", "algorithm"),
    [
        pytest.param(*row.values, algorithm, id=f"{row.id}-{algorithm}", marks=row.marks)
        for algorithm, models in {"d_rtrl": MODELS, "es_d_rtrl": WITH_FILTERS, **SOME}.items()
        for row in each(models)
    ],
    indirect=["entry"],
)
def test_all_paths_equal_the_dense_oracle(entry, algorithm):
    """One path for each model in turn: every other one a sequence at once. A few go on all."""
    turn = MODELS.index(entry) + list(METHODS).index(algorithm)
    chunks = [CHUNK_SIZES[turn // 2 % len(CHUNK_SIZES)]]
    if entry.name in EVERY_PATH:
        check(entry, algorithm, chunks, STEP_BY_STEP)
    elif turn % 2 == 0:
        check(entry, algorithm, chunks, [])
    else:
        check(entry, algorithm, [], [STEP_BY_STEP[turn // 2 % 2]])


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", METHODS)
def test_all_paths_and_chunk_sizes_equal_the_dense_oracle(entry, algorithm):
    check(entry, algorithm, CHUNK_SIZES, STEP_BY_STEP)


@pytest.mark.parametrize("entry", each([m for m in MODELS if m.spiking]), scope="module")
def test_neurons_spike_now_and_then(entry):
    case, (params, states) = case_of(entry)
    rates = case.spikes(params, states, data(entry)[0])
    assert rates
    assert all(0.02 < rate < 0.9 for rate in rates), rates


def test_the_zoo_is_large():
    assert len(MODELS) >= 25
    assert len(BY_NAME) == len(MODELS)

"""Every model and every layer of `nn` compiles as described, and learns as its oracle says."""

import itertools

import jax
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close, assert_gradients_differ, assert_states_close
from catalogue import BASIC, LAYERS, MODELS, verdict
from catalogue_runs import PATHS, Runs, case_of, data, expected, named, reported, runs_of
from rules import OTHERS, RULES

import braintrace

TOLERANCE = 1e-9
DECAY = 0.7
CORE = {"LSTMPeephole", "LinearRecurrentUnit", "ALIF", "PopulationsAsSlices", "ReshapedStates"}
METHODS = {"d_rtrl": {}, "es_d_rtrl": {"decay_or_rank": DECAY}}
METHODS |= {rule.name: rule.options for rule in OTHERS}
STEP_BY_STEP = ("own gradient", "stream")

METHODS_OF_LAYERS = ("d_rtrl", "es_d_rtrl")
"""Their operations meet the other rules in `test_every_rule`."""

pytestmark = pytest.mark.usefixtures("float64", "time_step")


def marks_of(entry):
    return [pytest.mark.core] if entry.name in CORE else []


def id_of(entry):
    return f"nn {entry.name}" if entry in LAYERS else entry.name


def each(models):
    return [pytest.param(m, id=id_of(m), marks=marks_of(m)) for m in models]


def each_rule(models, rules_of):
    rows = [(m, rule) for m in models for rule in rules_of(m)]
    return pytest.mark.parametrize(
        ("entry", "algorithm"),
        [
            pytest.param(*row, id=f"{id_of(row[0])}-{row[1]}", marks=marks_of(row[0]))
            for row in rows
        ],
        indirect=["entry"],
    )


def methods_of(entry):
    return METHODS_OF_LAYERS if entry in LAYERS else METHODS


# The scope brings the tests of a model together, so that they share what they compile.
@pytest.fixture(scope="module", params=each([*MODELS, *LAYERS]))
def entry(request):
    return request.param


def expected_of(entry, algorithm):
    """The gradient of BPTT where that is what D-RTRL promises, else by the literal recursions."""
    if algorithm == "d_rtrl":
        return expected(entry, oracles.bptt if entry.diagonal else oracles.dense_d_rtrl)
    if algorithm == "es_d_rtrl":
        return expected(entry, oracles.dense_es_d_rtrl, alpha=DECAY)
    return expected(entry, RULES[algorithm].oracle)


def test_relations_groups_and_diagnostics(entry):
    graph = runs_of(entry, "d_rtrl").learner.graph
    found = tuple(reported(relation) for relation in graph.hidden_param_op_relations)
    groups = tuple(named(group) for group in graph.hidden_groups)
    kinds = {verdict(diagnostic) for diagnostic in graph.diagnostics}
    assert (found, groups, kinds) == (
        entry.reported_relations,
        entry.reported_groups,
        set(entry.diagnostics),
    )


@pytest.mark.rows(
    "SignedHalves",
    "CoupledCompartments",
    "GRU",
    "LinearRecurrentUnit",
    "ALIF",
    "ConductanceSynapses",
    "GroupStateALIF",
    "NestedParameters",
    "ReshapedStates",
)
@pytest.mark.parametrize("entry", each(MODELS), indirect=True)
def test_the_oracle_is_bptt_where_the_model_is_diagonal_and_only_there(entry):
    found, exact = expected(entry, oracles.dense_d_rtrl), expected(entry, oracles.bptt)
    if entry.diagonal:
        assert_gradients_close(found, exact, TOLERANCE, entry.name)
    else:
        assert_gradients_differ(found, exact, 1e-4, entry.name)


@pytest.mark.rows(*(id_of(entry) for entry in [*MODELS, *LAYERS] if entry.tested))
def test_the_oracle_gives_every_weight_a_gradient(entry):
    for name, leaves in expected_of(entry, "d_rtrl").items():
        assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(leaves)), name


def check(entry, algorithm, paths, **style):
    """Every path gives the gradient of the oracle; those of single steps, the same traces."""
    options = {**METHODS[algorithm], **style}
    message = RULES[algorithm].refused.get(entry.name)
    if message is not None:
        with pytest.raises(braintrace.CompilationError, match=message):
            Runs(entry, algorithm, **options)
        return
    runs, wanted = runs_of(entry, algorithm, **options), expected_of(entry, algorithm)
    left = []
    for path in paths:
        found = PATHS[path](runs)
        assert_gradients_close(found, wanted, TOLERANCE, f"{entry.name}, {path}")
        if path in STEP_BY_STEP:
            left.append(runs.after())
    for after in left[1:]:
        assert_states_close(after, left[0], entry.name)


@each_rule([*MODELS, *LAYERS], lambda entry: entry.tested)
def test_some_paths_equal_the_dense_oracle(entry, algorithm):
    """Those that the entry of the model names."""
    check(entry, algorithm, entry.tested[algorithm])


@pytest.mark.rows(
    *("LeakyRNN-snap", "GRU-d_rtrl", "LSTMFused-es_d_rtrl", "ALIFLateThreshold-immediate"),
    *("TwoLayers-ottt", "nn Linear, mask and signs-d_rtrl", "nn Conv1d-d_rtrl"),
)
@each_rule([*BASIC, *LAYERS], methods_of)
def test_a_model_of_one_sample_is_mapped_over_the_batch(entry, algorithm):
    check(entry, algorithm, ("chunks of 4", "own gradient"), vmap=True)


def test_every_rule_meets_every_kind_of_path_and_model():
    """A model is diagonal or not; a sequence goes at once, or step by step in two ways."""
    found = {
        (rule, path.partition(" of ")[0], entry.diagonal)
        for entry in MODELS
        for rule, paths in entry.tested.items()
        for path in paths
    }
    assert found == {*itertools.product(METHODS, ("chunks", *STEP_BY_STEP), (True, False))}


@pytest.mark.parametrize(
    "entry", each([m for m in [*MODELS, *LAYERS] if m.spiking]), scope="module"
)
def test_neurons_spike_now_and_then(entry):
    case, (params, states) = case_of(entry)
    rates = case.spikes(params, states, data(entry)[0])
    assert rates
    assert all(0.02 < rate < 0.9 for rate in rates), rates

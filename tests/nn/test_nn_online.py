"""Every layer, cell, neuron and synapse of `braintrace.nn` learns online as it should."""

import brainstate
import jax
import numpy as np
import oracles
import pytest
import saiunit as u
from assertions import assert_gradients_close
from catalogue_runs import CHUNK_SIZES, bptt, case_of, data, expected, named, reported, runs_of
from nn_models import MODELS

TOLERANCE = 1e-9
DECAY = 0.7
OPTIMISED = {"ALIF, recurrent", "LoRA"}
MAPPED = {
    "Linear",
    "FeedbackLinear, adaptive",
    "Embedding",
    "ScaledWSLinear",
    "Linear, mask and signs",
    "AllToAll",
    "OneToOne",
    "Conv1d",
    "Conv3d",
    "ScaledWSConv2d",
    "ValinaRNNCell",
    "IndRNN",
    "GRUCell",
    "MGUCell",
    "LSTMCell",
    "MiniGRU",
    "CFNCell",
    "RTUCell",
    "LeakySpikeReadout",
    "LIF, hard reset",
    "Alpha",
    "ConductanceBased",
    "ALIF, recurrent",
}
"""Models that are mapped over the batch by day; the others have a batch axis."""

AT_NIGHT = {
    *("SignedWLinear", "SparseLinear, signs", "AllToAll, one weight", "Conv2d", "Conv3d"),
    *("ScaledWSConv1d", "ScaledWSConv2d", "ScaledWSConv3d", "FeedbackLinear, adaptive", "AllToAll"),
    *("GRUCell, reset before", "MGUCell, reset before", "URLSTMCell", "MiniLSTM", "MinimalRNNCell"),
    *("GIF", "CurrentBased", "IndRNN", "ALIF, recurrent", "LeakySpikeReadout"),
}
"""Layers of which another one that runs by day differs in one option, axis or equation."""

pytestmark = pytest.mark.usefixtures("float64", "time_step")
SPIKING = [entry for entry in MODELS if entry.spiking]


def each(models):
    optimised = {name: [pytest.mark.optimised] for name in OPTIMISED}
    return [pytest.param(m, id=m.name, marks=optimised.get(m.name, [])) for m in models]


# The scope brings the tests of a model together, so that they share what they compile.
@pytest.fixture(scope="module", params=each(MODELS))
def entry(request):
    return request.param


@pytest.fixture
def time_step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


def gradient_of(entry):
    """The gradient of BPTT where that is what D-RTRL promises, else by its literal recursion."""
    return expected(entry, bptt if entry.diagonal else oracles.dense_d_rtrl)


def test_relations_groups_and_diagnostics(entry):
    graph = runs_of(entry, "d_rtrl").learner.graph
    found = tuple(reported(relation) for relation in graph.hidden_param_op_relations)
    groups = tuple(named(group) for group in graph.hidden_groups)
    kinds = {diagnostic.kind for diagnostic in graph.diagnostics}
    assert (found, groups, kinds) == (
        entry.reported_relations,
        entry.reported_groups,
        set(entry.diagnostics),
    )


@pytest.mark.by_day("SparseLinear", "LeakyRateReadout", "LIF", "ALIF", "LoRA")
def test_d_rtrl_with_a_batch_axis(entry):
    """A sequence at once; of the layers that are not mapped below."""
    found = runs_of(entry, "d_rtrl").at_once(4)
    assert_gradients_close(found, gradient_of(entry), TOLERANCE, entry.name)


@pytest.mark.by_day(
    "Linear",
    "Embedding",
    "Linear, mask and signs",
    "OneToOne",
    "Conv1d",
    "ValinaRNNCell",
    "GRUCell",
    "MiniGRU",
    "LIF, hard reset",
    "Alpha",
)
def test_d_rtrl_mapped_over_the_batch(entry):
    """Step by step."""
    found = runs_of(entry, "d_rtrl", vmap=True).by_own_gradient()
    assert_gradients_close(found, gradient_of(entry), TOLERANCE, entry.name)


@pytest.mark.nightly
@pytest.mark.parametrize("style", [{}, {"vmap": True}], ids=["batch axis", "mapped"])
def test_d_rtrl_on_all_paths(entry, style):
    runs = runs_of(entry, "d_rtrl", **style)
    for found in (*map(runs.at_once, CHUNK_SIZES), runs.by_own_gradient(), runs.in_a_stream()):
        assert_gradients_close(found, gradient_of(entry), TOLERANCE, entry.name)


@pytest.mark.nightly
@pytest.mark.parametrize("style", [{}, {"vmap": True}], ids=["batch axis", "mapped"])
def test_es_d_rtrl_on_all_paths(entry, style):
    case, (params, states) = case_of(entry)
    wanted = oracles.dense_es_d_rtrl(case, params, states, *data(entry), alpha=DECAY)
    runs = runs_of(entry, "es_d_rtrl", decay_or_rank=DECAY, **style)
    for found in (*map(runs.at_once, CHUNK_SIZES), runs.by_own_gradient(), runs.in_a_stream()):
        assert_gradients_close(found, wanted, TOLERANCE, entry.name)


def test_every_weight_learns(entry):
    for name, leaves in gradient_of(entry).items():
        assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(leaves)), name


@pytest.mark.parametrize("entry", SPIKING, ids=lambda entry: entry.name, scope="module")
def test_neurons_spike_now_and_then(entry):
    case, (params, states) = case_of(entry)
    rates = case.spikes(params, states, data(entry)[0])
    assert rates
    assert all(0.02 < rate < 0.9 for rate in rates), rates

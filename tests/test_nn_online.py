"""Every layer, cell, neuron and synapse of `braintrace.nn` learns online as it should."""

import functools
import warnings

import brainstate
import jax
import numpy as np
import oracles
import pytest
import saiunit as u
from assertions import assert_gradients_close
from nn_models import MODELS
from recorded import RecordedCase, mantissas, sequences
from test_zoo import described, named
from zoo_record import BATCH

import braintrace

LENGTH = 6
TOLERANCE = 1e-9

pytestmark = pytest.mark.usefixtures("float64", "time_step")
SPIKING = [entry for entry in MODELS if entry.spiking]


# The scope brings the tests of a model together, so that they share what they compile.
@pytest.fixture(scope="module", params=MODELS, ids=lambda entry: entry.name)
def entry(request):
    return request.param


@pytest.fixture
def time_step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@functools.cache
def case_of(entry):
    model = entry.build()
    xs, _ = data(entry)
    case = RecordedCase(entry.name, model, xs[0], entry.named_groups())
    return case, jax.tree.map(np.asarray, (case.params(), case.states()))


def data(entry):
    return sequences(entry.shape, entry.output, LENGTH)


@functools.cache
def expected(entry):
    """The gradient of BPTT where that is what D-RTRL promises, else by its literal recursion."""
    case, (params, states) = case_of(entry)
    oracle = oracles.bptt if entry.diagonal else oracles.dense_d_rtrl
    return oracle(case, params, states, *data(entry))


@functools.cache
def learner_of(entry, **style):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        model, x0 = entry.module(), data(entry)[0][0]
        return braintrace.compile(model, "d_rtrl", x0, batch_size=BATCH, **style)


def learned(entry, **style):
    xs, targets = data(entry)
    learner = learner_of(entry, **style)
    gradients = learner.etrace_grad(
        xs,
        targets,
        step_fn=lambda x, target: RecordedCase.loss(learner(x), target),
        reduction="sum",
        chunk_size=3,
    )
    return {"/".join(map(str, path)): mantissas(value) for path, value in gradients.items()}


def test_relations_groups_and_diagnostics(entry):
    graph = learner_of(entry).graph
    found = tuple(described(relation) for relation in graph.hidden_param_op_relations)
    groups = tuple(named(group) for group in graph.hidden_groups)
    kinds = {diagnostic.kind for diagnostic in graph.diagnostics}
    assert (found, groups, kinds) == (entry.relations, entry.groups, set(entry.diagnostics))


def test_d_rtrl_with_a_batch_axis(entry):
    assert_gradients_close(learned(entry), expected(entry), TOLERANCE, entry.name)


def test_d_rtrl_mapped_over_the_batch(entry):
    assert_gradients_close(learned(entry, vmap=True), expected(entry), TOLERANCE, entry.name)


def test_every_weight_learns(entry):
    for name, leaves in expected(entry).items():
        assert all(np.abs(leaf).max() > 1e-6 for leaf in leaves), name


@pytest.mark.parametrize("entry", SPIKING, ids=lambda entry: entry.name)
def test_neurons_spike_now_and_then(entry):
    case, (params, states) = case_of(entry)
    rates = case.spikes(params, states, data(entry)[0])
    assert rates
    assert all(0.02 < rate < 0.9 for rate in rates), rates

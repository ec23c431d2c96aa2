"""Every model of the zoo compiles as described, and learns what the dense oracle says."""

import functools
import warnings

import brainstate
import jax
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close, assert_gradients_differ
from recorded import RecordedCase, mantissas, sequences
from zoo import BY_NAME, MODELS
from zoo_record import BATCH

import braintrace

TOLERANCE = 1e-9
LENGTH = 6
DECAY = 0.7
CORE = {"LSTMPeephole", "LinearRecurrentUnit", "ALIF", "PopulationsAsSlices", "ReshapedStates"}

pytestmark = pytest.mark.usefixtures("float64")


def each(models):
    return pytest.mark.parametrize(
        "entry",
        [
            pytest.param(m, id=m.name, marks=[pytest.mark.core] if m.name in CORE else [])
            for m in models
        ],
    )


def graph_of(entry):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        return braintrace.compile_etrace_graph(entry.build(), np.zeros(entry.shape))


def data(entry):
    return sequences(entry.shape, entry.output, LENGTH)


@functools.cache
def case_of(entry):
    """The recorded model and what it starts from; without a hand-written description."""
    model = entry.build()
    xs, _ = data(entry)
    case = RecordedCase(entry.name, model, xs[0], entry.named_groups(), entry.canonical)
    return case, jax.tree.map(np.asarray, (case.params(), case.states()))


@oracles.compiled
def bptt(case, params, states, xs, targets):
    return jax.grad(lambda p: oracles.sequence_loss(case, p, states, xs, targets))(params)


def expected(entry, oracle, **options):
    case, (params, states) = case_of(entry)
    return oracle(case, params, states, *data(entry), **options)


def learned(entry, algorithm, **options):
    """Gradients of the summed loss by a learner, as leaves without units."""
    algorithm_options = {"decay_or_rank": DECAY} if algorithm == "es_d_rtrl" else {}
    xs, targets = data(entry)
    brainstate.random.seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        learner = braintrace.compile(
            entry.module(), algorithm, xs[0], batch_size=BATCH, **algorithm_options
        )
    gradients = learner.etrace_grad(
        xs,
        targets,
        step_fn=lambda x, target: RecordedCase.loss(learner(x), target),
        reduction="sum",
        **options,
    )
    return {"/".join(map(str, path)): mantissas(value) for path, value in gradients.items()}


def named(group):
    return ", ".join(sorted(state.name for state in group.states))


def described(relation):
    groups = [named(group) for group in relation.hidden_groups]
    paths = ["/".join(map(str, path)) for path in relation.parameter_paths]
    return f"{','.join(paths)} -> {' | '.join(groups)}"


@each(MODELS)
def test_relations_groups_and_diagnostics(entry):
    graph = graph_of(entry)
    found = tuple(described(relation) for relation in graph.hidden_param_op_relations)
    groups = tuple(named(group) for group in graph.hidden_groups)
    kinds = {diagnostic.kind for diagnostic in graph.diagnostics}
    assert (found, groups, kinds) == (entry.relations, entry.groups, set(entry.diagnostics))


@each(MODELS)
def test_d_rtrl_equals_the_dense_oracle(entry):
    actual = learned(entry, "d_rtrl", chunk_size=3)
    assert_gradients_close(actual, expected(entry, oracles.dense_d_rtrl), TOLERANCE, entry.name)


@each(MODELS)
def test_d_rtrl_step_by_step(entry):
    actual = learned(entry, "d_rtrl", chunk_size=1)
    assert_gradients_close(actual, expected(entry, oracles.dense_d_rtrl), TOLERANCE, entry.name)


@each(MODELS)
def test_es_d_rtrl_equals_the_dense_oracle(entry):
    actual = learned(entry, "es_d_rtrl", chunk_size=3)
    wanted = expected(entry, oracles.dense_es_d_rtrl, alpha=DECAY)
    assert_gradients_close(actual, wanted, TOLERANCE, entry.name)


@each([BY_NAME[name] for name in sorted(CORE)])
def test_es_d_rtrl_step_by_step(entry):
    actual = learned(entry, "es_d_rtrl", chunk_size=1)
    wanted = expected(entry, oracles.dense_es_d_rtrl, alpha=DECAY)
    assert_gradients_close(actual, wanted, TOLERANCE, entry.name)


@each([entry for entry in MODELS if entry.diagonal])
def test_the_oracle_of_a_diagonal_model_is_bptt(entry):
    found = expected(entry, oracles.dense_d_rtrl)
    assert_gradients_close(found, expected(entry, bptt), TOLERANCE, entry.name)


@each([entry for entry in MODELS if not entry.diagonal])
def test_the_oracle_of_any_other_model_is_not_bptt(entry):
    found = expected(entry, oracles.dense_d_rtrl)
    assert_gradients_differ(found, expected(entry, bptt), 1e-4, entry.name)


@each([entry for entry in MODELS if entry.spiking])
def test_neurons_spike_now_and_then(entry):
    case, (params, states) = case_of(entry)
    rates = case.spikes(params, states, data(entry)[0])
    assert rates
    assert all(0.02 < rate < 0.9 for rate in rates), rates


@each(MODELS)
def test_every_weight_learns(entry):
    for name, leaves in expected(entry, oracles.dense_d_rtrl).items():
        assert all(np.abs(leaf).max() > 1e-6 for leaf in leaves), name


def test_the_zoo_is_large():
    assert len(MODELS) >= 25
    assert len(BY_NAME) == len(MODELS)

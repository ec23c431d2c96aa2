"""What holds for every learning rule: dtypes, bytes, saving, the same gradient by any driver."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close, assert_states_close
from drivers import (
    build_learner,
    catalogue_gradient,
    expected_warnings,
    named,
    rewind,
    sequence_gradient,
    snapshot,
    stream_gradient,
    summed,
    weights_of,
)
from rules import RULES

import braintrace
from braintrace._graph import specs_of

LENGTH = 6
RESET = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)
WEIGHTS = np.float32([1, 0, 2, 0.5, 1, 3])


def case_of(rule):
    return catalogue.BY_NAME[RULES[rule].case]


def data_of(rule):
    return jax.tree.map(np.asarray, case_of(rule).sequences(2, LENGTH))


def gradient_of(rule):
    """That of the summed losses: of its oracle, where this is backpropagation."""
    case = case_of(rule)
    is_exact = RULES[rule].oracle is references.oracles.bptt
    return references.bptt(case) if is_exact else catalogue_gradient(case, rule)


@pytest.mark.parametrize("rule", ["es_d_rtrl", "rtrl"])
def test_traces_have_the_dtype_that_is_given_and_the_bytes_that_are_told(rule):
    case = case_of(rule)
    learner = build_learner(case, rule, trace_dtype=jnp.bfloat16)
    found = sequence_gradient(learner, case, *data_of(rule), chunk_size=2)
    assert_gradients_close(found, gradient_of(rule), 3e-2, rule)
    traces = jax.tree.leaves(learner.algorithm.traces.value)
    specs = specs_of(learner.algorithm.compiled.trace_specs)
    for trace, spec in zip(traces, specs, strict=True):
        is_half = spec.takes_trace_dtype and jnp.issubdtype(trace.dtype, jnp.floating)
        assert (trace.shape, trace.dtype) == (spec.shape, spec.dtype)
        assert is_half == (trace.dtype == jnp.bfloat16)
    report = learner.report()
    assert report.carried_bytes == sum(trace.nbytes for trace in traces)
    whole = sum(spec.nbytes for spec in specs_of(learner.graph.trace_specs) if spec.is_stored)
    assert report.stored_bytes == whole >= report.carried_bytes


@pytest.mark.parametrize("rule", ["es_d_rtrl", "snap"])
def test_a_saved_learner_goes_on(rule):
    case, (xs, targets) = case_of(rule), data_of(rule)
    first, second = (build_learner(case, rule) for _ in range(2))
    sequence_gradient(first, case, xs[:3], targets[:3])
    states, traces = jax.tree.map(np.asarray, snapshot(first))
    for path, state in second.algorithm.model.states().items():
        state.value = states[path]
    second.algorithm.traces.value = traces
    found = [sequence_gradient(learner, case, xs[3:], targets[3:]) for learner in (first, second)]
    assert_gradients_close(found[1], found[0], 1e-6, rule)
    with pytest.raises(braintrace.ShapeError):
        second.algorithm.traces.value = {**traces, "other": np.zeros(3)}


class Drivers:
    """One learner, run by each of the drivers: sums of gradients of weighted losses, by name."""

    def __init__(self, rule):
        self.case = case_of(rule)
        self.learner = build_learner(self.case, rule)
        self.start = self.learner.algorithm.traces.value
        self.sequences = (*data_of(rule), WEIGHTS)
        gradient = brainstate.transform.grad(self.loss, weights_of(self.learner.algorithm.model))
        self.gradient = brainstate.transform.jit(gradient)

    def again(self):
        """Begin anew, with the numbers that were drawn before."""
        self.learner.reset_state(2)
        rewind(self.learner, self.start)

    def loss(self, x, target, weight):
        return weight * self.case.loss(self.learner(x), target)

    def of(self, part, weights=WEIGHTS):
        return tuple(leaf[part] for leaf in (*self.sequences[:2], weights))

    def at_once(self, part=slice(None), chunk_size=3, **options):
        found = self.learner.etrace_grad(
            *self.of(part, **options),
            step_fn=self.loss,
            reduction="sum",
            reset=RESET[part],
            chunk_size=chunk_size,
        )
        return named(found)

    def masked(self):
        return sequence_gradient(
            self.learner, self.case, *self.sequences[:2], mask=WEIGHTS, reset=RESET
        )

    def stream(self):
        options = {"step_fn": self.loss, "reset": RESET}
        return named(stream_gradient(self.learner, *self.sequences, **options))

    def single_steps(self):
        found = []
        for t, now in enumerate(zip(*self.sequences, strict=True)):
            if RESET[t].any():
                self.learner.reset_state(where=RESET[t])
            found.append(named(self.gradient(*now)))
        return summed(found)


@pytest.mark.parametrize("rule", ["ostl_recurrent", "snap", "uoro"])
def test_every_driver_gives_the_same(rule):
    runs = Drivers(rule)
    runs.again()  # from zero traces, as all other times
    expected = runs.at_once()
    after = snapshot(runs.learner)
    for run in (runs.masked, runs.stream, runs.single_steps):
        runs.again()
        assert_gradients_close(run(), expected, 1e-5, f"{rule}, {run.__name__}")
        assert_states_close(snapshot(runs.learner), after, f"{rule}, {run.__name__}")
    runs.again()
    expected = runs.at_once(weights=np.where(np.arange(LENGTH) < 3, 0, WEIGHTS))
    runs.again()
    runs.learner.etrace_evolve(runs.sequences[0][:3], reset=RESET[:3])
    found = runs.at_once(slice(3, None))
    assert_gradients_close(found, expected, 1e-5, f"{rule}, after steps without a loss")
    assert_states_close(snapshot(runs.learner), after, rule)


def flat(tree):
    return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("rule", ["snap 2"])
def test_the_check_of_a_gradient_compares_it_with_backpropagation(rule):
    case, options = case_of(rule), RULES[rule].options
    with expected_warnings(case, rule):
        check = braintrace.gradient_check(
            case.build(),
            RULES[rule].algorithm,
            *data_of(rule),
            case.loss,
            batch_size=2,
            **options,
        )
    found = jax.tree.map(lambda leaf: np.asarray(leaf) / LENGTH, gradient_of(rule))
    exact = jax.tree.map(lambda leaf: leaf / LENGTH, references.bptt(case))
    for row in check.rows[:-1]:
        name = row.parameter
        online, bptt = (flat(of[name]) for of in (found, exact))
        np.testing.assert_allclose(row.norm, np.linalg.norm(online), rtol=1e-4)
        deviation = np.linalg.norm(online - bptt) / np.linalg.norm(bptt)
        np.testing.assert_allclose(row.deviation, deviation, rtol=1e-3, atol=1e-5)
    if RULES[rule].oracle is references.oracles.bptt:
        assert check.rows[-1].deviation < 1e-5


@pytest.mark.parametrize(("rank", "alpha"), [(1, 0.0), (3, 0.5), (0.5, 0.5)])
def test_a_rank_of_es_d_rtrl_is_a_decay(rank, alpha):
    case = catalogue.BY_NAME["LeakyRNN"]
    found = catalogue_gradient(case, algorithm="pp_prop", decay_or_rank=rank)
    assert_gradients_close(found, references.dense_es_d_rtrl(case, alpha=alpha), 1e-5)

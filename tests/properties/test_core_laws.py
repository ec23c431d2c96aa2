"""Laws that hold for every model, algorithm, batch style and way of cutting a sequence."""

import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close, assert_same_bits, assert_states_close
from drivers import (
    build_algorithm,
    build_learner,
    rewind,
    sequence_gradient,
    snapshot,
    weights_of,
)
from rules import OLDEST, OTHERS

import braintrace
from braintrace._core.products import in_place

WITH_TRACES = [braintrace.D_RTRL, braintrace.ES_D_RTRL]
ALGORITHMS = [
    braintrace.RTRL,
    braintrace.UORO,
    braintrace.KF_RTRL,
    *(rule.algorithm for rule in OLDEST + OTHERS),
]
FEW = [catalogue.BY_NAME[name] for name in ("IndRNN", "ALIF", "LSTMFused", "TwoLayers")]
STEPS = references.LENGTH
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.__name__)


def data(case, batch=2):
    return case.sequences(batch, STEPS)


def types(tree):
    leaves = jax.tree.leaves(tree)
    return jax.tree.structure(tree), [(a.shape, a.dtype, a.weak_type) for a in leaves]


def scaled(factor, gradients):
    return jax.tree.map(lambda leaf: factor * leaf, gradients)


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        (catalogue.BY_NAME["IndRNN"], braintrace.RTRL),
        (catalogue.BY_NAME["IndRNN"], braintrace.ES_D_RTRL),
        (catalogue.BY_NAME["ALIF"], braintrace.UORO),
        (catalogue.BY_NAME["ALIF"], braintrace.Immediate),
        (catalogue.BY_NAME["LSTMFused"], braintrace.KF_RTRL),
        (catalogue.BY_NAME["LSTMFused"], braintrace.SnAp),
        (catalogue.BY_NAME["TwoLayers"], braintrace.D_RTRL),
        (catalogue.BY_NAME["TwoLayers"], braintrace.OTTT),
    ],
)
@pytest.mark.core
def test_a_step_keeps_tree_shapes_and_dtypes(case, algorithm):
    _, instance = build_algorithm(case, algorithm)
    before = types(snapshot(instance))
    brainstate.transform.jit(instance)(data(case)[0][0])
    assert types(snapshot(instance)) == before


@pytest.mark.parametrize("algorithm", WITH_TRACES, ids=lambda a: a.__name__)
def test_outputs_that_enter_no_trace_are_not_kept(algorithm):
    """The output gate of a fused LSTM reaches a state that no later step reads."""
    case = catalogue.BY_NAME["LSTMFused"]
    _, instance = build_algorithm(case, algorithm)
    (group,) = instance.graph.hidden_groups
    kept = instance.traces.value
    outputs = jax.tree.leaves(kept["f"] if algorithm is braintrace.ES_D_RTRL else kept)
    assert {leaf.shape[-1] for leaf in outputs} == {3 * group.shape[-1]}


@pytest.mark.parametrize("algorithm", [braintrace.D_RTRL, braintrace.Immediate, braintrace.SnAp])
def test_a_step_inside_a_branch(algorithm):
    """Both branches of a `cond` have the same type, so a step has to keep it."""
    case = catalogue.BY_NAME["LSTMFused"]
    _, instance = build_algorithm(case, algorithm)
    before = snapshot(instance)
    x = data(case)[0][0]

    def maybe_step(run):
        return brainstate.transform.cond(
            run, lambda: instance(x), lambda: jnp.zeros((2, case.output[-1]))
        )

    maybe_step(jnp.asarray(False))
    assert_same_bits(snapshot(instance), before)
    maybe_step(jnp.asarray(True))
    assert jax.tree.structure(snapshot(instance)) == jax.tree.structure(before)
    has_changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), snapshot(instance), before)
    states, traces = map(jax.tree.leaves, has_changed)
    assert any(states)
    assert any(traces) or not traces


@pytest.mark.parametrize(("case", "per_sample"), [(catalogue.BY_NAME["ALIF"], False)])
def test_blocks_of_samples_change_nothing(case, per_sample, monkeypatch):
    """D_RTRL updates the traces of a chunk block by block where they are large."""
    xs, targets = (leaf[:5] for leaf in data(case))
    reset = jnp.arange(5) == 3
    reset = jnp.stack([reset, reset[::-1]], axis=1) if per_sample else reset

    def run():
        learner = build_learner(case, braintrace.D_RTRL)
        options = {"chunk_size": 3, "reset": reset}
        return sequence_gradient(learner, case, xs, targets, **options), snapshot(learner)

    expected, states_and_traces = run()
    monkeypatch.setattr(in_place, "BLOCK_BYTES", 1)
    actual, after = run()
    assert_gradients_close(actual, expected, 1e-5, case.name)
    assert_states_close(after, states_and_traces, case.name)


class HalfPrecision(brainstate.nn.Module):
    """A layer with a leak."""

    def __init__(self, leak, dtype):
        super().__init__()
        self.leak, self.dtype = leak, dtype
        self.w = brainstate.ParamState(jnp.asarray(np.ones((2, 3), dtype)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.asarray(np.zeros((batch_size, 3), self.dtype)))

    def update(self, x):
        leak = jnp.asarray(self.leak, self.dtype)
        self.h.value = leak * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@functools.cache
def smoothed_gradient(leak, dtype, xs, decay, scale=1.0):
    model, xs = HalfPrecision(leak, dtype), np.reshape(xs, (-1, 1, 2)).astype(dtype)
    options = {"batch_size": 1, "decay_or_rank": decay}
    learner = braintrace.compile(model, "es_d_rtrl", xs[0], **options)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: scale * learner(x).sum(), reduction="sum", chunk_size=len(xs)
    )
    return np.float64(found[("w",)]) / scale


@pytest.mark.usefixtures("optimised")
def test_sums_over_time_in_half_precision_add_up():
    found = smoothed_gradient(0.0, jnp.bfloat16, 1200 * (1.0,), decay=0.0)
    np.testing.assert_array_equal(found, 600)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("decay", "dtype"), [(0.9999, jnp.float16), (0.99999999, jnp.float32)], ids=["half", "single"]
)
def test_slow_filters_are_corrected(decay, dtype):
    """In half precision the correction of the first step overflows; a decay rounds to one."""
    xs = tuple(np.sin(np.arange(10.0)))
    expected = smoothed_gradient(0.9, jnp.float32, xs, 0.9999)
    found = smoothed_gradient(0.9, dtype, xs, decay, scale=1024.0)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


@pytest.mark.core
def test_reductions_and_mask():
    """The sum over the steps, their mean, and both with weights, against BPTT."""
    case = catalogue.BY_NAME["IndRNN"]
    learner, (xs, targets) = build_learner(case), data(case)
    weights = jnp.asarray([1.0, 0.0, 0.5, 2.0, 0.0, 1.0])
    weighted = references.bptt(case, step_weights=tuple(np.asarray(weights, np.float64)))
    expected = {
        ("sum", None): references.bptt(case),
        ("mean", None): scaled(1 / STEPS, references.bptt(case)),
        ("sum", "mask"): weighted,
        ("mean", "mask"): scaled(1 / 4.5, weighted),
    }
    for (reduction, masked), gradient in expected.items():
        learner.reset_state(batch_size=2)
        actual = sequence_gradient(
            learner, case, xs, targets, reduction=reduction, mask=weights if masked else None
        )
        assert_gradients_close(actual, gradient, 1e-5, f"{reduction} {masked}")


def test_value_and_auxiliary_results():
    case = catalogue.BY_NAME["Leaky"]
    learner, (xs, targets) = build_learner(case), data(case)

    def step_loss(x, target):
        output = learner(x)
        return case.loss(output, target), {"output": output}

    options = {"step_fn": step_loss, "has_aux": True, "chunk_size": 4}
    gradients, values, aux = learner.etrace_grad(xs, targets, return_value=True, **options)
    assert gradients.keys() == weights_of(learner.algorithm.model).keys()
    losses = jax.vmap(case.loss)(aux["output"], targets)
    np.testing.assert_allclose(values, losses, rtol=1e-6)
    learner.reset_state(batch_size=2)
    again, aux_again = learner.etrace_grad(xs, targets, **options)
    assert_same_bits((again, aux_again), (gradients, aux))


@pytest.mark.parametrize("window", [None])
def test_gradients_of_some_weights(window):
    """They are those of all the weights, and the traces of all move on."""
    case = catalogue.BY_NAME["Leaky"]
    learner, (xs, targets) = build_learner(case, window=window), data(case)
    every = learner.algorithm.model.states(brainstate.ParamState)
    chosen = dict(list(every.items())[1:])
    named = {"/".join(path): state for path, state in reversed(chosen.items())}
    start = learner.functional().state()

    def step_loss(x, target):
        return case.loss(learner(x), target)

    options = {"step_fn": step_loss, "chunk_size": 3}
    expected = learner.etrace_grad(xs, targets, **options)
    after = learner.functional().state()
    for weights, path_of in ((chosen, lambda key: key), (named, lambda key: tuple(key.split("/")))):
        learner.functional().restore(start)
        found = learner.etrace_grad(xs, targets, weights=weights, **options)
        assert list(found) == list(weights)
        wanted = {key: expected[path_of(key)] for key in weights}
        assert_gradients_close(found, wanted, 1e-6)
        assert_gradients_close(learner.functional().state().traces, after.traces, 1e-6)
    assert learner.etrace_grad(xs, targets, weights={}, **options) == {}
    _, found = learner.functional().grad(start, xs, targets, weights=chosen, **options)
    assert_gradients_close(found, {path: expected[path] for path in chosen}, 1e-6)


def test_a_sequence_whose_outputs_are_not_returned():
    case = catalogue.BY_NAME["Leaky"]
    (learner, other), (xs, _) = (build_learner(case) for _ in range(2)), data(case)
    outputs, model = learner.etrace_evolve(xs), case.build()
    brainstate.nn.init_all_states(model, batch_size=2)
    expected = brainstate.transform.for_loop(model.update, xs)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    assert other.etrace_evolve(xs, return_outputs=False) is None
    assert_same_bits(*(one.functional().state() for one in (learner, other)))


@pytest.mark.parametrize("algorithm", [braintrace.UORO, braintrace.D_RTRL])
def test_reset_starts_over(algorithm):
    """ES-D-RTRL counts steps for its bias correction; a reset has to take the count back."""
    case = catalogue.BY_NAME["ALIF"]
    learner, (xs, targets) = build_learner(case, algorithm), data(case)
    start = snapshot(learner)
    first = sequence_gradient(learner, case, xs, targets)
    learner.reset_state(batch_size=2)
    rewind(learner, start[1])
    assert_same_bits(snapshot(learner), start)
    assert_same_bits(sequence_gradient(learner, case, xs, targets), first)

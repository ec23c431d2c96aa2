"""What the drivers do not do: compile twice, compute what nobody reads, copy what they own."""

import brainstate
import catalogue
import jax
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from compilation import counted
from drivers import (
    build_algorithm,
    build_learner,
    named,
    new_learner,
    sequence_gradient,
    weights_of,
)

import braintrace
from braintrace._learner.driver import Driver
from braintrace._learner.methods.gradient import SequenceGradient

CASE = catalogue.BY_NAME["IndRNN"]
XS, TARGETS = map(np.asarray, CASE.sequences(2, 6))
ALGORITHMS = pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
ONE_BY_DAY = pytest.mark.parametrize(
    "algorithm", ["d_rtrl", pytest.param("es_d_rtrl", marks=pytest.mark.nightly)]
)


def square_loss(learner):
    return lambda x, target: CASE.loss(learner(x), target)


@pytest.mark.by_day("d_rtrl")
@pytest.mark.core
@ALGORITHMS
def test_hundred_calls_compile_once(algorithm):
    learner = build_learner(CASE, algorithm)
    step, weights = square_loss(learner), weights_of(learner.algorithm.model)

    def descend(gradients):
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 1e-3 * g, weight.value, gradients[path])

    def call(after_reset):
        if after_reset:
            learner.reset_state(2)
        learner.etrace_grad(XS, TARGETS, step_fn=step, chunk_size=4)
        learner.etrace_grad(XS, TARGETS, step_fn=step, memory_budget=1)
        learner.etrace_online(XS, TARGETS, step_fn=step, update_fn=descend)
        learner.predict(XS)
        learner.etrace_evolve(XS)

    with counted() as first:
        call(True)
    assert first
    call(False)  # the second call is the first that does not start from zero traces
    with counted() as later:
        for number in range(98):
            call(after_reset=number < 49)
    assert later == []


def test_a_single_step_compiles_once():
    _, algorithm = build_algorithm(CASE)
    step = square_loss(algorithm)
    for _ in range(2):
        step(XS[0], TARGETS[0])
    with counted() as later:
        for _ in range(98):
            step(XS[0], TARGETS[0])
    assert later == []


class CountingTraces(braintrace.D_RTRL):
    """D_RTRL that notes how often its traces are computed."""

    updates = 0

    @property
    def method(self):
        def note():
            self.updates += 1

        class Noting(type(super().method)):
            def update(self, *arguments):
                jax.debug.callback(note)
                return super().update(*arguments)

        return Noting()


@ALGORITHMS
@catalogue.each([catalogue.BY_NAME[name] for name in ("ALIF", "LSTMFused")])
def test_no_copies_of_weights_are_given_back(case, algorithm, monkeypatch):
    """What the traces are computed from later on, if anybody reads them, needs none."""
    read, original = [], SequenceGradient._read_by_update

    def noting(*arguments):
        read.append(original(*arguments))
        return read[-1]

    monkeypatch.setattr(SequenceGradient, "_read_by_update", noting)
    learner = build_learner(case, algorithm)
    xs, targets = case.sequences(2, 6)
    sequence_gradient(learner, case, xs, targets)
    assert len(read) == (algorithm == "d_rtrl")  # the other one's traces come along
    assert jax.tree.leaves(read) == []


@pytest.mark.core
def test_traces_that_nobody_reads_are_not_computed():
    learner = build_learner(CASE, CountingTraces)
    for _ in range(2):
        learner.reset_state(2)
        found = sequence_gradient(learner, CASE, XS, TARGETS)
    jax.effects_barrier()
    assert learner.algorithm.updates == 0
    assert_gradients_close(found, references.bptt(CASE), 1e-5)
    read = learner.algorithm.traces.value
    jax.effects_barrier()
    assert learner.algorithm.updates == 1
    expected = new_learner(CASE, which=1)
    expected.etrace_evolve(XS)
    expected = expected.algorithm.traces.value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), read, expected)


def test_a_step_that_continues_computes_its_traces_at_once(monkeypatch):
    """The next step reads them: a program of their own would take longer."""
    deferred, original = [], Driver._finished

    def noting(*arguments):
        deferred.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(Driver, "_finished", noting)
    learner, whole = (new_learner(CASE, which=number) for number in range(2))
    parts = [slice(t, t + 1) for t in range(3)]
    found = [sequence_gradient(learner, CASE, XS[part], TARGETS[part]) for part in parts]
    assert len(deferred) == 1  # after the first one, which starts from zero
    expected = sequence_gradient(whole, CASE, XS[:3], TARGETS[:3])
    assert_gradients_close(jax.tree.map(lambda *parts: sum(parts), *found), expected, 1e-5)
    traces, others = (one.algorithm.traces.value for one in (learner, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), traces, others)


@pytest.mark.parametrize("inside", [False, True], ids=["between calls", "inside jit"])
def test_traces_whose_records_are_computed_over_time_can_be_read(inside):
    """The input of a second layer is the first one's output: after the loop, a product for all."""
    case = catalogue.BY_NAME["TwoLayers"]
    xs, targets = case.sequences(2, 6)
    learner, expected = (new_learner(case, which=number) for number in range(2))
    sequence_gradient(learner, case, xs, targets)
    expected.etrace_evolve(xs)

    def read():
        return learner.algorithm.traces.value

    found = brainstate.transform.jit(read)() if inside else read()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found,
        expected.algorithm.traces.value,
    )


@pytest.mark.core
def test_unread_traces_go_where_values_go():
    """Into brainstate's transformations, copies of the model, and printed forms."""
    learner, expected = (new_learner(CASE, which=number) for number in range(2))
    sequence_gradient(learner, CASE, XS, TARGETS)
    expected.etrace_evolve(XS)
    expected = expected.algorithm.traces.value
    assert repr(learner).endswith("bytes of traces)")
    assert "EligibilityTraces" in repr(learner.algorithm.traces)
    _, values = brainstate.graph.treefy_split(learner)
    (kept,) = [leaf for leaf in jax.tree.leaves(values) if leaf.shape == (2, 3, 4)]
    (wanted,) = [leaf for leaf in jax.tree.leaves(expected) if leaf.shape == (2, 3, 4)]
    np.testing.assert_allclose(kept, wanted, rtol=1e-5)

    sequence_gradient(learner, CASE, XS, TARGETS)
    doubled = brainstate.transform.jit(
        lambda: jax.tree.map(lambda leaf: 2 * leaf, learner.algorithm.traces.value)
    )()
    plain = learner.algorithm.traces.value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-6), doubled, plain)


@pytest.mark.core
def test_inside_a_compiled_training_step():
    learner = new_learner(CASE)
    step = square_loss(learner)

    @brainstate.transform.jit
    def train(xs, targets):
        learner.reset_state(2)
        return named(learner.etrace_grad(xs, targets, step_fn=step, reduction="sum"))

    for _ in range(2):
        assert_gradients_close(train(XS, TARGETS), references.bptt(CASE), 1e-5)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(learner.algorithm.traces.value))

    learner.reset_state(2)  # what was compiled in there serves outside as well
    outside = named(learner.etrace_grad(XS, TARGETS, step_fn=step, reduction="sum"))
    assert_gradients_close(outside, references.bptt(CASE), 1e-5)


def test_nothing_is_kept_of_a_transformation_around_a_call():
    learner = build_learner(CASE)

    @brainstate.transform.jit
    def scaled(scale):
        def step(x, target):
            return scale * CASE.loss(learner(x), target)

        sequences = XS, TARGETS
        losses = learner.etrace_online(*sequences, step_fn=step, update_fn=lambda gradients: None)
        return named(learner.etrace_grad(*sequences, step_fn=step)), losses

    with jax.checking_leaks():
        found, losses = scaled(2.0)
    learner.reset_state(2)
    step = square_loss(learner)
    plain = learner.etrace_online(XS, TARGETS, step_fn=step, update_fn=lambda gradients: None)
    once = learner.etrace_grad(XS, TARGETS, step_fn=step)
    np.testing.assert_allclose(losses, 2 * plain, rtol=1e-5)
    assert_gradients_close(found, named(jax.tree.map(lambda leaf: 2 * leaf, once)), 1e-5)


@pytest.mark.optimised
@ONE_BY_DAY
def test_buffers_are_donated_unless_somebody_reads_the_traces(algorithm):
    learner = build_learner(CASE, algorithm)
    step, nothing = square_loss(learner), lambda gradients: None

    def online(xs):
        learner.etrace_online(xs, TARGETS, step_fn=step, update_fn=nothing)

    donated = []
    for run in (learner.etrace_evolve, learner.etrace_evolve, online):
        unread = jax.tree.leaves(learner.algorithm.traces.carried.take()[0])
        run(XS)
        donated.append(all(leaf.is_deleted() for leaf in unread))
    assert donated[1:] == [True, True]
    read = learner.algorithm.traces.value
    learner.etrace_evolve(XS)
    online(XS)
    sequence_gradient(learner, CASE, XS, TARGETS, chunk_size=3)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(read))


def test_traces_that_a_gradient_computes_anyway_are_not_computed_again():
    learner = build_learner(CASE, "es_d_rtrl")
    expected = new_learner(CASE, "es_d_rtrl", which=1)
    sequence_gradient(learner, CASE, XS, TARGETS)
    with counted() as compiled:
        found = learner.algorithm.traces.value
    assert compiled == []
    expected.etrace_evolve(XS)
    expected = expected.algorithm.traces.value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_traces_lost_in_a_failed_run_are_reported():
    learner = new_learner(CASE)
    step = square_loss(learner)
    learner.etrace_evolve(XS)
    for leaf in jax.tree.leaves(learner.algorithm.traces.carried.take()[0]):
        leaf.delete()  # as a program does that runs out of memory after it was given them
    for run in (learner.etrace_evolve, lambda xs: learner.etrace_grad(xs, TARGETS, step_fn=step)):
        with pytest.raises(braintrace.LostTracesError, match="reset_state"):
            run(XS)
    learner.reset_state(2)
    assert_gradients_close(
        sequence_gradient(learner, CASE, XS, TARGETS), references.bptt(CASE), 1e-5
    )


@pytest.mark.core
@pytest.mark.optimised
@pytest.mark.parametrize("chunk_size", [4, pytest.param(6, marks=pytest.mark.nightly)])
def test_steps_without_weight_have_no_backward_pass(chunk_size):
    learner = build_learner(CASE)
    passed = []

    @jax.custom_vjp
    def watched(value):
        return value

    def counted_back(_, cotangent):
        def note(array):
            passed.append(1)
            return np.asarray(array)

        shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
        return (jax.pure_callback(note, shape, cotangent),)

    watched.defvjp(lambda value: (value, None), counted_back)

    def step(x, target):
        return CASE.loss(watched(learner(x)), target)

    mask = np.asarray([0.0, 0.0, 1.0, 0.0, 0.0, 2.0])
    found = learner.etrace_grad(
        XS, TARGETS, step_fn=step, mask=mask, reduction="sum", chunk_size=chunk_size
    )
    expected = references.bptt(CASE, step_weights=tuple(mask))
    assert_gradients_close(named(found), expected, 1e-5)
    assert len(passed) == 2


def test_gradients_of_matrices_sum_over_one_axis_of_steps_and_samples():
    """XLA copies an operand of a product that sums over two axes."""
    case = catalogue.BY_NAME["LSTMFused"]
    xs, learner = case.sequences(2, 8)[0], build_learner(case, "immediate", window=4)

    def step(x):
        return (learner(x) ** 2).sum()

    text = learner.lower("etrace_grad", xs, step_fn=step).as_text()
    assert "contracting_dims = [0] x [0]" in text
    assert "contracting_dims = [0, 1] x [0, 1]" not in text

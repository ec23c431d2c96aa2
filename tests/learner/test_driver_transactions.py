"""A call moves a learner on as a whole or not at all: signals, failures, several threads."""

import copy
import signal
import threading

import brainstate
import catalogue
import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drivers import build_learner, compiled_once, weights_of
from interrupts import Interrupts

import braintrace

CASE = catalogue.BY_NAME["IndRNN"]
XS, TARGETS = map(np.asarray, CASE.sequences(2, 6))
METHODS = pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
LIBRARY = braintrace.__path__[0]


class Runs:
    """A learner, ways to move it on, and a count of the steps that it has made."""

    def __init__(self, learner, through=lambda output: output):
        self.learner = learner
        self.count = brainstate.State(jnp.zeros((), int))
        self.scale = np.float32(1)
        weights = weights_of(self.learner.algorithm.model)

        def step(x, target):
            self.count.value = self.count.value + 1
            return CASE.loss(through(self.learner(x)), target)

        def descend(gradients):
            for path, weight in weights.items():
                change = jax.tree.map(lambda g: 0.1 * g, gradients[path])
                weight.value = jax.tree.map(jnp.subtract, weight.value, change)

        self.step, self.descend = step, descend

    def beginning(self):
        """Return a function that lets all begin again; what is compiled stays."""
        restart = compiled_once(lambda: self.learner)

        def begin():
            restart()
            self.count.value, self.scale = jnp.zeros((), int), np.float32(1)
            return self

        return begin

    def sequences(self, length):
        return self.scale * XS[:length], TARGETS[:length]

    def stream(self):
        functions = {"step_fn": self.step, "update_fn": self.descend}
        return self.learner.etrace_online(*self.sequences(1), **functions)

    def gradient(self, chunk_size=2):
        sequences = self.sequences(4)
        return self.learner.etrace_grad(*sequences, step_fn=self.step, chunk_size=chunk_size)

    def gradient_in_one_chunk(self):
        return self.gradient(chunk_size=4)

    def evolution(self):
        return self.learner.etrace_evolve(self.sequences(4)[0], chunk_size=2)

    def prediction(self):
        return self.learner.predict(self.sequences(4)[0])

    def one_step(self):
        return self.learner(self.sequences(1)[0][0])

    def window(self):
        return self.learner(braintrace.MultiStepData(self.sequences(4)[0]))

    def values(self):
        states = [*self.learner.states().values(), self.count]
        return [jax.tree.map(np.asarray, state.value) for state in states]


DRIVERS = (
    Runs.stream,
    Runs.gradient,
    Runs.gradient_in_one_chunk,
    Runs.evolution,
    Runs.prediction,
    Runs.one_step,
    Runs.window,
)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@compilation.cache
def starting(_):
    return Runs(build_learner(CASE)).beginning()


@pytest.fixture
def twins():
    """Two learners that begin alike; tests share what is compiled for each of them."""
    return [starting(number)() for number in range(2)]


# --- signals


@pytest.mark.by_day("stream", "gradient", "one_step")
@pytest.mark.core
@pytest.mark.parametrize("driver", DRIVERS)
def test_signals_leave_a_completed_step(driver, twins):
    """Before fifty lines of a call, one after the other: the next goes on from there."""
    runs, reference = twins
    whole = Interrupts(None)
    for _ in range(3):
        driver(runs)
        driver(reference)
    assert not whole(lambda: driver(runs))
    driver(reference)
    done = 0
    for number in np.linspace(1, whole.lines, 50, dtype=int):
        driver(runs)  # leaves traces that nobody has read, so that they are updated in place
        driver(reference)
        runs.scale = reference.scale = np.float32(1 + 0.01 * number)
        assert Interrupts(number)(lambda: driver(runs)), number
        found = runs.values()
        if not jax.tree.all(jax.tree.map(np.array_equal, found, reference.values())):
            driver(reference)
            done += 1
        assert_equal(found, reference.values())
    assert 0 < done < 50
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- failures


class Check:
    """Something that a step calls while it runs, and that raises if it is told to."""

    fails = False

    def __call__(self, x):
        if self.fails:
            raise ValueError("the check has failed")
        return np.asarray(x)

    def with_result(self, x):
        return jax.pure_callback(self, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def aside(self, x):
        jax.debug.callback(self, x)
        return x


class Checked(brainstate.nn.Module):
    """A model that checks its input."""

    def __init__(self, check):
        super().__init__()
        self.check = check
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 12).reshape(3, 4))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = jnp.tanh(self.h.value + braintrace.matmul(self.check(x), self.w.value))
        return self.h.value[:, :2]


def checked_model(kind, algorithm):
    def runs(check):
        model = Checked(lambda x: kind(check, x))
        return Runs(braintrace.compile(model, algorithm, XS[0], batch_size=2))

    return runs


def checked_signal(check):
    """A check of what comes back from the loss."""
    checked = jax.custom_vjp(lambda value: value)
    checked.defvjp(lambda value: (value, None), lambda _, signal: (check.with_result(signal),))
    return Runs(build_learner(CASE), checked)


@pytest.mark.by_day("result", "aside")
@pytest.mark.core
@pytest.mark.parametrize(
    ("build", "drivers"),
    [
        (checked_model(Check.with_result, "d_rtrl"), DRIVERS),
        (checked_model(Check.aside, "es_d_rtrl"), (Runs.stream, Runs.evolution, Runs.window)),
        (checked_model(Check.aside, "es_d_rtrl"), DRIVERS),
        (checked_signal, (Runs.stream, Runs.gradient, Runs.gradient_in_one_chunk)),
    ],
    ids=["result", "aside", "aside, every driver", "signal"],
)
def test_a_failing_computation_keeps_the_last_good_values(build, drivers):
    check = Check()
    runs = build(check)
    begin = runs.beginning()

    def values(fails):
        """After each call that has not failed; other calls fail in between, or are not made."""
        begin()
        for driver in drivers:
            for is_failing in (fails, False):
                driver(runs)
                check.fails = is_failing
                if is_failing:
                    with pytest.raises(Exception, match="the check has failed"):
                        driver(runs)
                    check.fails = False
                yield runs.values()

    expected = [jax.tree.map(np.array, found) for found in values(False)]
    for found, wanted in zip(values(True), expected, strict=True):
        assert_equal(found, wanted)


def test_a_computation_that_is_refused_for_nans_keeps_the_last_good_values(twins):
    runs, reference = twins
    for driver in (Runs.stream, Runs.gradient):
        driver(runs)
        driver(reference)
        runs.scale = np.float32(np.nan)
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            driver(runs)
        runs.scale = np.float32(1)
        assert_equal(runs.values(), reference.values())


class AlarmError(Exception):
    """What a handler raises."""


class Alarming:
    """An array whose conversion a signal interrupts."""

    def __array__(self, *_, **__):
        signal.raise_signal(signal.SIGALRM)


def test_what_a_handler_raises_is_no_fault_of_an_argument():
    def raising(*_):
        raise AlarmError

    learner = build_learner(CASE)
    before = signal.signal(signal.SIGALRM, raising)
    try:
        with pytest.raises(AlarmError):
            learner(Alarming())
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_ends_during_its_trace_leaves_no_tracers():
    runs, reference = (Runs(build_learner(CASE)) for _ in range(2))
    for number in (100, 400, 700):
        for driver in DRIVERS[:2]:
            runs.learner = brainstate.graph.clone(runs.learner)  # which has compiled nothing
            interrupt = Interrupts(number)
            assert interrupt(lambda driver=driver: driver(runs))
            assert interrupt.lines < number + 40  # it does not wait for the end of the trace
            assert_equal(runs.values(), reference.values())


# --- threads


@pytest.mark.by_day("gradient")
@pytest.mark.core
@pytest.mark.parametrize("driver", DRIVERS[:2])
def test_two_threads_and_a_reader(driver):
    """The threads do the same steps, so that it does not matter whose turn it is."""
    runs, reference = Runs(build_learner(CASE)), starting(1)()
    problems, done = [], threading.Event()

    def reported(function):
        def called():
            try:
                function()
            except BaseException as error:
                problems.append(error)

        return threading.Thread(target=called, daemon=True)

    def read():
        while not done.is_set():
            for state in runs.learner.states().values():
                for leaf in jax.tree.leaves(state.value):
                    assert np.all(np.isfinite(np.asarray(leaf)))

    def move():
        for _ in range(20):
            driver(runs)

    readers, movers = [reported(read)], [reported(move) for _ in range(2)]
    for thread in (*readers, *movers):
        thread.start()
    for thread in movers:
        thread.join(120)
    done.set()
    readers[0].join(120)
    assert not any(thread.is_alive() for thread in (*readers, *movers))
    assert problems == []
    for _ in range(40):
        driver(reference)
    assert_equal(runs.values(), reference.values())


def test_other_threads_read_what_is_held_while_a_function_is_traced():
    runs, found = Runs(build_learner(CASE)), []
    runs.evolution()
    before = [jax.tree.map(np.asarray, state.value) for state in runs.learner.states().values()]
    step, descend = runs.step, runs.descend

    def read():
        found.append([state.value for state in runs.learner.states().values()])

    def read_by_another_thread():
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(60)

    def reading_step(x, target):
        loss = step(x, target)
        read_by_another_thread()
        return loss

    def reading_descend(gradients):
        descend(gradients)
        read_by_another_thread()

    runs.step, runs.descend = reading_step, reading_descend
    runs.stream()
    assert len(found) >= 2
    for values in found:
        assert_equal(values, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, brainstate.graph.clone])
def test_copies_share_neither_locks_nor_buffers(copied):
    runs = starting(0)()
    runs.gradient()
    twin = copied(runs.learner)
    kept = copy.copy(runs.learner.algorithm.traces)
    again = runs.learner.algorithm.traces.copy()
    expected = jax.tree.map(np.asarray, kept.value)
    assert twin.lock is not runs.learner.lock
    for _ in range(2):
        runs.gradient()
    for traces in (twin.algorithm.traces, kept, again):
        assert_equal(traces.value, expected)


def test_a_callback_reads_what_the_learner_holds():
    """It is called by another thread, while the one that calls the learner waits."""
    seen = []

    def note(x):
        seen.append([np.asarray(leaf) for leaf in jax.tree.leaves(states()[0].value)])

    def noted(output):
        jax.debug.callback(note, output)
        return output

    runs = Runs(build_learner(CASE), noted)

    def states():
        found = runs.learner.states(braintrace.EligibilityTraces)
        return list(found.values())

    runs.stream()
    runs.gradient()
    jax.effects_barrier()
    assert len(seen) == 5

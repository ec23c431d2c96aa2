"""Changes of what a user's function reads: each counts at the next call, and nothing else does."""

import functools
import types

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import pytest
from assertions import assert_gradients_close
from drivers import build_learner, weights_of

import braintrace
from braintrace._learner.calls.function_key import FunctionKeys

CASE = catalogue.BY_NAME["Leaky"]
XS, TARGETS = CASE.sequences(2, 4)


def key(function):
    return FunctionKeys()(function)


def times(factor, gradients):
    return jax.tree.map(lambda g: factor * g, gradients)


class Callable:
    """A callable object of plain Python."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, y):
        return self.factor * y


class Readout(brainstate.nn.Module):
    """A module outside the learner's model."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def update(self, y):
        return self.factor * y


class Derived(Readout):
    def update(self, y):
        return super().update(y)


class ByProperty(Callable):
    @property
    def doubled(self):
        return 2 * self.factor

    def __call__(self, y):
        return self.doubled * y


def decorated(function):
    @functools.wraps(function)
    def called(*arguments):
        return function(*arguments)

    return called


class Wrapped(Readout):
    @decorated
    def update(self, y):
        return self.factor * y


class Outer:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, y):
        return self.inner(y)


def made(part, whole=lambda part: part):
    return types.SimpleNamespace(whole=whole(part), part=part)


CALLED = {
    "object": lambda: made(Callable()),
    "module": lambda: made(Readout()),
    "derived": lambda: made(Derived()),
    "property": lambda: made(ByProperty()),
    "wrapped": lambda: made(Wrapped()),
    "within": lambda: made(Readout(), Outer),
    "layers": lambda: made(Readout(), lambda part: Outer(brainstate.nn.Sequential(part))),
}


@pytest.mark.parametrize("kind", CALLED)
@pytest.mark.parametrize("way", ["itself", "closed over", "default", "partial", "in a list"])
def test_attributes_that_a_called_object_reads_make_another_function(kind, way):
    pair = CALLED[kind]()

    def now():
        called = pair.whole
        if way == "itself":
            return key(called)
        if way == "default":
            return key(lambda x, called=called: called(x))
        if way == "partial":
            return key(functools.partial(call, called))
        if way == "in a list":
            return key(lambda x: [each(x) for each in several])
        return key(lambda x: called(x))

    def call(called, x):
        return called(x)

    several = [pair.whole]
    before = now()
    assert now() == before
    pair.part.factor = 2.0
    assert now() != before
    pair.part.factor = 1.0
    assert now() == before
    pair.part.epoch = 1  # which no call reads
    assert now() == before


def test_objects_that_refer_to_one_another_end():
    one, other = Outer(None), Outer(None)
    one.inner, other.inner = other, one
    one.method = one.__call__
    before = key(one)
    assert key(one) == before
    other.inner = other
    assert key(one) != before


class Training:
    """A loop that trains in ``__call__``, and counts what its loss does not read."""

    def __init__(self, learner):
        self.learner, self.epoch = learner, 0

    def loss(self, x, target):
        return CASE.loss(self.learner(x), target)

    def __call__(self):
        self.epoch += 1
        return self.learner.etrace_grad(XS, TARGETS, step_fn=self.loss)


def test_a_loop_that_trains_is_not_called_by_its_loss():
    training = Training(build_learner(CASE))
    keys = {key(training.loss)}
    for _ in range(3):
        training()
        keys.add(key(training.loss))
    assert len(keys) == 1


def test_a_learner_is_not_looked_into():
    learner = build_learner(CASE)
    ways = [lambda x: learner(x), lambda x: learner.update(x), lambda x: learner.algorithm(x)]
    keys = FunctionKeys()
    before = [keys(way) for way in ways]
    learner.algorithm.window = 7
    learner.algorithm.traces = types.SimpleNamespace()
    assert [keys(way) for way in ways] == before


# --- in the methods of a learner


class Calls:
    """Calls of a learner whose step function is given, and a count of its traces."""

    def __init__(self, factor_of):
        self.learner, self.traced = build_learner(CASE), 0
        self.weights = weights_of(self.learner.algorithm.model)
        self._factor_of, self.sign = factor_of, 1.0

    def step(self):
        def step(x, target):
            self.traced += 1
            return self.sign * self._factor_of(CASE.loss(self.learner(x), target))

        return step

    def gradient(self):
        self.learner.reset_state(2)
        return self.learner.etrace_grad(XS, TARGETS, step_fn=self.step())

    def functional(self):
        self.learner.reset_state(2)
        pure = self.learner.functional()
        return pure.grad(pure.state(), XS, TARGETS, step_fn=self.step())[1]

    def stream(self):
        self.learner.reset_state(2)
        return self.learner.etrace_online(
            XS, TARGETS, step_fn=self.step(), update_fn=lambda gradients: None
        )


METHODS = [Calls.gradient, Calls.functional, Calls.stream]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


@each_method
@pytest.mark.parametrize("kind", ["object", "module", "layers"])
def test_a_changed_attribute_counts_in_the_next_call(method, kind):
    pair = CALLED[kind]()
    calls = Calls(pair.whole)
    once = method(calls)
    count = calls.traced
    assert_gradients_close(method(calls), once, 0)
    assert calls.traced == count
    pair.part.factor = 2.0
    assert_gradients_close(method(calls), times(2, once), 1e-5)
    count = calls.traced
    pair.part.factor = 1.0
    assert_gradients_close(method(calls), once, 0)
    assert calls.traced == count


class Counting(Readout):
    """A readout that writes attributes while it is traced: a count, a memo, the last value."""

    def __init__(self):
        super().__init__()
        self.calls, self.table, self.last = 0, None, None

    def update(self, y):
        self.calls += 1
        self.table = {self.calls: y.shape}
        self.last = super().update(y)
        return self.last


@each_method
def test_attributes_that_a_trace_writes_do_not_compile_again(method):
    readout = Counting()
    calls, others = Calls(readout), Calls(readout)

    def run():
        for each in (calls, others):
            for each.sign in (1.0, -1.0):  # two functions, of which each counts for the other
                method(each)
        return calls.traced, others.traced

    run()
    counts = run()  # a learner meets the writes of another one at its first call
    assert max(counts) <= 4
    assert run() == run() == counts
    readout.factor = 2.0
    assert min(run()) > max(counts)


class Watched(brainstate.nn.Module):
    """A model that keeps its last output as an attribute."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.last = None

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        self.last = self.h.value
        return self.last


def test_a_model_does_not_run_when_a_function_reads_it():
    model, xs, traced = Watched(), jnp.ones((4, 2, 3)), []
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)

    def step(x):
        traced.append(x)
        return learner(x).sum() + model.h.value.sum()

    learner.etrace_grad(xs, step_fn=step)
    count = len(traced)
    learner.etrace_grad(xs, step_fn=step)
    assert len(traced) == count

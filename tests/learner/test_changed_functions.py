"""Changes of what a user's function reads: each counts at the next call, and nothing else does."""

import functools
import types

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
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


class Settings:
    def __init__(self):
        self.factor = 1.0


def scaled(settings, y):
    return settings.factor * y


def scaled_twice(settings, y):
    return scaled(settings, scaled(settings, y))


class Trainer:
    """An object whose step gives its settings to other functions."""

    def __init__(self, settings):
        self.settings = settings

    def loss(self, settings, y):
        return settings.factor * y

    def through_a_method(self, y):
        return self.loss(self.settings, y)

    def through_a_function(self, y):
        return scaled_twice(self.settings, y)


def closing_over(settings, helper):
    return lambda y: helper(settings, y)


HANDED_ON = {
    "to a function": lambda settings: lambda y: scaled(settings, y),
    "to a function in a function": lambda settings: lambda y: scaled_twice(settings, y),
    "to a closed-over function": lambda settings: closing_over(settings, scaled),
    "by a method to a method": lambda settings: Trainer(settings).through_a_method,
    "by a method to a function": lambda settings: Trainer(settings).through_a_function,
}


@pytest.mark.parametrize("way", HANDED_ON)
def test_attributes_that_another_function_reads_make_another_function(way):
    settings = Settings()
    function = HANDED_ON[way](settings)
    before = key(function)
    settings.unread = 1
    assert key(function) == before
    settings.factor = 2.0
    assert key(function) != before


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


@pytest.mark.by_day("object-gradient", "module-stream", "layers-gradient", "layers-functional")
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


@pytest.mark.by_day("gradient", "functional")
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


class MadeAtFirst(Readout):
    """A readout whose factor is made when it is first needed."""

    made = None

    def update(self, y):
        if self.made is None:
            self.made = 1.0 * self.factor
        return self.made * y


@pytest.mark.by_day("gradient", "stream")
@each_method
def test_what_a_trace_has_written_counts_once_the_user_has_changed_it(method):
    readout = MadeAtFirst()
    calls = Calls(readout)
    once = method(calls)
    for made in (2.0, 3.0, 2.0):
        readout.made = made
        assert_gradients_close(method(calls), times(made, once), 1e-5)
    readout.factor, readout.made = 4.0, None
    assert_gradients_close(method(calls), times(4, once), 1e-5)
    count = calls.traced
    assert_gradients_close(method(calls), times(4, once), 1e-5)
    assert calls.traced == count


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


# --- the environment


def by_flag(y):
    return (2.0 if brainstate.environ.get("fit", False) else 1.0) * y


def by_number(y):
    return brainstate.environ.get("gain", 1.0) * y


def by_dt(y):
    return brainstate.environ.get("gain", 1.0 * u.ms) / u.ms * y


@pytest.mark.by_day("flag-gradient", "number-gradient", "array-functional", "quantity-stream")
@each_method
@pytest.mark.parametrize(
    ("factor_of", "values"),
    [
        (by_flag, [None, True, False]),
        (by_number, [None, 2.0, 1.0]),
        (by_number, [None, np.float32(2), np.float32(1)]),
        (by_dt, [1.0 * u.ms, 2.0 * u.ms, None]),
    ],
    ids=["flag", "number", "array", "quantity"],
)
def test_a_value_of_the_environment_that_changes_counts_in_the_next_call(method, factor_of, values):
    calls, name = Calls(factor_of), "fit" if factor_of is by_flag else "gain"
    found = []
    for value in (*values, *values):
        with brainstate.environ.context(**({} if value is None else {name: value})):
            found.append(method(calls))
            count = calls.traced
            method(calls)
            assert calls.traced == count
    doubled = times(2, found[0])
    for index, expected in enumerate([found[0], doubled, found[0]] * 2):
        assert_gradients_close(found[index], expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gain", np.ones(1)), ("gain", {0: 1.0}), ("gain", [1.0]), ("table", {0: 1.0, "kind": "x"})],
    ids=["array", "dict", "list", "mixed"],
)
def test_a_value_of_the_environment_that_changes_in_place_counts(name, settings):
    calls, found = Calls(lambda y: brainstate.environ.get(name)[0] * y), []
    with brainstate.environ.context(**{name: settings}):
        for value in (1.0, 2.0, 1.0):
            settings[0] = value
            found.append(calls.gradient())
    for factor, gradient in zip((1, 2, 1), found, strict=True):
        assert_gradients_close(gradient, times(factor, found[0]), 1e-5)


def test_dropout_outside_the_model_follows_the_flag():
    dropout = brainstate.nn.Dropout(0.5)
    calls = Calls(lambda loss: (dropout(jnp.ones(100)) == 1).mean() * loss)
    with brainstate.environ.context(fit=True):
        assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(calls.gradient()))
    with brainstate.environ.context(fit=False):
        assert all(jnp.any(leaf) for leaf in jax.tree.leaves(calls.gradient()))


@each_method
def test_numbers_that_no_function_reads_do_not_compile_again(method):
    calls = Calls(by_flag)
    for index in range(2):  # the second call traces once more, to see what is read
        with brainstate.environ.context(i=index, t=0.1 * index * u.ms):
            first = method(calls)
    count = calls.traced
    for index in range(2, 5):
        with brainstate.environ.context(i=index, t=0.1 * index * u.ms):
            assert_gradients_close(method(calls), first, 0)
    method(calls)
    assert calls.traced == count


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("factor_of", "is_read"), [(by_number, True), (by_flag, False)])
def test_a_number_of_an_enclosing_transformation_is_an_input(factor_of, is_read, is_first):
    plain, calls = Calls(lambda loss: loss).gradient(), Calls(factor_of)
    if not is_first:
        assert_gradients_close(calls.gradient(), plain, 0)
    pure = calls.learner.functional()

    @jax.jit
    def gradient(state, gain):
        with brainstate.environ.context(gain=gain):
            return pure.grad(state, XS, TARGETS, step_fn=calls.step())[1]

    for gain in (1.0, 2.0):
        calls.learner.reset_state(2)
        expected = times(gain, plain) if is_read else plain
        assert_gradients_close(gradient(pure.state(), gain), expected, 1e-5)
    assert_gradients_close(calls.gradient(), plain, 1e-6)


@pytest.mark.parametrize("method", [Calls.gradient, Calls.stream])
def test_looking_for_what_is_read_leaves_states_as_they_are(method):
    own = brainstate.State(jnp.zeros(()))

    def counted(y):
        own.value = own.value + 1.0
        return by_number(y)

    calls = Calls(counted)
    for gain in (1.0, 2.0):
        with brainstate.environ.context(gain=gain):
            method(calls)
    assert float(own.value) == 2 * len(XS)


def test_a_number_that_changes_at_every_call_and_is_read_warns():
    calls = Calls(by_number)
    with pytest.warns(braintrace.RecompilationWarning, match="brainstate.environ"):
        for gain in range(1, 6):
            with brainstate.environ.context(gain=float(gain)):
                calls.gradient()

"""What is compiled again: functions that do something else, and no others."""

import functools
import gc
import types
import warnings
import weakref

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import build_learner, weights_of

import braintrace
from braintrace._learner.calls import compilations
from braintrace._learner.calls.function_key import FunctionKeys

CASE = catalogue.BY_NAME["Leaky"]
XS, TARGETS = CASE.sequences(2, 4)

rate = 1.0


def key(function):
    return FunctionKeys()(function)


def by_module(x):
    return rate * x


class Scale:
    def __init__(self, factor):
        self.factor = factor
        self.calls = 0

    def method(self, x):
        self.calls += 1
        return self.factor * x

    def anew(self):
        return lambda x: self.factor * x


def closed_over(value):
    return lambda x: value * x


def default(value):
    return lambda x, value=value: value * x


def keyword_default(value):
    def function(x, *, value=value):
        return value * x

    return function


def in_function(value):
    inner = closed_over(value)
    return lambda x: inner(x)


def in_comprehension(value):
    return lambda xs: [value * x for x in xs]


def partial(value):
    return functools.partial(lambda factor, x: factor * x, value)


WAYS = [closed_over, default, keyword_default, in_function, in_comprehension, partial]


@pytest.mark.parametrize("way", WAYS)
def test_functions_are_what_they_read(way):
    array, other = jnp.ones(2), jnp.ones(2)
    assert key(way(array)) == key(way(array))
    assert hash(key(way(array))) == hash(key(way(array)))
    assert key(way(array)) != key(way(other))
    assert key(way((1.5, "a"))) == key(way((3 / 2, "a")))
    values = [1, 1.0, True, 0.0, -0.0, "1", None, np.float32(1), (1,), (1.0,), jnp.sin]
    keys = {key(way(value)) for value in values}
    assert len(keys) == len(values)
    assert len({key(w(1.0)) for w in WAYS}) == len(WAYS)


def test_methods_are_their_object_and_function():
    scale, other = Scale(2.0), Scale(2.0)
    assert key(scale.method) == key(scale.method)
    assert key(scale.method) != key(other.method)
    assert key(scale.anew()) == key(scale.anew()) != key(other.anew())


@pytest.mark.parametrize("way", ["method", "anew", "inner"])
def test_attributes_that_a_function_reads_make_another_function(way):
    scale = Scale(2.0)
    scale.inner = types.SimpleNamespace(factor=3.0)

    def inner():
        return lambda x: scale.inner.factor * x

    def now():
        return key(scale.method if way == "method" else inner() if way == "inner" else scale.anew())

    before = now()
    assert now() == before
    owner = scale.inner if way == "inner" else scale
    owner.factor = 5.0
    assert now() != before
    owner.factor = 2.0 if way != "inner" else 3.0
    scale.epoch = 1  # which the function does not read
    assert now() == before


def test_a_changed_attribute_of_a_step_function_counts_in_the_next_gradient():
    learner = build_learner(CASE)

    class Loss:
        scale = 1.0

        def step(self, x, target):
            return self.scale * CASE.loss(learner(x), target)

    loss = Loss()
    once, twice = [], []
    for gradients, scale in ((once, 1.0), (twice, 2.0)):
        loss.scale = scale
        for step in (loss.step, lambda x, target: loss.step(x, target)):
            learner.reset_state()
            gradients.append(Calls(learner).gradient(step_fn=step))
    assert_gradients_close(twice, jax.tree.map(lambda g: 2 * g, once), 1e-5)


def test_closed_over_variables_that_are_bound_anew_make_another_function():
    keys, value = FunctionKeys(), 1.0

    def reading(x):
        return value * x

    before = keys(reading)
    assert keys(reading) is before
    value = 2.0
    assert keys(reading) != before
    value = 1.0
    assert keys(reading) == before


def test_a_variable_without_a_value_yet_hides_no_other():
    value = 1.0

    def reading(x):
        return value * x if x is not None else later

    before = key(reading)
    assert key(reading) == before
    value = 2.0
    changed = key(reading)
    assert changed != before
    later = 3.0
    assert key(reading) not in (before, changed)


def test_globals_are_no_part_of_a_function_as_in_jax_jit(monkeypatch):
    before = key(by_module)
    monkeypatch.setitem(globals(), "rate", 2.0)
    assert key(by_module) == before


WITHIN = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "branch": lambda step: lambda *slices: jax.lax.cond(True, step, lambda *_: 0.0, *slices),
    "brainstate": brainstate.transform.jit,
}


@pytest.mark.parametrize("call", ["gradient", "stream"])
@pytest.mark.parametrize("within", WITHIN)
def test_a_learner_called_in_a_transformation_of_the_step_function_is_refused(within, call):
    learner = build_learner(CASE)
    before = {path: state.value for path, state in learner.states().items()}

    def step(x, target):
        return CASE.loss(learner(x), target)

    with pytest.raises(braintrace.OptionError, match="compiled function, branch or loop"):
        getattr(Calls(learner), call)(step_fn=WITHIN[within](step))
    for path, state in learner.states().items():
        jax.tree.map(np.testing.assert_array_equal, state.value, before[path])


class Counted:
    """A callable object whose class says which objects equal it."""

    def __init__(self, number):
        self.number = number

    def __call__(self, x):
        return self.number * x

    def __eq__(self, other):
        return isinstance(other, Counted) and self.number == other.number

    def __hash__(self):
        return hash(self.number)


def test_objects_are_what_their_class_says():
    assert key(Counted(1)) == key(Counted(1)) != key(Counted(2))


@pytest.mark.parametrize("call", ["gradient", "stream"])
def test_a_function_that_counts_its_traces_compiles_once(call):
    learner, count = build_learner(CASE), 0

    def step(x, target):
        nonlocal count
        count += 1
        return CASE.loss(learner(x), target)

    run = getattr(Calls(learner), call)
    run(step_fn=step)
    first = count
    assert first
    for _ in range(5):
        run(step_fn=step)
    assert count == first


def test_a_function_may_call_itself():
    def first(x):
        return second(x)

    def second(x):
        return first(x)

    assert key(first) == key(first) != key(second)


class Calls:
    """Calls with functions that are made anew, and a count of how often one is traced."""

    def __init__(self, learner=None):
        self.learner = build_learner(CASE) if learner is None else learner
        self.weights = weights_of(self.learner.algorithm.model)
        self.traced = []

    def gradient(self, scale=1.0, length=4, step_fn=None, **options):
        traced, learner = self.traced, self.learner

        def step(x, target):
            traced.append(scale)
            return scale * CASE.loss(learner(x), target)

        return learner.etrace_grad(
            XS[:length], TARGETS[:length], step_fn=step_fn or step, **options
        )

    def stream(self, scale=1.0, length=4, step_fn=None, **options):
        traced, learner, weights = self.traced, self.learner, self.weights

        def update(gradients):
            traced.append(scale)
            for path, weight in weights.items():
                change = jax.tree.map(lambda g: -1e-3 * scale * g, gradients[path])
                weight.value = jax.tree.map(jnp.add, weight.value, change)

        return learner.etrace_online(
            XS[:length],
            TARGETS[:length],
            step_fn=step_fn or (lambda x, target: CASE.loss(learner(x), target)),
            update_fn=update,
            **options,
        )


@pytest.mark.core
@pytest.mark.parametrize("call", [Calls.gradient, Calls.stream])
def test_functions_made_anew_compile_once(call):
    calls = Calls()
    first = call(calls)
    count = len(calls.traced)
    assert count
    for _ in range(20):
        calls.learner.reset_state(2)
        last = call(calls)
    assert len(calls.traced) == count
    assert jax.tree.structure(last) == jax.tree.structure(first)
    calls.learner.reset_state(2)
    doubled = call(calls, 2.0)
    assert calls.traced == [1.0] * count + [2.0] * count
    call(calls, 1.0)
    assert len(calls.traced) == 2 * count
    if call is Calls.gradient:
        calls.learner.reset_state(2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b), doubled, call(calls))


def test_clones_compile_for_themselves():
    calls = Calls()
    calls.gradient()
    count = len(calls.traced)
    twin = Calls(brainstate.graph.clone(calls.learner))
    found, expected = twin.gradient(), calls.gradient()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(calls.traced) == len(twin.traced) == count
    assert not twin.learner.parts.drivers.is_of(calls.learner)


def test_what_is_compiled_is_bounded(monkeypatch):
    monkeypatch.setattr(compilations, "MOST_KEPT", 2)
    calls = Calls()
    kept = []

    def call(scale):
        weight = Scale(scale)  # what a function closes over lives as long as its program
        kept.append(weakref.ref(weight))

        def step(x, target):
            calls.traced.append(weight.factor)
            return weight.factor * CASE.loss(calls.learner(x), target)

        calls.learner.etrace_grad(XS, TARGETS, step_fn=step)

    for scale in (1.0, 2.0, 3.0, 4.0):
        call(scale)
    gc.collect()
    assert [reference() is None for reference in kept] == [True, True, False, False]


WARNING = braintrace.RecompilationWarning


CHANGES = {
    "variable": [{"scale": float(n)} for n in range(4)],
    "length": [{"length": n} for n in (1, 2, 3, 4)],
    "option": [
        {},
        {"reset": np.zeros(4, bool)},
        {"unit_aware": True},
        {"unit_aware": True, "reset": np.zeros(4, bool)},
    ],
}


@pytest.mark.by_day("length-stream", "option-gradient")
@pytest.mark.parametrize("call", [Calls.gradient, Calls.stream], ids=lambda call: call.__name__)
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_the_fourth_compilation_of_a_line_warns(call, options):
    calls = Calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WARNING)
        for some in (*options[:3], *options[:3]):
            call(calls, **some)
    line = rf"`step_fn` of {__file__}:\d+ is compiled for the fourth time"
    with pytest.warns(WARNING, match=line) as found:
        call(calls, **options[3])
    assert found[0].filename == __file__

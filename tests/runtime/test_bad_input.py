"""Models, states and surroundings that cannot be used: the error says what, and nothing changes.

Wrong arguments of calls are in `wrong_calls`.
"""

import dataclasses

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_same_bits
from drivers import build_learner, snapshot
from models import small

import braintrace

CASE = catalogue.BY_NAME["Leaky"]


@pytest.fixture
def learner():
    """A learner that has seen a few steps, so that states and traces are not at their start."""
    instance = build_learner(CASE)
    instance.etrace_evolve(CASE.sequences(2, 3)[0])
    return instance


@pytest.fixture
def raises(learner):
    """Check an error's family and words, and that states and traces are what they were."""

    def check(call, *words, builtin=ValueError):
        before = snapshot(learner)
        with pytest.raises(braintrace.BraintraceError) as caught:
            call()
        message = str(caught.value)
        assert isinstance(caught.value, builtin)
        assert [word for word in words if word not in message] == [], message
        assert_same_bits(snapshot(learner), before)

    return check


def gradient(learner, xs, targets, **options):
    options = {"step_fn": lambda x, target: CASE.loss(learner(x), target), **options}
    return learner.etrace_grad(xs, targets, **options)


# --- step functions -----------------------------------------------------------------------


def test_step_function_that_cannot_be_hashed(learner, raises):
    @dataclasses.dataclass
    class Step:
        scale: float

        def __call__(self, x, target):
            return self.scale * CASE.loss(learner(x), target)

    xs, targets = CASE.sequences(2, 6)
    raises(lambda: learner.etrace_grad(xs, targets, step_fn=Step(2.0)), "Step", "__hash__")


# --- states and weights -------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:`predict` has already run"
)  # every method runs on the same inputs
def test_states_of_another_shape_dtype_or_unit(learner, raises):
    """Whether or not the driver is compiled already, and whatever it is."""
    xs, targets = CASE.sequences(2, 6)

    def step(x, target):
        return CASE.loss(learner(x), target)

    drivers = (
        lambda: learner.etrace_grad(xs, targets, step_fn=step),
        lambda: learner.etrace_grad(xs, targets, step_fn=step, chunk_size=2),
        lambda: learner.etrace_online(xs, targets, step_fn=step, update_fn=lambda gradients: None),
        lambda: learner.etrace_evolve(xs),
        lambda: learner.predict(xs),
        lambda: learner(xs[0]),
    )
    model = learner.algorithm.model
    wrong = (
        (model.h, jnp.zeros((5, 4)), ("'h'", "5, 4", "2, 4")),
        (model.h, jnp.zeros((2, 4), jnp.float16), ("'h'", "float16", "float32")),
        (model.h, jnp.zeros((2, 4)) * u.mV, ("'h'", "mV")),
        (model.w_in, jnp.ones((3, 4), jnp.int32), ("'w_in'", "int32", "float32")),
        (model.w_in, jnp.ones((3, 4), jnp.float16), ("'w_in'", "float16", "float32")),
        (model.w_in, jnp.ones((3, 5)), ("'w_in'", "3, 5", "3, 4")),
    )
    for is_compiled in (False, True):
        if is_compiled:
            for driver in drivers:
                driver()
        for state, value, words in wrong:
            good, state.value = state.value, value
            for driver in drivers:
                raises(driver, *words)
            state.value = good
    for driver in drivers:
        driver()


def test_a_mask_whose_sum_is_beyond_its_own_dtype(learner):
    """Only ratios of weights matter, in half precision too."""
    xs, targets = CASE.sequences(2, 6)
    states, traces = snapshot(learner)
    found = []
    for mask in (np.ones(6), np.full(6, 6e4, np.float16), np.full(6, 1e37, np.float32)):
        found.append(gradient(learner, xs, targets, mask=mask))
        learner.algorithm.model.h.value = states[("h",)]
        learner.algorithm.traces.value = traces
    for gradients in found[1:]:
        for path, expected in found[0].items():
            np.testing.assert_allclose(gradients[path], expected, rtol=1e-5, atol=1e-7)


# --- restored traces ----------------------------------------------------------------------


def restored(traces, value):
    traces.value = value


def restored_at_once(traces, value):
    traces.restore_value(value)


def restored_with_the_others(traces, value):
    reference = traces.to_state_ref()
    traces.update_from_ref(type(reference)(reference.type, value, **reference.get_metadata()))


RESTORE = (restored, restored_at_once, restored_with_the_others)


def half(traces):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), traces)


@pytest.mark.core
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_traces_that_do_not_belong(algorithm):
    """They are refused with all that differs, and those that are held stay."""
    learner = build_learner(CASE, algorithm)
    xs, targets = CASE.sequences(2, 6)
    learner.etrace_evolve(xs[:3])
    saved = jax.tree.map(np.asarray, learner.algorithm.traces.value)
    others = {"es_d_rtrl": "d_rtrl", "d_rtrl": "es_d_rtrl"}
    three = build_learner(CASE, algorithm, batch=3).algorithm.traces.value
    first = sorted(saved)[0]
    wrong = [
        ({}, (f"'{first}", "is missing")),
        (None, ("None", "dict")),
        (0, ("0", "dict")),
        (list(saved.values()), ("list", "dict")),
        ({key: saved[key] for key in saved if key != first}, (f"'{first}", "is missing")),
        ({**saved, first: None}, (f"'{first}",)),
        ({**saved, "extra": jnp.ones(2)}, ("'extra' is unexpected",)),
        (half(saved), ("bfloat16", "float32")),
        (three, ("(3, ", "(2, ", "reset_state")),
        (build_learner(CASE, others[algorithm]).algorithm.traces.value, ("unexpected", "missing")),
    ]
    if algorithm == "es_d_rtrl":
        slower = build_learner(CASE, algorithm, decay_or_rank=0.5).algorithm.traces.value
        wrong.append((slower, ("made with decay=0.5; this algorithm has decay=0.9",)))
    before = snapshot(learner)
    for restore in RESTORE:
        for value, words in wrong:
            with pytest.raises(braintrace.ShapeError) as caught:
                restore(learner.algorithm.traces, value)
            message = str(caught.value)
            assert [word for word in words if word not in message] == [], message
    assert_same_bits(snapshot(learner), before)
    expected = gradient(learner, xs[3:], targets[3:])
    hidden = before[0][("h",)]
    for restore in RESTORE:
        learner.reset_state()
        learner.algorithm.model.h.value = hidden
        restore(learner.algorithm.traces, saved)
        assert_same_bits(gradient(learner, xs[3:], targets[3:]), expected)


def compile_with(name, value):
    model = CASE.build()
    getattr(model, name).value = value
    return braintrace.compile(model, "d_rtrl", jnp.zeros((2, 3)), batch_size=2)


@pytest.mark.core
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite(bad):
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = bad
    with pytest.raises(braintrace.BraintraceError) as caught:
        compile_with("w_in", jnp.asarray(weight))
    assert "'w_in'" in str(caught.value) and "(3, 4)" in str(caught.value)


@pytest.mark.core
def test_integer_weights_are_named():
    with pytest.raises(braintrace.DtypeError) as caught:
        compile_with("w_in", jnp.ones((3, 4), jnp.int32))
    message = str(caught.value)
    assert [w for w in ("'w_in'", "(3, 4)", "int32") if w not in message] == [], message


# --- models -------------------------------------------------------------------------------


@small({}, w=np.ones((3, 4)))
def no_hidden_state(self, x):
    """A layer without memory."""
    return braintrace.matmul(x, self.w.value)


@small({"h": (4,)}, w=np.ones((3, 4)))
def no_marked_operation(self, x):
    """A leaky integrator in plain JAX."""
    self.h.value = 0.9 * self.h.value + x @ self.w.value
    return self.h.value


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "mark", "words"),
    [
        (no_hidden_state, None, ("no_hidden_state", "HiddenState")),
        (no_marked_operation, "explicit", ("no_marked_operation", "h", "braintrace.matmul")),
    ],
)
def test_models_with_nothing_to_learn_online(model, mark, words):
    with pytest.raises(braintrace.CompilationError) as caught:
        braintrace.compile(model(), "d_rtrl", jnp.zeros((2, 3)), batch_size=2, mark=mark)
    assert [word for word in words if word not in str(caught.value)] == []


# --- the environment ----------------------------------------------------------------------


class Timed(brainstate.nn.Module):
    """Reads the time and, through dropout, whether it is fitted."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.drop = brainstate.nn.Dropout(0.5)

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        drive = jnp.cos(brainstate.environ.get("t")) * braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value + self.drop(drive)
        return self.h.value


def test_a_changed_environment_that_the_step_reads():
    xs, context = jnp.ones((5, 2, 3)), brainstate.environ.context
    with context(t=0.0, fit=True):
        learner = braintrace.compile(Timed(), "d_rtrl", xs[0], batch_size=2)

    def step(x):
        return learner(x).sum()

    def step_at(t, x):
        with context(t=t):
            return step(x)

    runs = (
        lambda: learner.etrace_grad(jnp.arange(5.0), xs, step_fn=step_at),
        lambda: learner.etrace_grad(xs, step_fn=step),
        lambda: learner.etrace_online(xs, step_fn=step, update_fn=lambda gradients: None),
        lambda: learner.predict(xs),
        lambda: learner.etrace_evolve(xs),
        lambda: learner(xs[0]),
    )
    with context(t=0.0, fit=True, other=3):  # as when it was compiled, as far as it is read
        for run in runs[1:]:
            run()
    before = snapshot(learner)
    for changed in ({"t": 1.0, "fit": True}, {"t": 0.0, "fit": False}):
        key = "t" if changed["t"] else "fit"
        with context(**changed):
            for run in runs[1:]:
                with pytest.raises(braintrace.NotCompiledError, match=f"reads '{key}'.*argument"):
                    run()
    with context(fit=True), pytest.raises(braintrace.NotCompiledError, match="reads 't'"):
        runs[0]()
    assert_same_bits(snapshot(learner), before)
    with context(t=0.0, fit=True):
        for run in runs[1:]:
            run()

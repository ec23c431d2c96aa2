"""Bad input raises the library's own errors, says what and where, and changes nothing."""

import dataclasses

import brainstate
import cases
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_same_bits
from drivers import build_learner, snapshot

import braintrace

CASE = cases.BY_NAME["leaky"]


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


# --- sequences ----------------------------------------------------------------------------


@pytest.mark.core
def test_time_axes_that_differ(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets[:5]), "(6, 2, 3)", "(5, 2, 2)")


@pytest.mark.core
def test_empty_sequence(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs[:0], targets[:0]), "(0, 2, 3)", "(0, 2, 2)")
    raises(lambda: learner.etrace_evolve(xs[:0]), "(0, 2, 3)")


def test_no_sequence(learner, raises):
    raises(lambda: learner.etrace_grad(step_fn=lambda: learner(jnp.zeros((2, 3))).sum()))
    raises(lambda: learner.etrace_evolve())


@pytest.mark.core
def test_another_batch_size_than_the_states(learner, raises):
    xs, targets = CASE.sequences(5, 6)
    words = ("(5, 3)", "(2, 3)", "'h'", "(2, 4)")
    raises(lambda: gradient(learner, xs, targets), *words)
    raises(lambda: learner.etrace_evolve(xs), *words)
    raises(lambda: learner(xs[0]), *words)


def test_another_number_of_features(learner, raises):
    raises(lambda: learner.etrace_evolve(jnp.zeros((6, 2, 7))), "(2, 7)", "(2, 3)")


def test_another_number_of_arguments(learner, raises):
    xs = CASE.sequences(2, 6)[0]
    raises(lambda: learner.etrace_evolve(xs, xs))


def test_mask_of_another_length(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets, mask=jnp.ones(5)), "(5,)", "(6,)")


# --- options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"chunk_size": 0},
        {"chunk_size": -2},
        {"chunk_size": 1.5},
        {"chunk_size": "large"},
        {"reduction": "median"},
    ],
    ids=str,
)
def test_option_of_etrace_grad(learner, raises, option):
    ((name, value),) = option.items()
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets, **option), name, repr(value))


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        ("bptt", {}, ("'bptt'", "d_rtrl", "es_d_rtrl")),
        ("d_rtrl", {"vjp_method": "no-step"}, ("vjp_method", "'no-step'", "multi-step")),
        ("d_rtrl", {"decay_or_rank": 0.9}, ("decay_or_rank",)),
        ("es_d_rtrl", {"decay_or_rank": 1.0}, ("decay_or_rank", "1.0")),
        ("es_d_rtrl", {"decay_or_rank": -0.1}, ("decay_or_rank", "-0.1")),
        ("es_d_rtrl", {"decay_or_rank": 0}, ("decay_or_rank", "0")),
        ("es_d_rtrl", {"decay_or_rank": "fast"}, ("decay_or_rank", "'fast'")),
        ("es_d_rtrl", {"decay_or_rank": float("nan")}, ("decay_or_rank", "nan")),
    ],
)
def test_option_of_compile(algorithm, options, words):
    with pytest.raises(braintrace.OptionError) as caught:
        build_learner(CASE, algorithm, **options)
    assert [word for word in words if word not in str(caught.value)] == []


# --- step functions -----------------------------------------------------------------------


@pytest.mark.core
def test_step_function_that_calls_the_learner_twice(learner, raises):
    xs, targets = CASE.sequences(2, 6)

    def twice(x, target):
        return CASE.loss(learner(x) + learner(x), target)

    raises(lambda: gradient(learner, xs, targets, step_fn=twice), "step_fn", "once", "2")


@pytest.mark.core
def test_step_function_that_does_not_call_the_learner(learner, raises):
    xs, targets = CASE.sequences(2, 6)

    def never(x, target):
        return target.sum()

    raises(lambda: gradient(learner, xs, targets, step_fn=never), "step_fn", "once", "0")


def test_step_function_that_calls_another_learner(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    other = build_learner(CASE)
    raises(lambda: gradient(learner, xs, targets, step_fn=lambda x, t: CASE.loss(other(x), t)))


def test_step_function_that_cannot_be_hashed(learner, raises):
    @dataclasses.dataclass
    class Step:
        scale: float

        def __call__(self, x, target):
            return self.scale * CASE.loss(learner(x), target)

    xs, targets = CASE.sequences(2, 6)
    raises(lambda: learner.etrace_grad(xs, targets, step_fn=Step(2.0)), "Step", "__hash__")


def test_loss_that_is_no_scalar(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets, step_fn=lambda x, t: learner(x) - t), "(2, 2)")


def test_error_of_the_step_function_itself(learner):
    """It passes through, and the learner can be used afterwards."""
    xs, targets = CASE.sequences(2, 6)
    before = snapshot(learner)

    def broken(x, target):
        learner(x)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        gradient(learner, xs, targets, step_fn=broken)
    assert_same_bits(snapshot(learner), before)
    gradient(learner, xs, targets)


# --- states and weights -------------------------------------------------------------------


@pytest.mark.core
def test_call_before_compile_graph():
    algorithm = braintrace.D_RTRL(CASE.build())
    for call in (lambda: algorithm(jnp.zeros((2, 3))), lambda: algorithm.graph):
        with pytest.raises(braintrace.NotCompiledError, match="compile_graph"):
            call()


def test_states_of_another_shape(learner, raises):
    learner.algorithm.model.h.value = jnp.zeros((5, 4))
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets), "'h'", "(5, 4)", "(2, 4)")
    raises(lambda: learner(xs[0]), "'h'", "(5, 4)", "(2, 4)")


@pytest.mark.parametrize("value", [np.ones((3, 4), np.int32), np.ones((3, 4), np.float16)])
def test_weights_that_change_their_dtype(learner, raises, value):
    learner.algorithm.model.w_in.value = jnp.asarray(value)
    xs, targets = CASE.sequences(2, 6)
    raises(lambda: gradient(learner, xs, targets), "'w_in'", str(value.dtype), "float32")


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
def test_integer_weights():
    with pytest.raises(braintrace.DtypeError) as caught:
        compile_with("w_in", jnp.ones((3, 4), jnp.int32))
    message = str(caught.value)
    assert [w for w in ("'w_in'", "(3, 4)", "int32") if w not in message] == [], message


# --- models -------------------------------------------------------------------------------


class NoHiddenState(brainstate.nn.Module):
    """A layer without memory."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))

    def update(self, x):
        return braintrace.matmul(x, self.w.value)


class NoMarkedOperation(brainstate.nn.Module):
    """A leaky integrator in plain JAX."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))

    def init_state(self, batch_size=1, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + x @ self.w.value
        return self.h.value


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NoHiddenState, ("NoHiddenState", "HiddenState")),
        (NoMarkedOperation, ("NoMarkedOperation", "h", "braintrace.matmul")),
    ],
)
def test_models_with_nothing_to_learn_online(model, words):
    with pytest.raises(braintrace.CompilationError) as caught:
        braintrace.compile(model(), "d_rtrl", jnp.zeros((2, 3)), batch_size=2)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_learner_inside_a_compiled_function_of_the_step(learner, raises):
    xs, targets = CASE.sequences(2, 6)
    inner = brainstate.transform.jit(lambda x, t: jnp.mean((learner(x) - t) ** 2))
    raises(lambda: learner.etrace_grad(xs, targets, step_fn=inner), "step_fn")


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
        lambda: learner.etrace_evolve(xs),
        lambda: learner.predict(xs),
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

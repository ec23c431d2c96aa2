"""RTRL is backpropagation through time, on every model that has a derivative."""

import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import references
from assertions import assert_gradients_close
from backpropagation import through_time
from catalogue import MODELS, REFUSED
from catalogue_runs import PATHS, Runs, expected, runs_of
from drivers import named, sequence_gradient, shared_learner, snapshot, weights_of

import braintrace

TOLERANCE, LENGTH = 1e-10, 6
MASK = np.array([1, 0, 2, 0.5, 1, 0])
AT_3 = np.arange(LENGTH) == 3
SOME = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)
pytestmark = pytest.mark.usefixtures("float64")


def learner_of(case, style="batch axis"):
    return shared_learner(case, "rtrl", style, dtype=np.float64, strict=True)


def gradient(case, style="batch axis", **options):
    learner = learner_of(case, style)
    batch = None if style == "single" else 2
    learner.reset_state(*([] if batch is None else [batch]))
    xs, targets = case.sequences(batch, LENGTH, np.float64)
    return sequence_gradient(learner, case, xs, targets, **options)


@pytest.mark.parametrize(
    ("case", "style", "chunk"),
    [
        (catalogue.BY_NAME["LeakyWithBias"], "batch axis", 1),
        (catalogue.BY_NAME["IndRNN"], "mapped", 1),
        (catalogue.BY_NAME["ALIF"], "single", 3),
        (catalogue.BY_NAME["PlainEncoder"], "mapped", 6),
        (catalogue.BY_NAME["LSTMSeparate"], "single", 6),
    ],
)
def test_it_is_backpropagation_through_time(case, style, chunk):
    expected = references.bptt(case, None if style == "single" else 2)
    found = gradient(case, style, chunk_size=chunk)
    assert_gradients_close(found, expected, TOLERANCE, f"{case.name}, {style}, chunks of {chunk}")


@pytest.mark.parametrize(
    ("entry", "path"),
    [
        (catalogue.BY_NAME["GRU"], "chunks of 3"),
        (catalogue.BY_NAME["TwoLayers"], "chunks of 1"),
        (catalogue.BY_NAME["RotatedPair"], "chunks of 6"),
    ],
)
@pytest.mark.usefixtures("float64_in_every_thread")
def test_every_model_of_the_zoo(entry, path):
    found = PATHS[path](runs_of(entry, "rtrl", strict=True))
    assert_gradients_close(found, expected(entry, oracles.bptt), TOLERANCE, f"{entry.name}, {path}")


@pytest.mark.parametrize("entry", [e for e in MODELS if e.name in REFUSED], ids=lambda e: e.name)
def test_what_cannot_be_exact_is_refused_by_name(entry):
    with pytest.raises(braintrace.CompilationError, match=f"`RTRL` .*{REFUSED[entry.name]}"):
        Runs(entry, "rtrl")


# --- resets, masks, parts of sequences ----------------------------------------------------------

OPTIONS = {
    "mask": {"mask": MASK},
    "reset all": {"reset": AT_3},
    "reset samples": {"reset": SOME},
    "both": {"reset": SOME, "mask": MASK},
}


def each_option():
    names = ("TwoLayersPlainLink", "ALIFLateThreshold", "GRU")
    for option, given in OPTIONS.items():
        for name in names:
            yield pytest.param(catalogue.BY_NAME[name], given, id=f"{name}-{option}")


def test_nothing_of_what_was_not_finite_before_a_reset_is_left():
    case = catalogue.BY_NAME["TanhRNN"]
    params, states, xs, targets = jax.tree.map(np.array, references.arguments(case))
    broken, finite = xs.copy(), xs.copy()
    broken[:2, 0], finite[:2, 0] = np.nan, 0.0
    reset, mask = np.zeros((LENGTH, 2), bool), np.array([0, 0, 1, 1, 1, 1])
    reset[2, 0] = True
    expected = oracles.dense_rtrl(case, params, states, finite, targets, mask, reset)
    learner = learner_of(case)
    for chunk in (1, 3):
        learner.reset_state(2)
        given = {"mask": mask, "reset": reset, "chunk_size": chunk}
        found = sequence_gradient(learner, case, broken, targets, **given)
        assert_gradients_close(found, expected, TOLERANCE, f"chunks of {chunk}")
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(snapshot(learner)))


# --- what is carried ----------------------------------------------------------------------------


FROM_ZERO = """
import braintrace, brainstate, jax, numpy as np
xs = np.random.default_rng(0).normal(size=(128, 8, 64)).astype(np.float32)
with brainstate.random.seed_context(0):
    cell = braintrace.nn.LeakyRNN(64, 64)
for size in (128, 64):
    learner = braintrace.compile(cell, "rtrl", xs[0], batch_size=8)
    learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum(), chunk_size=size)
    traces = learner.algorithm.traces.value
    if size == 128:
        first = jax.tree.map(np.asarray, traces)

def compare(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)

compare(traces, first)

def loss(x):
    return (learner(x) ** 2).sum()

@brainstate.transform.jit
def anew(xs):
    learner.reset_state(8)
    return learner.etrace_grad(xs, step_fn=loss, chunk_size=64), learner.algorithm.traces.value

gradients, after = anew(xs)
compare(after, first)
learner.reset_state(8)
compare(gradients, learner.etrace_grad(xs, step_fn=loss, chunk_size=128))
"""


def test_traces_are_those_of_the_definition():
    """The derivative of the last states, sample by sample."""
    case = catalogue.BY_NAME["TwoLayers"]
    params, _, xs, _ = jax.tree.map(np.asarray, references.arguments(case))
    gradient(case, chunk_size=3)
    traces = jax.tree.map(np.asarray, learner_of(case).algorithm.traces.value)

    @jax.jit
    @jax.jacrev
    def last(params, start, xs):
        def step(now, x):
            ops = oracles.PlainOps()
            case.step(ops, params, now, x)
            return ops.hidden, None

        now, _ = jax.lax.scan(step, start, xs)
        return jnp.concatenate([now["lower/h"][0], now["upper/h"][0]])

    for sample in range(2):
        own = slice(sample, sample + 1)
        start = case.initial_states(1, np.float64)
        expected = jax.tree.map(np.asarray, last(params, start, xs[:, own]))
        np.testing.assert_allclose(traces["lower/w"][sample], expected["lower/w"], atol=1e-12)
        np.testing.assert_allclose(traces["upper/w"][sample], expected["upper/w"][4:], atol=1e-12)


def test_what_no_state_depends_on_is_not_carried():
    """The weights of an upper layer reach its own states alone, a readout none."""
    learner = learner_of(catalogue.BY_NAME["TwoLayers"])
    shapes = {name: leaf.shape for name, leaf in learner.algorithm.traces.value.items()}
    assert shapes == {"lower/w": (2, 9, 3, 4), "upper/w": (2, 5, 4, 5)}
    report = learner.report()
    assert report.carried_bytes == 8 * (2 * 9 * 12 + 2 * 5 * 20)
    assert [row.parameters for row in report.relations] == [("lower/w",), ("upper/w",)]
    assert {row.parameter for row in report.without_trace} == {"w_out", "w_out_lower"}
    assert not report.diagnostics


def test_the_trace_of_a_weight_by_state():
    learner = learner_of(catalogue.BY_NAME["TwoLayers"])
    found = learner.eligibility("lower/w")
    assert {name: leaf.shape for name, leaf in found.items()} == {
        "lower/h": (2, 4, 3, 4),
        "upper/h": (2, 5, 3, 4),
    }
    whole = learner.algorithm.traces.value["lower/w"]
    np.testing.assert_array_equal(found["upper/h"], whole[:, 4:])
    with pytest.raises(braintrace.OptionError, match=r"'w_out'.*'lower/w', 'upper/w'"):
        learner.eligibility("w_out")


# --- samples ------------------------------------------------------------------------------------


class Population(brainstate.nn.Module):
    """A layer of units; what becomes of them is up to a function."""

    def __init__(self, change, axis=0):
        super().__init__()
        self.change, self.axis = change, axis
        generator = np.random.default_rng(2)
        self.w = brainstate.ParamState(jnp.asarray(generator.standard_normal((3, 4)), float))
        self.b = brainstate.ParamState(jnp.linspace(-0.5, 0.5, 4))

    def init_state(self, batch_size=None, **_):
        shape = (batch_size, 4) if self.axis == 0 else (4, batch_size)
        self.h = brainstate.HiddenState(jnp.linspace(-0.3, 0.4, 4 * batch_size).reshape(shape))

    def update(self, x):
        h = self.h.value if self.axis == 0 else self.h.value.T
        h = self.change(h, x @ self.w.value, self.b.value)
        self.h.value = h if self.axis == 0 else h.T
        return h


def population_gradients(model, batch=2):
    """By RTRL in chunks, and by BPTT."""
    xs = np.random.default_rng(5).standard_normal((LENGTH, batch, 3))
    learner = braintrace.compile(model, "rtrl", xs[0], batch_size=batch)
    weights = weights_of(model)
    values = {name: weights[name,].value for name in "wb"}
    start = model.h.value if model.axis == 0 else model.h.value.T

    def step(values, h, x):
        h = model.change(h, x @ values["w"], values["b"])
        return h, (h**2).sum()

    def of_step(x):
        return (learner(x) ** 2).sum()

    found = learner.etrace_grad(xs, step_fn=of_step, reduction="sum", chunk_size=3)
    return learner, named(found), through_time(step, values, start, xs)


CHANGES = {
    "plain": lambda h, y, b: jnp.tanh(0.5 * h + y + b),
    "sorted units": lambda h, y, b: jnp.sort(0.5 * h, -1) + jnp.tanh(y) * b,
    "softmax": lambda h, y, b: 0.5 * h + jax.nn.softmax(y * b + h, -1),
    "rolled": lambda h, y, b: jnp.roll(h, 1, -1) * jax.nn.sigmoid(b) + y,
    "cumulative": lambda h, y, b: 0.1 * jnp.cumsum(h, -1) + jnp.tanh(y + b),
    "looked up": lambda h, y, b: 0.5 * h + y + b[jnp.argmax(h, -1)][:, None],
    "scanned": lambda h, y, b: jax.lax.fori_loop(
        0, 3, lambda k, c: c + 0.1 * (jnp.tanh(c * b + b[k]) + y), h
    ),
    "branched": lambda h, y, b: (
        0.5 * jax.lax.cond(h.sum() > 0, jnp.tanh, lambda v: 0.3 * v, h + y * b)
    ),
    "spectra": lambda h, y, b: jnp.fft.irfft(jnp.fft.rfft(h) * b[:3], 4) + jnp.tanh(y + b),
    "solved": lambda h, y, b: (
        0.5 * jnp.linalg.solve(jnp.eye(4) + 0.1 * h[:, None] * b, (h + y)[..., None])[..., 0]
    ),
    "stopped mean": lambda h, y, b: 0.5 * (h - jax.lax.stop_gradient(h.mean(0))) + y * b,
}


@pytest.mark.parametrize(("change", "axis"), [("looked up", 0), ("solved", 1), ("stopped mean", 0)])
def test_samples_are_told_apart(change, axis):
    learner, found, expected = population_gradients(Population(CHANGES[change], axis))
    assert learner.graph.flat_state.samples == 2
    assert_gradients_close(found, expected, TOLERANCE, change)


def test_samples_that_mix_are_refused_by_name():
    model = Population(lambda h, y, b: 0.5 * (h - h.mean(0)) + y + b)
    with pytest.raises(braintrace.CompilationError, match=r"`RTRL` .*'h' .* mean over the batch"):
        population_gradients(model)


@jax.custom_vjp
def clipped(value):
    return value


clipped.defvjp(lambda value: (value, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def test_a_backward_rule_that_bends_gradients_is_refused_by_name():
    model = Population(lambda h, y, b: 0.5 * clipped(h) + y + b)
    with pytest.raises(braintrace.CompilationError, match=r"`RTRL` .*not proportional"):
        population_gradients(model)


@functools.cache
def population():
    example = jnp.ones((2, 3))
    return braintrace.compile(Population(CHANGES["plain"]), "rtrl", example, batch_size=2)


@pytest.mark.parametrize("driver", ["a sequence", "a stream", "one's own gradient"])
def test_what_the_model_is_called_with_depends_on_no_parameter(driver):
    """No trace would follow it: the gradient would depend on how a sequence is cut."""
    xs = np.ones((LENGTH, 2, 3))
    learner = population()
    learner.reset_state(2)
    model = learner.algorithm.model

    def loss(x, through=lambda v: v):
        return (learner(x * through(model.b.value.sum())) ** 2).sum()

    def run(loss):
        if driver == "a sequence":
            return learner.etrace_grad(xs, step_fn=loss, chunk_size=3)
        if driver == "a stream":
            return learner.etrace_online(xs, step_fn=loss, update_fn=lambda gradients: None)
        return brainstate.transform.grad(lambda: loss(xs[0]), weights_of(model))()

    with pytest.raises(
        braintrace.OptionError, match="depend on the differentiated parameters or states"
    ):
        run(loss)
    learner.reset_state(2)
    run(lambda x: loss(x, jax.lax.stop_gradient))


class Held(brainstate.nn.Module):
    """A state that is computed from a weight alone, and plain filters of a convolution."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 10).reshape(2, 5))
        self.kernel = brainstate.ParamState(jnp.linspace(-0.5, 1.0, 6).reshape(2, 1, 3))

    def init_state(self, batch_size=None, **kwargs):
        self.c, self.h = (brainstate.HiddenState(jnp.zeros((batch_size, 2, 5))) for _ in range(2))

    def update(self, x):
        y = jax.lax.conv_general_dilated(x, self.kernel.value, (1,), "SAME")
        self.h.value = 0.9 * self.h.value + jnp.tanh(y + self.c.value)
        self.c.value = jnp.broadcast_to(jnp.sin(self.w.value), self.c.value.shape)
        return self.h.value


def test_plain_filters_and_states_of_weights_alone():
    xs = np.random.default_rng(0).normal(size=(LENGTH, 2, 1, 5))
    reset = np.arange(LENGTH) == 3
    learner = braintrace.compile(Held(), "rtrl", xs[0], batch_size=2)
    weights = weights_of(learner.algorithm.model)
    kinds = {use.kind for use in learner.graph.flat_state.uses}
    assert kinds == {"elementwise", "product"}, "filters have traces of their own form"

    def step(x):
        return jnp.sum(learner(x) ** 2)

    found = learner.etrace_grad(xs, step_fn=step, reduction="sum", reset=reset, chunk_size=4)
    values = {name: weights[name,].value for name in ("w", "kernel")}

    def plain_step(values, states, x, starts_anew):
        c, h = (jnp.where(starts_anew, 0, state) for state in states)
        y = jax.lax.conv_general_dilated(x, values["kernel"], (1,), "SAME")
        h = 0.9 * h + jnp.tanh(y + c)
        return (jnp.broadcast_to(jnp.sin(values["w"]), c.shape), h), jnp.sum(h**2)

    start = (jnp.zeros((2, 2, 5)),) * 2
    assert_gradients_close(named(found), through_time(plain_step, values, start, xs, reset), 1e-9)

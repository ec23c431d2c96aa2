"""Through linear readouts D-RTRL equals backpropagation through time, on every path."""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import readouts
import saiunit as u
from assertions import assert_gradients_close, assert_gradients_differ, assert_same_bits
from drivers import named, quietly_compiled, stream_gradient, summed, weights_of
from every_path import Paths
from readouts import BATCH, LINEAR, ODD, OTHERS

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
TOLERANCE, STEPS = 1e-10, 4
BY_NAME = {row.name: row for row in (*LINEAR, *ODD, *OTHERS)}
SMALL, SIMPLE, HARD = map(
    BY_NAME.get, ("rates-plain", "alif-with_everything", "lif-in_small_steps")
)


def each(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@functools.cache
def data():
    return tuple(part[:STEPS] for part in readouts.data())


def learner_of(row, algorithm="d_rtrl", **options):
    compiled = quietly_compiled if row.why or "readout_filters" in options else braintrace.compile
    return compiled(row.module(), algorithm, data()[0][0], batch_size=BATCH, **options)


_shared = functools.cache(learner_of)


def shared(row):
    """The learner of a row, as if it were new; what has been compiled for it stays."""
    learner = _shared(row)
    learner.reset_state(BATCH)
    return learner


def loss_of(run, model, x, target):
    """The loss of one step; that of some models reads the State instead of the output."""
    output = run(x)
    if model.readout is readouts.in_small_steps:
        output = model.o.value
    return jnp.sum((output - target) ** 2)


@functools.cache
def through_time(row):
    """The gradient of weighted losses, by differentiating a loop over the model.

    It takes which samples start anew before each step, and the weights of the steps.
    """
    model = row.module()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    states = model.states(brainstate.HiddenState)
    start = {path: state.value for path, state in states.items()}

    def step(x, target, reset, weight):
        anew = functools.partial(jnp.where, reset[:, None])
        for path, state in states.items():
            state.value = jax.tree.map(anew, start[path], state.value)
        return weight * loss_of(model, model, x, target)

    def total(flags, weights):
        for path, state in states.items():
            state.value = start[path]
        return brainstate.transform.for_loop(step, *data(), flags, weights).sum()

    gradient = brainstate.transform.grad(total, weights_of(model), check_states=False)
    return brainstate.transform.jit(gradient)


@functools.cache
def bptt(row, reset=None, mask=None):
    """The gradient of the summed loss."""
    flags = np.zeros((STEPS, BATCH), bool) if reset is None else np.asarray(reset)
    weights = np.ones(STEPS) if mask is None else np.asarray(mask)
    return named(through_time(row)(flags, weights))


@functools.cache
def step_of(learner):
    """One function for each learner: calls of one shape compile once."""
    return lambda x, target: loss_of(learner, learner.algorithm.model, x, target)


def sequence_gradient(learner, **options):
    step = step_of(learner)
    return named(learner.etrace_grad(*data(), step_fn=step, reduction="sum", **options))


# The two are held against it below, by day.
@pytest.mark.parametrize("row", [SMALL, BY_NAME["alif-several"], BY_NAME["lif-marked_decay"]])
def test_equals_bptt(row):
    learner = shared(row)
    assert len(learner.graph.traced.filters) == row.filters
    assert learner.graph.diagnostics == ()
    assert_gradients_close(sequence_gradient(learner, chunk_size=2), bptt(row), TOLERANCE, row.name)


@pytest.mark.parametrize("row", [SMALL])
def test_without_filters_it_differs_from_bptt(row):
    learner = learner_of(row, readout_filters=False)
    assert learner.graph.traced.filters == ()
    assert_gradients_differ(sequence_gradient(learner), bptt(row), 0.05, row.name)


@pytest.mark.parametrize("row", [BY_NAME["rates-decay_per_unit"], BY_NAME["rates-read_by_another"]])
def test_what_is_no_linear_readout_stays_as_it_is_and_says_why(row):
    learner, as_before = learner_of(row), learner_of(row, readout_filters=False)
    assert len(learner.graph.traced.filters) == row.filters
    told = [d for d in learner.graph.diagnostics if d.kind == "truncated"]
    assert any(row.why in d.message for d in told), told
    found, expected = sequence_gradient(learner), bptt(row)
    if not row.filters:
        assert_same_bits(found, sequence_gradient(as_before))
    exact = {name: expected[name] for name in row.exact}
    if exact:
        assert_gradients_close({name: found[name] for name in exact}, exact, TOLERANCE, row.name)
    assert_gradients_differ({"w_in": found["w_in"]}, {"w_in": expected["w_in"]}, 0.05, row.name)


def test_a_plain_parameter_in_what_is_filtered_is_told():
    """All others are exact; with a mark, by hand or by the compiler, it is as well."""
    row = readouts.Row(readouts.rates, readouts.plain_inside)
    learner = braintrace.compile(row.module(), "d_rtrl", data()[0][0], batch_size=BATCH)
    (told,) = learner.graph.diagnostics
    assert (told.kind, told.level, told.paths) == ("truncated", "info", ("theta", "o"))
    found, expected = sequence_gradient(learner), bptt(row)
    assert_gradients_differ({"theta": found.pop("theta")}, {"theta": expected["theta"]}, 0.05)
    assert_gradients_close(found, {name: expected[name] for name in found}, TOLERANCE)
    marked = learner_of(row, mark="auto")
    assert_gradients_close(sequence_gradient(marked), expected, TOLERANCE)


# --- every path


class InOwnLoop:
    """Gradients of single calls, or of windows of steps, each in a `grad` of the user's own."""

    def __init__(self, learner):
        self.model = learner.algorithm.model

        def loss(x, target):
            return loss_of(learner, self.model, x, target)

        gradient = brainstate.transform.grad(loss, weights_of(self.model))
        self._gradient = brainstate.transform.jit(gradient)

    def __call__(self, steps=slice(None)):
        xs, targets = (part[steps] for part in data())
        return named(summed([self._gradient(x, y) for x, y in zip(xs, targets, strict=True)]))


in_own_loop = functools.cache(InOwnLoop)


def in_a_stream(learner, steps=slice(None), **options):
    """The sum of the gradients of a stream whose parameters stay as they are."""
    step = step_of(learner)
    sequences = (part[steps] for part in data())
    return named(stream_gradient(learner, *sequences, step_fn=step, **options))


@functools.cache
def paths_of(row):
    xs, targets = data()
    return Paths(
        row.module, xs, "d_rtrl", targets, loss=lambda y, target: ((y - target) ** 2).sum()
    )


# Calls after each other, a stream among them, are split below.
@pytest.mark.parametrize(("row", "path"), [(SMALL, Paths.foreign_vmap)])
def test_every_path(row, path):
    assert_gradients_close(path(paths_of(row)), bptt(row), TOLERANCE, row.name)


@pytest.mark.parametrize("row", [SMALL])
def test_split_calls(row):
    """A part in a stream, then a sequence, then in an own loop: filters go on with the traces."""
    learner = shared(row)
    xs, targets = data()

    def step(x, target):
        return loss_of(learner, learner.algorithm.model, x, target)

    first = in_a_stream(learner, slice(1))
    rest = slice(1, 3)
    second = named(
        learner.etrace_grad(xs[rest], targets[rest], step_fn=step, reduction="sum", chunk_size=1)
    )
    third = in_own_loop(learner)(slice(3, None))
    found = summed([first, second, third])
    assert_gradients_close(found, bptt(row), TOLERANCE, row.name)
    model = row.module()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    for x in xs:
        model(x)
    for path, state in model.states(brainstate.HiddenState).items():
        np.testing.assert_allclose(
            learner.algorithm.model.states()[path].value, state.value, rtol=1e-12
        )


@pytest.mark.parametrize("row", [SMALL])
def test_samples_that_start_anew(row):
    flags = np.zeros((STEPS, BATCH), bool)
    flags[2, 0] = flags[3, 1] = True
    learner = shared(row)
    expected = bptt(row, tuple(map(tuple, flags)))
    assert_gradients_differ(bptt(row), expected, 0.01)
    for path in (
        lambda: sequence_gradient(learner, reset=flags, chunk_size=2),
        lambda: in_a_stream(learner, reset=flags),
    ):
        learner.reset_state(BATCH)
        assert_gradients_close(path(), expected, TOLERANCE, row.name)
    learner.reset_state(BATCH)
    own = in_own_loop(learner)
    parts = []
    for t in range(STEPS):
        if flags[t].any():
            learner.reset_state(where=flags[t])
        parts.append(own(slice(t, t + 1)))
    found = summed(parts)
    assert_gradients_close(found, expected, TOLERANCE, row.name)


def test_nothing_is_left_of_nan_before_a_reset():
    row = BY_NAME["rates-of_several"]
    learner = learner_of(row)
    learner.etrace_evolve(np.full((1, BATCH, readouts.INPUTS), np.nan))
    assert sum(np.isnan(f.value).all() for f in learner.algorithm.filters.values()) == 4
    reset = np.arange(STEPS) == 0
    found = sequence_gradient(learner, reset=reset, chunk_size=1)
    assert_gradients_close(found, bptt(row), TOLERANCE)


@pytest.mark.parametrize("row", [HARD])
def test_steps_that_do_not_count(row):
    mask = (0.0, 1.0, 0.5, 2.0)
    found = sequence_gradient(shared(row), mask=mask, chunk_size=3)
    assert_gradients_close(found, bptt(row, mask=mask), TOLERANCE, row.name)


@pytest.mark.parametrize("row", [SMALL])
def test_windows_of_readouts_are_exact(row):
    learner = learner_of(row, window=2)
    found = sequence_gradient(learner)
    assert_gradients_close(found, bptt(row), TOLERANCE, row.name)
    learner.reset_state(BATCH)
    assert_gradients_close(InOwnLoop(learner)(), bptt(row), TOLERANCE, row.name)


@pytest.mark.parametrize("row", [HARD])
def test_after_steps_without_a_loss(row):
    """`etrace_evolve` moves filters on, `predict` leaves them, and both move the model's states."""
    learner, mask = shared(row), (0.0, 0.0, 1.0, 1.0)
    xs, targets = data()
    before = learner.functional().state()
    outputs = learner.predict(xs[:2])
    for path, found in learner.algorithm.filters.items():
        assert not np.any(found.value), path
    learner.functional().restore(before)
    np.testing.assert_allclose(learner.etrace_evolve(xs[:2], chunk_size=1), outputs, rtol=1e-12)

    def step(x, target):
        return loss_of(learner, learner.algorithm.model, x, target)

    found = learner.etrace_grad(xs[2:], targets[2:], step_fn=step, reduction="sum")
    assert_gradients_close(named(found), bptt(row, mask=mask), TOLERANCE, row.name)


# --- the same with the filters written out


class Explicit(readouts.Net):
    """`rates-plain` with its filter as a state of the model."""

    def __init__(self):
        super().__init__(readouts.rates, readouts.plain)
        self.own = [*self.own, "g"]

    def init_state(self, batch_size=None):
        super().init_state(batch_size)
        self.g.value = jnp.zeros_like(self.g.value)

    def update(self, x):
        z = self.layer(self, x)
        self.g.value = 0.8 * self.g.value + z
        value = 0.8 * jax.lax.stop_gradient(self.o.value) + z @ self.w_out.value
        through = self.g.value @ self.w_out.value
        self.o.value = jax.lax.stop_gradient(value - through) + through
        return self.o.value


@pytest.mark.parametrize(("algorithm", "options"), [("es_d_rtrl", {"decay_or_rank": 0.7})])
def test_learning_with_changing_weights_equals_filters_written_out(algorithm, options):
    row, x = LINEAR[0], data()[0][0]
    with pytest.warns(braintrace.ApproximationWarning):  # it looks like a readout behind states
        written_out = braintrace.compile(
            Explicit(), algorithm, x, batch_size=BATCH, readout_filters=False, **options
        )
    losses, weights = [], []
    for learner in (learner_of(row, algorithm, **options), written_out):
        model = learner.algorithm.model
        own = weights_of(model)

        def descend(gradients, own=own):
            for path, weight in own.items():
                weight.value = weight.value - 0.05 * gradients[path]

        def step(x, target, learner=learner, model=model):
            return loss_of(learner, model, x, target)

        sequences = [np.concatenate([part, -part]) for part in data()]
        losses.append(learner.etrace_online(*sequences, step_fn=step, update_fn=descend))
        weights.append(named({path: weight.value for path, weight in own.items()}))
    np.testing.assert_allclose(*losses, rtol=1e-10)
    assert_gradients_close(*weights, TOLERANCE)


# --- layers of the library, and what is reported


class Spiking(brainstate.nn.Module):
    """Neurons and a readout of `braintrace.nn`, in units."""

    def __init__(self):
        super().__init__()
        self.dense = braintrace.nn.Linear(
            readouts.INPUTS,
            readouts.H,
            w_init=readouts.values(3, readouts.INPUTS, readouts.H, scale=14.0) * u.mA,
            b_init=None,
        )
        self.neuron = braintrace.nn.ALIF(readouts.H, tau=8.0 * u.ms)
        self.leaky = braintrace.nn.LeakyRateReadout(
            readouts.H,
            readouts.OUTPUTS,
            tau=6.0 * u.ms,
            w_init=readouts.values(4, readouts.H, readouts.OUTPUTS),
            b_init=readouts.values(5, readouts.OUTPUTS),
            r_initializer=lambda shape: jnp.full(shape, 0.4),
        )

    readout = None

    def update(self, x):
        return self.leaky(self.neuron(self.dense(x)))


@dataclasses.dataclass(frozen=True)
class Layers:
    name: str = "layers of the library"
    why: str = ""

    def module(self):
        return Spiking()


def test_the_report_says_what_is_added():
    size, several = 8, BY_NAME["alif-several"]
    report = shared(several).report()
    assert report.readouts == ("o", "p", "q")
    state = BATCH * readouts.H * size
    assert report.filter_bytes == 3 * state
    assert report.carried_bytes == report.stored_bytes + report.filter_bytes
    without = learner_of(several, readout_filters=False).report()
    assert without.readouts == ()
    assert without.stored_bytes == report.stored_bytes - 3 * readouts.INPUTS * state


def test_the_model_itself_has_no_filters():
    learner = shared(SIMPLE)
    model = SIMPLE.module()
    brainstate.nn.init_all_states(model)
    assert learner.algorithm.model.states().keys() == model.states().keys()
    names = {path for path in learner.algorithm.states() if path[0] == "filters"}
    assert len(names) == SIMPLE.filters


def test_coefficients_that_change_within_a_sequence_are_refused():
    """What a filter holds has been taken in before they changed."""
    row = BY_NAME["alif-with_feedback"]
    learner = learner_of(row)
    model = learner.algorithm.model

    def step(x, target):
        model.back.value = 1.1 * model.back.value
        return loss_of(learner, model, x, target)

    with pytest.raises(braintrace.OptionError, match="which `step_fn` writes"):
        learner.etrace_grad(*data(), step_fn=step)


def test_rflo_with_a_leaky_readout():
    row = BY_NAME["alif-with_feedback"]
    found = sequence_gradient(learner_of(row, "rflo"))
    assert_gradients_close(found, bptt(row), TOLERANCE)

"""Learning from late labels equals learning from labels that are known at once."""

import contextlib
import dataclasses
import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from drivers import build_learner, compiled_once

import braintrace
from braintrace._learner.state.learner_state import FORECASTS

BATCH, LENGTH = 2, 7
OPTIMIZER = optax.adam(0.05)
LEAKY = catalogue.BY_NAME["Leaky"]
WITHOUT = {"update_fn": lambda gradients: None}


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def state_of(learner):
    """The state of a learner without its forecasts."""
    state = learner.functional().state()
    others = {path: value for path, value in state.others.items() if path != FORECASTS}
    return dataclasses.replace(state, others=others)


def with_output(case, learner):
    def step_fn(x, y):
        output = learner(x)
        return case.loss(output, y), output

    return step_fn


@functools.cache
def starting(delay=None, which=0):
    """What gives a `LEAKY` learner that begins, with room for late labels or without."""

    def build():
        learner = build_learner(LEAKY, batch=BATCH)
        if delay is not None:
            learner.init_forecasts(LEAKY.sequences(BATCH, LENGTH)[0][0], max_delay=delay)
        return learner

    return compiled_once(build)


def learner_of(case, rule, delay=None):
    """A learner; those that most tests ask for share what is compiled."""
    if (case, rule) == (LEAKY, "d_rtrl"):
        return starting(delay)()
    learner = build_learner(case, rule, batch=BATCH)
    if delay is not None:
        learner.init_forecasts(case.sequences(BATCH, LENGTH)[0][0], max_delay=delay)
    return learner


def learnt_at_once(case, rule, **options):
    """Losses, outputs and state of `etrace_online`."""
    learner = learner_of(case, rule)
    sequences = case.sequences(BATCH, LENGTH)
    options = {"optimizer": OPTIMIZER, "step_fn": with_output(case, learner), **options}
    losses, outputs = learner.etrace_online(*sequences, has_aux=True, **options)
    own = jax.tree.map(jnp.copy, state_of(learner))  # a later call takes the learner's buffers
    return losses, outputs, own


def learnt_late(case, rule, delay, labels=range(LENGTH), **options):
    """Losses and forecasts of a stream whose labels are late by ``delay`` samples."""
    learner = learner_of(case, rule, delay)
    (xs, ys), losses, forecasts = map(np.asarray, case.sequences(BATCH, LENGTH)), [], []
    options = {"optimizer": OPTIMIZER, **options}
    for now in range(LENGTH + delay):
        if now < LENGTH:
            forecasts.append(learner.forecast(xs[now]))
        sample = now - delay
        if sample in labels:
            late = min(now, LENGTH - 1) - sample
            losses.append(learner.learn(case.loss, ys[sample], delay=late, **options))
    return losses, forecasts, learner


@pytest.mark.parametrize(
    ("name", "rule", "delay"),
    [("Leaky", "d_rtrl", 0), ("Leaky", "rtrl", 1), ("LSTMFused", "es_d_rtrl", 2)],
)
def test_late_labels_change_only_the_forecasts(name, rule, delay):
    case = catalogue.BY_NAME[name]
    losses, outputs, state = learnt_at_once(case, rule)
    late, forecasts, learner = learnt_late(case, rule, delay)
    close(late, list(losses))
    close(state_of(learner), state)
    if delay == 0:
        close(forecasts, list(outputs))
    else:
        assert not np.allclose(forecasts[-1], outputs[-1], rtol=1e-4)


class Dropping(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.dropout = braintrace.nn.GRUCell(3, 4), brainstate.nn.Dropout(0.5)

    def update(self, x):
        return self.dropout(self.cell(x))


class Counting(brainstate.nn.Module):
    """A noisy leaky layer that counts its steps in a State that is no hidden state."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(np.full((3, 4), 0.3, np.float32))
        self.count = brainstate.LongTermState(np.zeros((), np.float32))

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        noise = 0.1 * brainstate.random.randn(4)
        self.count.value = self.count.value + 1
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive) + noise
        return self.h.value * self.count.value


@functools.cache
def counting(max_delay):
    """What gives a learner of `Counting` that begins, with room for late labels or without."""

    def build():
        brainstate.random.seed(0)
        x = np.asarray(LEAKY.sequences(BATCH, LENGTH)[0][0])
        learner = braintrace.compile(Counting(), "d_rtrl", x, batch_size=BATCH)
        if max_delay is not None:
            learner.init_forecasts(x, max_delay=max_delay)
        return learner

    return compiled_once(build)


class Stream:
    """A stream in which a user draws a number after each sample, and sometimes counts on."""

    def __init__(self, max_delay=None):
        self.xs = np.asarray(LEAKY.sequences(BATCH, LENGTH)[0])
        self.learner = counting(max_delay)()
        self.learner.reset_state()  # so traces are known to be zero, as those of a new one
        self.counter, self.drawn, self.losses = self.learner.algorithm.model.count, [], []

    def change(self, now):
        self.drawn.append(float(brainstate.random.rand()))
        if now in (1, 4):
            self.counter.value = 10.0 * self.counter.value

    def learn_at_once(self, labels):
        for now in range(LENGTH):
            x = self.xs[now : now + 1]
            if now in labels:
                step_fn = lambda x: mean_square(self.learner(x))  # noqa: E731
                loss = self.learner.etrace_online(x, step_fn=step_fn, optimizer=OPTIMIZER)
                self.losses.append(loss[0])
            else:
                self.learner.etrace_evolve(x)
            self.change(now)
        return self

    def learn_late(self, labels, delay):
        for now in range(LENGTH + delay):
            if now < LENGTH:
                self.learner.forecast(self.xs[now])
                self.change(now)
            sample = now - delay
            if sample in labels:
                late = min(now, LENGTH - 1) - sample
                loss = self.learner.learn(mean_square, delay=late, optimizer=OPTIMIZER)
                self.losses.append(loss)
        return self


@functools.cache
def stream_at_once(labels):
    """A stream that has learned from labels that are known at once, and the number drawn next."""
    stream = Stream().learn_at_once(labels)
    stream.counted = float(stream.counter.value)
    return stream, float(brainstate.random.rand())


def mean_square(output):
    return (output**2).mean()


@pytest.mark.parametrize(("first", "delay"), [(0, 0), (0, 1), (2, 1)])
def test_what_a_user_changes_between_two_forecasts_stays_changed(first, delay):
    """Random keys and counters, also if the first samples have no label."""
    labels = range(first, LENGTH)
    expected, number = stream_at_once(labels)
    found = Stream(delay).learn_late(labels, delay)
    close(found.losses, expected.losses)
    assert found.counter.value == expected.counted
    assert [*found.drawn, float(brainstate.random.rand())] == [*expected.drawn, number]
    assert len({*found.drawn, number}) == LENGTH + 1


class Averaging(Counting):
    """Its State is a running mean of the inputs, which a NaN ends."""

    def update(self, x):
        self.count.value = 0.9 * self.count.value + 0.1 * x.mean()
        self.h.value = 0.5 * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value * (1 + jnp.nan_to_num(self.count.value))


@pytest.mark.filterwarnings("ignore::braintrace.NonFiniteWarning")
@pytest.mark.parametrize("delay", [1, 2])
def test_a_repair_of_forecasts_is_no_change_by_the_user(delay):
    xs = np.array(LEAKY.sequences(BATCH, LENGTH)[0])
    xs[3, 0, 0] = np.nan
    learner = braintrace.compile(Averaging(), "d_rtrl", xs[0], batch_size=BATCH)
    learner.init_forecasts(xs[0], max_delay=delay)
    for now in range(LENGTH + delay):
        if now < LENGTH:
            learner.forecast(xs[now])
        if now >= delay:
            late = min(now, LENGTH - 1) - (now - delay)
            learner.learn(mean_square, delay=late, optimizer=OPTIMIZER)
    close(learner.algorithm.model.w.value, averaged_at_once(xs.tobytes()))


@functools.cache
def averaged_at_once(xs):
    """The weight that `etrace_online` of an `Averaging` learns from the bytes of inputs."""
    xs = np.frombuffer(xs, np.float32).reshape(LENGTH, BATCH, -1)
    learner = braintrace.compile(Averaging(), "d_rtrl", xs[0], batch_size=BATCH)
    learner.etrace_online(xs, step_fn=lambda x: mean_square(learner(x)), optimizer=OPTIMIZER)
    return learner.algorithm.model.w.value


def test_forecasts_are_those_of_the_model():
    """Without updates, each forecast is a step from the state after the previous one."""
    _, forecasts, _ = learnt_late(LEAKY, "d_rtrl", 2, optimizer=None, **WITHOUT)
    alone = starting()()
    close(forecasts, list(alone.predict(LEAKY.sequences(BATCH, LENGTH)[0])))


@pytest.mark.parametrize("delay", [0, 2])
def test_samples_without_a_label_are_passed_over(delay):
    """They change no parameter; states and traces advance."""
    labels = [1, 2, 5]
    mask = np.isin(np.arange(LENGTH), labels).astype(np.float32)
    losses, _, state = learnt_at_once(LEAKY, "d_rtrl", mask=mask)
    late, _, learner = learnt_late(LEAKY, "d_rtrl", delay, labels)
    close(late, [losses[sample] for sample in labels])
    learner.etrace_evolve(np.zeros((1, BATCH, 3), np.float32))
    other = starting()()
    other.init_optimizer(OPTIMIZER)
    other.functional().restore(state)
    other.etrace_evolve(np.zeros((1, BATCH, 3), np.float32))
    close(state_of(learner), state_of(other))


def pure_stream(learner):
    """A step of the pure twin, with one seed's label missing at some samples."""
    pure = learner.functional()

    def step(state, now):
        x, y, is_measured = now
        state, output = pure.forecast(state, x)
        delay = jnp.where(is_measured, 0, -1)
        state, loss = pure.learn(state, LEAKY.loss, y, delay=delay, optimizer=OPTIMIZER)
        return state, (output, loss)

    return pure, step


def test_the_pure_twin_in_a_scan_over_vmapped_learners():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    learner = starting(0)()
    learner.init_optimizer(OPTIMIZER)
    pure, step = pure_stream(learner)
    start = pure.state()
    flags = np.ones((2, LENGTH), bool)
    flags[1, [0, 3]] = False
    stack = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), jax.device_get(start))
    run = jax.vmap(lambda state, own: jax.lax.scan(step, state, (xs, ys, own)))
    states, (outputs, losses) = jax.device_get(jax.jit(run)(stack, flags))
    close(pure.state(), start)
    for seed, own in enumerate(flags):
        mask = own.astype(np.float32)
        expected, forecasts, state = learnt_at_once(LEAKY, "d_rtrl", mask=mask)
        close(outputs[seed], forecasts)
        close(losses[seed], np.where(own, expected, np.nan))
        close(jax.tree.map(lambda leaf, s=seed: leaf[s], states.parameters), state.parameters)


def test_inside_a_compiled_function_of_the_user():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    with pytest.raises(braintrace.OptionError, match="init_forecasts"):
        brainstate.transform.jit(starting()().forecast)(xs[0])
    learner = starting(2)()
    learner.init_optimizer(OPTIMIZER)

    @brainstate.transform.jit
    def step(x, y):
        output = learner.forecast(x)
        return output, learner.learn(LEAKY.loss, y, optimizer=OPTIMIZER)

    found = [step(x, y) for x, y in zip(xs, ys, strict=True)]
    losses, outputs, state = learnt_at_once(LEAKY, "d_rtrl")
    close(found, list(zip(outputs, losses, strict=True)))
    close(state_of(learner), state)


def test_other_methods_continue_after_the_last_forecast():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))

    def ended(run):
        learner = starting(2)()
        run(learner, [learner.forecast(x) for x in xs[:3]] and learner.functional())
        return state_of(learner)

    def step_fn(learner):
        return lambda x, y: LEAKY.loss(learner(x), y)

    other = starting()()
    other.etrace_evolve(xs[:3])
    start = jax.tree.map(jnp.copy, state_of(other))
    twins = [
        (
            lambda own, _: own.etrace_grad(xs[3:], ys[3:], step_fn=step_fn(own)),
            lambda own, p: p.restore(p.grad(p.state(), xs[3:], ys[3:], step_fn=step_fn(own))[0]),
        ),
        (
            lambda own, _: own(xs[3]),
            lambda _, pure: pure.restore(pure.step(pure.state(), xs[3])[0]),
        ),
        (
            lambda own, _: own.reset_state(where=np.array([True, False])),
            lambda _, p: p.restore(p.reset(p.state(), where=np.array([True, False]))),
        ),
    ]
    for method, twin in twins:
        other.functional().restore(start)
        method(other, None)
        close(ended(method), state_of(other))
        close(ended(twin), state_of(other))


def test_a_reset_drops_forecasts():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    learner = starting(2)()
    learner.forecast(xs[0])
    state = learner.functional().reset(learner.functional().state())
    assert int(state.others[FORECASTS]["count"]) == 0
    learner.reset_state()
    with pytest.raises(braintrace.OptionError, match="wait for a label"):
        learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER)
    for x, y in zip(xs, ys, strict=True):
        learner.forecast(x)
        learner.learn(LEAKY.loss, y, optimizer=OPTIMIZER)
    close(state_of(learner), learnt_at_once(LEAKY, "d_rtrl")[2])


def test_a_reset_by_the_update_is_that_of_a_stream():
    where = np.array([False, True])

    def resetting(learner):
        return lambda gradients: learner.reset_state(where=where)

    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    late, at_once = starting(0)(), starting()()
    losses = at_once.etrace_online(
        xs, ys, step_fn=lambda x, y: LEAKY.loss(at_once(x), y), update_fn=resetting(at_once)
    )
    for x, y, loss in zip(xs, ys, losses, strict=True):
        late.forecast(x)
        close(late.learn(LEAKY.loss, y, update_fn=resetting(late)), loss)
    close(state_of(late), state_of(at_once))


SKIPPED = pytest.warns(braintrace.NonFiniteWarning, match="Samples that were reset.*: 0\\.")


@pytest.mark.parametrize("delay", [0, 2])
def test_nan_is_skipped_and_forecasts_are_finite_again(delay):
    xs, ys = (np.array(values) for values in LEAKY.sequences(BATCH, LENGTH))
    xs[1, 0], ys[3] = np.nan, np.nan
    learner = starting(delay)()
    for now, x in enumerate(xs):
        output = learner.forecast(x)
        if now >= delay:
            is_first = now - delay == 1  # the only one that warns
            with SKIPPED if is_first else contextlib.nullcontext():
                learner.learn(LEAKY.loss, ys[now - delay], optimizer=OPTIMIZER, delay=delay)
                assert learner.skipped_updates == sum(now - delay >= bad for bad in (1, 3))
        assert np.isfinite(output).all() == (not 1 <= now <= max(1, delay))
    assert learner.skipped_updates == 2
    state = learner.functional().state()
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.parameters, state.hidden))
    )
    with pytest.raises(braintrace.NonFiniteError):
        learner.forecast(np.nan * xs[0])
        learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER, nonfinite="raise")


def test_units_and_auxiliary_results():
    learner = starting(0)()
    learner.forecast(np.ones((BATCH, 3), np.float32))

    def loss_fn(output, y):
        return ((output * u.mV - y) ** 2).mean(), {"output": output}

    loss, aux = learner.learn(
        loss_fn, np.ones((BATCH, 2)) * u.mV, has_aux=True, unit_aware=True, optimizer=optax.sgd(0.1)
    )
    assert u.get_unit(loss) == u.mV**2
    assert aux["output"].shape == (BATCH, 2)


def test_calls_in_another_order_are_refused():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    learner = starting()()
    with pytest.raises(braintrace.OptionError, match="call `forecast` before `learn`"):
        learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER)
    with pytest.raises(braintrace.OptionError, match="no buffer for forecasts"):
        learner.functional().forecast(learner.functional().state(), xs[0])
    with pytest.raises(braintrace.OptionError, match="`max_delay` is -1"):
        learner.init_forecasts(xs[0], max_delay=-1)
    learner = starting(1)()
    learner.forecast(xs[0])
    learner.forecast(xs[1])
    before = state_of(learner)
    for delay in (-1, 2):
        with pytest.raises(braintrace.OptionError, match="last 2 forecasts wait"):
            learner.learn(LEAKY.loss, ys[0], delay=delay, optimizer=OPTIMIZER)
    with pytest.raises(braintrace.OptionError, match="`loss_fn` takes"):
        learner.learn(lambda output: output.sum(), ys[0], optimizer=OPTIMIZER)
    for wrong, message in (
        (lambda output, y: output, "`loss_fn` must return a scalar loss"),
        (lambda output, y: output @ None, "`loss_fn` fails for `output`"),
    ):
        with pytest.raises(braintrace.OptionError, match=message):
            learner.learn(wrong, ys[0], optimizer=OPTIMIZER)
    with pytest.raises(TypeError, match="`masks`"):
        learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER, masks=1)
    pure = learner.functional()
    for learn in (learner.learn, functools.partial(pure.learn, pure.state())):
        with pytest.raises(TypeError, match="does not accept `step_fn`"):
            learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER, step_fn=LEAKY.loss)
    close(state_of(learner), before)
    learner.learn(LEAKY.loss, ys[1], optimizer=OPTIMIZER)
    with pytest.raises(braintrace.OptionError, match="labels arrive in order"):
        learner.learn(LEAKY.loss, ys[0], delay=1, optimizer=OPTIMIZER)
    learner.forecast(xs[2])
    learner.predict(xs[3:4])
    with pytest.raises(braintrace.OptionError, match="other methods of the learner pass over"):
        learner.learn(LEAKY.loss, ys[2], optimizer=OPTIMIZER)


def test_a_loss_that_takes_another_step_is_refused():
    learner = starting(0)()
    xs, ys = LEAKY.sequences(BATCH, LENGTH)
    learner.forecast(xs[0])
    with pytest.raises(braintrace.OptionError, match="`loss_fn` calls the learner"):
        learner.learn(lambda output, y: (learner(xs[0]) ** 2).sum(), ys[0], optimizer=OPTIMIZER)


def test_windows_span_no_update():
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    learner = build_learner(LEAKY, batch=BATCH, window=2)
    learner.forecast(xs[0])
    with pytest.raises(braintrace.OptionError, match="compile the learner without `window`"):
        learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER)


def test_learning_what_was_predicted_warns(recwarn):
    xs, ys = map(np.asarray, LEAKY.sequences(BATCH, LENGTH))
    learner = starting(0)()

    def learn(x, y, **options):
        options |= {"step_fn": lambda x, y: LEAKY.loss(learner(x), y), **WITHOUT}
        return learner.etrace_online(x[None], y[None], **options)

    learner.predict(xs[:1])
    with pytest.warns(UserWarning, match="runs them again") as caught:
        learn(xs[0], ys[0])
    assert caught[0].filename == __file__
    learner.predict(xs[:1])
    learn(xs[1], ys[1])  # other inputs
    learn(xs[0], ys[0])
    learner.predict(xs[:1])
    learner.reset_state()
    learn(xs[0], ys[0])  # another sequence
    learner.predict(xs[:1])
    learn(xs[0], ys[0], reset=[True])
    pure = learner.functional()
    state = jax.tree.map(jnp.copy, pure.state())
    learner.predict(xs[:1])
    pure.restore(state)
    learn(xs[0], ys[0])  # from the state before the prediction
    learner.forecast(xs[0])
    learner.learn(LEAKY.loss, ys[0], optimizer=OPTIMIZER)
    learner.etrace_evolve(xs[:1])
    assert not [w for w in recwarn if "runs them again" in str(w.message)]

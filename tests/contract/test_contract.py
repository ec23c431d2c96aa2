"""What the library promises about tracing, States, interrupts, threads and NaN."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

XS = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
BETA = 0.0
SCALE = {"of": 1.0}


class Leaky(brainstate.nn.Module):
    """A leaky layer, for which D-RTRL is exact, with dropout behind it."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 12).reshape(3, 4))
        self.leak = 0.5
        self.dropout = brainstate.nn.Dropout(0.5)

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = self.leak * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.dropout(self.h.value)


pytestmark = pytest.mark.core


@pytest.fixture
def learner():
    with brainstate.environ.context(fit=False):
        yield compiled()


def compiled(model=None, rule="d_rtrl", **options):
    return braintrace.compile(model or Leaky(), rule, XS[0], batch_size=2, **options)


def squares(learner):
    return lambda x: jnp.sum(learner(x) ** 2)


def gradient_of(learner, step_fn):
    learner.reset_state()
    (gradient,) = learner.etrace_grad(XS, step_fn=step_fn).values()
    return np.asarray(gradient)


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


# --- tracing, as in `jax.jit`


def test_a_model_is_read_when_it_is_compiled(learner):
    before = gradient_of(learner, squares(learner))
    learner.module.leak = 0.9
    np.testing.assert_array_equal(gradient_of(learner, squares(learner)), before)
    learner.compile_graph(XS[0])
    assert np.any(gradient_of(learner, squares(learner)) != before)


def test_a_function_is_compiled_once_for_its_code_and_what_it_holds(learner):
    traced = []

    def gradient(scale, offset=0.0):
        def step_fn(x, offset=offset):
            traced.append(None)
            return scale * jnp.sum(learner(x) ** 2) + offset

        return gradient_of(learner, step_fn)

    first = gradient(1.0)
    count = len(traced)
    np.testing.assert_array_equal(gradient(1.0), first)
    assert len(traced) == count
    close(gradient(3.0), 3 * first)
    gradient(1.0, offset=1.0)
    assert len(traced) == 3 * count
    gradient(1.0)
    assert len(traced) == 3 * count


def test_a_method_is_compiled_for_its_object(learner):
    @dataclasses.dataclass(eq=False)
    class Task:
        scale: float

        def step(self, x):
            return self.scale * jnp.sum(learner(x) ** 2)

    one, two = Task(1.0), Task(2.0)
    first = gradient_of(learner, one.step)
    close(gradient_of(learner, two.step), 2 * first)
    one.scale = 5.0  # an attribute is read when the method is traced
    np.testing.assert_array_equal(gradient_of(learner, one.step), first)


def test_globals_that_are_bound_again_are_seen(learner, monkeypatch):
    def plain(x):
        return jnp.sum((learner(x) - BETA) ** 2)

    def nested(x):
        return jax.tree.map(lambda y: jnp.sum((y - BETA) ** 2), learner(x))

    def of_object(x):
        return SCALE["of"] * jnp.sum(learner(x) ** 2)

    before = [gradient_of(learner, f) for f in (plain, nested, of_object)]
    monkeypatch.setitem(globals(), "BETA", 1.0)
    after = [gradient_of(learner, f) for f in (plain, nested)]
    assert all(np.any(a != b) for a, b in zip(after, before[:2], strict=True))
    monkeypatch.setitem(SCALE, "of", 2.0)  # the name is bound to the same object
    np.testing.assert_array_equal(gradient_of(learner, of_object), before[2])
    monkeypatch.setitem(globals(), "SCALE", dict(SCALE))
    close(gradient_of(learner, of_object), 2 * before[2])


def test_flags_of_the_environment_select_a_compiled_step(learner):
    brainstate.random.seed(0)
    pure = learner.functional()

    def at_start(run):
        learner.reset_state()
        return run()

    def by_functions(function, *arguments, **options):
        state, result = function(pure.state(), *arguments, **options)
        pure.restore(state)
        return jax.tree.leaves(result)[0]

    runs = {
        "call": lambda: learner(XS[0]),
        "etrace_grad": lambda: gradient_of(learner, squares(learner)),
        "predict": lambda: learner.predict(XS),
        "functional": lambda: by_functions(pure.step, XS[0]),
        "functional grad": lambda: by_functions(pure.grad, XS, step_fn=squares(learner)),
    }
    for name, run in runs.items():
        evaluated = []
        for fit in (False, True, False, True):
            with brainstate.environ.context(fit=fit):
                outcomes = [np.asarray(at_start(run)) for _ in range(2)]
            assert np.array_equal(*outcomes) != fit, name  # dropout draws in training alone
            evaluated += [] if fit else outcomes[:1]
        np.testing.assert_array_equal(*evaluated)


def test_a_sequence_goes_on_under_other_flags(learner):
    h = 0.0
    for x, fit in zip(XS, (False, True, False, True, True, False), strict=True):
        h = 0.5 * h + jnp.tanh(x @ learner.module.w.value)
        with brainstate.environ.context(fit=fit):
            found = learner(x)
    close(found, h)


# --- States


def assign(learner):
    learner.module.h.value = learner.module.h.value + 1


WRITES = {
    "an assignment": assign,
    "init_all_states": lambda learner: brainstate.nn.init_all_states(learner.module, batch_size=2),
    "the model itself": lambda learner: learner.module(XS[0]),
    "another learner": lambda learner: compiled(learner.module)(XS[0]),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_hidden_state_that_other_code_writes_is_noticed(learner, write):
    expected = learner(XS[0])
    WRITES[write](learner)
    for call in (learner, lambda x: learner.predict(XS), lambda x: learner.functional().state()):
        with pytest.raises(braintrace.LostTracesError, match=r"'h'.*reset_state"):
            call(XS[0])
    learner.reset_state()
    np.testing.assert_array_equal(learner(XS[0]), expected)


def test_a_write_after_a_restore_is_noticed(learner):
    learner(XS[0])
    pure = learner.functional()
    pure.restore(pure.state())
    learner(XS[1])
    pure.restore(pure.state())
    assign(learner)
    with pytest.raises(braintrace.LostTracesError):
        learner(XS[0])


def test_parameters_and_initial_values_are_yours(learner):
    learner(XS[0])
    learner.module.w.value = 2 * learner.module.w.value
    learner(XS[1])
    learner.reset_state()
    assign(learner)
    found = learner(XS[0])
    close(found, 0.5 + jnp.tanh(XS[0] @ learner.module.w.value))


def test_samples_start_anew_inside_a_transformation(learner):
    pure = learner.functional()
    done = np.array([[False, False], [True, False]])

    @jax.jit
    def run(state):
        def step(state, now):
            x, done = now
            return pure.step(pure.reset(state, where=done), x)

        return jax.lax.scan(step, state, (XS[:2], done))

    expected = learner.predict(XS[:2], reset=done)
    learner.reset_state()
    close(run(pure.state())[1], expected)


# --- old states are constants


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl", "immediate"])
def test_one_gradient_is_the_sum_of_those_of_its_steps(rule):
    with brainstate.environ.context(fit=False):
        learner = compiled(rule=rule)
        weight = learner.module.w

        def gradient(xs):
            loss = lambda: sum(squares(learner)(x) for x in xs)  # noqa: E731
            return brainstate.transform.grad(loss, weight)()

        whole = gradient(XS)
        learner.reset_state()
        close(whole, sum(gradient(XS[t : t + 1]) for t in range(len(XS))))
        learner.reset_state()
        loss = lambda: jnp.sum(brainstate.transform.for_loop(learner, XS) ** 2)  # noqa: E731
        close(brainstate.transform.grad(loss, weight)(), whole)


def outputs_of_steps(learner, state):
    return jax.lax.scan(learner.functional().step, state, XS)[1]


def losses_of_a_gradient(learner, state):
    options = {"step_fn": squares(learner), "return_value": True}
    return learner.functional().grad(state, XS, **options)[1][1]


@pytest.mark.parametrize("run", [outputs_of_steps, losses_of_a_gradient])
def test_states_before_a_call_have_no_derivative(learner, run):
    state = learner.functional().state()

    def loss(hidden, parameters):
        before = dataclasses.replace(state, hidden=hidden, parameters=parameters)
        return jnp.sum(run(learner, before) ** 2)

    of_states, of_weights = jax.grad(loss, (0, 1))(state.hidden, state.parameters)
    assert not any(map(np.any, jax.tree.leaves(of_states)))
    assert all(map(np.any, jax.tree.leaves(of_weights)))


def test_a_parameter_that_init_state_alone_reads_has_no_gradient():
    class Learned(Leaky):
        def __init__(self):
            super().__init__()
            self.first = brainstate.ParamState(jnp.ones(4))

        def init_state(self, batch_size):
            self.h = brainstate.HiddenState(jnp.broadcast_to(self.first.value, (batch_size, 4)))

    with (
        brainstate.environ.context(fit=False),
        pytest.warns(braintrace.ApproximationWarning, match="'first'"),
    ):
        learner = compiled(Learned())
        gradients = learner.etrace_grad(XS, step_fn=squares(learner))
    assert not np.any(gradients["first",]) and np.any(gradients["w",])


# --- interrupts


def calls_of(learner, optimizer):
    step_fn = squares(learner)
    return [
        lambda: learner.etrace_online(XS[:1], step_fn=step_fn, optimizer=optimizer),
        lambda: learner.etrace_online(XS, step_fn=step_fn, optimizer=optimizer),
        lambda: learner.etrace_grad(XS, step_fn=step_fn),
        lambda: learner(XS[0]),
        lambda: learner.predict(XS[:3]),
        lambda: learner.reset_state(where=np.array([True, False])),
        lambda: learner.reset_state(),
    ]


def test_a_call_that_is_interrupted_has_happened_or_has_not():
    """In processes of their own, since an interrupt inside JAX may break JAX's state."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ends = (
        subprocess.run([sys.executable, __file__, seed], env=environment).returncode
        for seed in "012"
    )
    assert next((end for end in ends if end != BROKEN_JAX), 1) == 0


BROKEN_JAX = 3


def works():
    try:
        return int(jnp.zeros(()) + 1) == 1
    except AttributeError:  # the interrupt came while JAX had no current trace
        return False


def interrupt_calls(seed):
    """Signals at random times of random calls; a twin makes the same calls without them."""
    learner, twin, draw = compiled(), compiled(), np.random.default_rng(seed)
    optimizer = optax.adam(1e-3)
    for each in (learner, twin):
        each.init_optimizer(optimizer)
        for call in 3 * calls_of(each, optimizer):  # so that no call is traced below
            call()
            bits(each.functional().state())
    pure, other, told = learner.functional(), twin.functional(), []

    def interrupt(*_):
        told.append(True)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(100):
        kind = draw.integers(7)
        for each in (learner, twin):  # whose traces are then overwritten: nothing else holds them
            calls_of(each, optimizer)[0]()
        before, start = bits(other.state()), time.perf_counter()
        calls_of(twin, optimizer)[kind]()
        wait = draw.uniform(0, 1) * (time.perf_counter() - start)
        call, count = calls_of(learner, optimizer)[kind], len(told)
        try:
            signal.setitimer(signal.ITIMER_REAL, wait + 1e-6)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException:  # JAX 0.8 raises another exception from an interrupt
            if len(told) == count:
                raise
            if not works():
                sys.exit(BROKEN_JAX)
        assert bits(pure.state()) in (before, bits(other.state()))
        other.restore(jax.tree.map(jnp.copy, pure.state()))
    assert len(told) > 25


# --- threads and transformations


def test_other_threads_use_the_functions_of_the_state(learner):
    pure = learner.functional()
    start, found = jax.tree.map(jnp.copy, pure.state()), []
    predict = jax.jit(lambda state: pure.predict(state, XS)[1])
    expected = predict(start)
    threads = [threading.Thread(target=lambda: found.append(predict(start))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        learner.etrace_grad(XS, step_fn=squares(learner))
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(np.array_equal(each, expected) for each in found)


def test_a_learner_in_a_transformation_of_jax_names_them(learner):
    with pytest.raises(braintrace.OptionError, match=r"learner.functional\(\)"):
        jax.jit(learner)(XS[0])


# --- NaN


@pytest.mark.parametrize("where", ["input", "label"])
def test_a_nan_costs_one_update_and_its_samples(learner, where):
    xs, ys = XS.copy(), np.zeros((6, 2, 4), np.float32)
    (xs if where == "input" else ys)[2, 1] = np.nan
    twin, optimizer = compiled(), optax.adam(1e-2)
    reset = np.zeros((6, 2), bool)
    reset[3, 1] = where == "input"  # a bad label reaches no memory
    options = {"optimizer": optimizer, "reset": reset, "mask": np.arange(6) != 2}
    expected = twin.etrace_online(XS, np.zeros_like(ys), step_fn=loss_of(twin), **options)
    with pytest.warns(braintrace.NonFiniteWarning, match="step 2"):
        losses = learner.etrace_online(xs, ys, step_fn=loss_of(learner), optimizer=optimizer)
    assert learner.skipped_updates == 1
    close(np.delete(losses, 2), np.delete(expected, 2))
    close(learner.module.w.value, twin.module.w.value)


def loss_of(learner):
    return lambda x, y: jnp.sum((learner(x) - y) ** 2)


if __name__ == "__main__":
    with brainstate.environ.context(fit=False):
        interrupt_calls(int(sys.argv[1]))

"""A step calls back once, and everything that is computed of it reads the same answer."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import backpropagated
from drivers import calls_gradient, named, quietly_compiled, stream_gradient
from jax.experimental import io_callback
from readouts import data, values

import braintrace
from braintrace._jaxpr import can_be_replayed, recorded, replayed

pytestmark = pytest.mark.usefixtures("float64")
STEPS, BATCH, H = 5, 2, 4
ASKED = {"plain": 2, "nested": 4, "unknown": 3}
"""How often a step of each model asks."""


def cosine(number):
    """In single precision: the thread that JAX looks at answers in may have no `float64`."""
    return np.cos(np.float32(number))


ANSWER = jax.ShapeDtypeStruct((), np.float32)


class Host:
    """Somebody whose answer differs from call to call, and who notes what he is asked and told."""

    def __init__(self):
        self.asked, self.told = [], []

    def answer(self, what):
        self.asked.append(int(what))
        return cosine(1 + len(self.asked))

    def tell(self, what):
        self.told.append(int(what))

    def forget(self):
        jax.effects_barrier()
        self.asked.clear()
        self.told.clear()


def answers(kind):
    return cosine(2 + np.arange(STEPS * ASKED[kind])).reshape(STEPS, -1).astype(float)


class Net(brainstate.nn.Module):
    """Leaky units whose drive and whose readout depend on what a host answers."""

    def __init__(self, kind, host=None):
        super().__init__()
        self.kind, self.host = kind, host
        self.w = brainstate.ParamState(jax.device_put(values(3, 3, H)))
        self.w_out = brainstate.ParamState(jax.device_put(values(4, H, 2)))

    def init_state(self, batch_size=None):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.full((*lead, H), 0.1))
        self.o = brainstate.HiddenState(jnp.full((*lead, 2), 0.3))

    def ask(self, what):
        return io_callback(self.host.answer, ANSWER, what, ordered=True).astype(float)

    def update(self, x, given=None):
        ask = self.ask if given is None else lambda what: given[what]
        tell = (lambda what: None) if given is not None else self.tell
        zero = 0 * jax.lax.stop_gradient(self.h.value).sum().astype(int)
        y = jnp.tanh(braintrace.matmul(x, self.w.value))
        if self.kind == "plain":
            self.h.value = 0.7 * self.h.value + ask(zero) * y
            tell(7 + zero)
            scale = ask(1 + zero)
        elif self.kind == "unknown":
            self.h.value = 0.7 * self.h.value + self.sum_of_two(ask, zero, given is None) * y
            tell(7 + zero)
            scale = ask(2 + zero)
        else:

            def substep(k):
                self.h.value = 0.8 * self.h.value + ask(k + zero) * y

            brainstate.transform.for_loop(substep, jnp.arange(2))

            def positive():
                tell(7 + zero)
                return ask(2 + zero) * self.h.value

            scale = brainstate.transform.cond(zero == 0, positive, lambda: self.h.value)
            scale = scale * ask(3 + zero)
        self.o.value = 0.8 * self.o.value + (scale * self.h.value) @ self.w_out.value
        return self.o.value

    def sum_of_two(self, ask, zero, in_loop):
        """In a loop of which nobody knows beforehand how often it asks."""

        def more(carry):
            k, total = carry
            return k + 1, total + ask(k)

        if not in_loop:
            return ask(0) + ask(1)
        return jax.lax.while_loop(lambda c: c[0] < 2, more, (zero, jnp.zeros(())))[1]

    def tell(self, what):
        jax.debug.callback(self.host.tell, what, ordered=True)


def loss_of(output, target):
    return jnp.sum((output - target) ** 2)


@functools.cache
def bptt(kind):
    """The gradient of the summed loss, of a model that is given the answers."""
    model, (xs, targets) = Net(kind), data()

    def loss(model, x, given, target):
        return loss_of(model(x, given), target)

    return named(backpropagated(model, loss, xs, answers(kind), targets, batch_size=BATCH))


def check_calls(host, kind):
    jax.effects_barrier()
    assert host.asked == [*range(ASKED[kind])] * STEPS
    assert host.told == [7] * STEPS


def of_sequence(learner, **options):
    return named(
        learner.etrace_grad(
            *data(), step_fn=lambda x, y: loss_of(learner(x), y), reduction="sum", **options
        )
    )


def of_stream(learner):
    return named(stream_gradient(learner, *data(), step_fn=lambda x, y: loss_of(learner(x), y)))


def of_own_loop(learner):
    model = learner.algorithm.model
    return named(calls_gradient(model, lambda x, y: loss_of(learner(x), y), *data()))


PATHS = {
    "one chunk": of_sequence,
    "chunks of two": functools.partial(of_sequence, chunk_size=2),
    "masked": functools.partial(of_sequence, mask=np.ones(STEPS), chunk_size=3),
    "stream": of_stream,
    "own loop": of_own_loop,
}


@pytest.mark.parametrize(("kind", "algorithm"), [("nested", "rtrl")])
def test_every_rule(kind, algorithm):
    """It learns what it would if the answers were an argument of the step."""
    host, (xs, targets) = Host(), data()
    learner = quietly_compiled(Net(kind, host), algorithm, xs[0], batch_size=BATCH)
    found = of_sequence(learner, chunk_size=2)
    check_calls(host, kind)
    sequences = (xs, jax.device_put(answers(kind)), targets)
    twin = quietly_compiled(Net(kind), algorithm, xs[0], answers(kind)[0], batch_size=BATCH)
    expected = twin.etrace_grad(
        *sequences,
        step_fn=lambda x, given, y: loss_of(twin(x, given), y),
        reduction="sum",
        chunk_size=2,
    )
    assert_gradients_close(found, named(expected), 1e-10)


@pytest.mark.parametrize("kind", ASKED)
def test_a_linear_readout_that_multiplies_answers_is_exact(kind):
    graph = quietly_compiled(Net(kind, Host()), "d_rtrl", data()[0][0], batch_size=BATCH).graph
    assert not graph.diagnostics


def test_no_derivative_goes_through_a_callback():
    """Not without being said to be none: the same in JAX."""

    class Through(Net):
        def update(self, x):
            self.h.value = 0.7 * self.h.value + braintrace.matmul(x, self.w.value)
            shape = jnp.zeros(self.h.value.shape)
            return io_callback(np.sin, shape, self.h.value, ordered=True) @ self.w_out.value

    learner = braintrace.compile(Through("plain"), "d_rtrl", data()[0][0], batch_size=BATCH)
    with pytest.raises(ValueError, match="io_callback` has no derivative"):
        of_sequence(learner)


def test_calls_inside_of_everything():
    host = Host()

    def inside(x):
        @jax.jit
        def called(x):
            return x + io_callback(host.answer, ANSWER, 0, ordered=True)

        def step(x, k):
            jax.debug.callback(host.tell, k, ordered=True)
            branches = [called, lambda x: called(called(x)), jnp.sin]
            return jax.lax.switch(k, branches, x), x

        x, before = jax.lax.scan(step, x, jnp.arange(3), reverse=True)
        _, last = jax.lax.while_loop(lambda c: c[0] < 2, silent, (0, x))
        _, last = jax.lax.while_loop(lambda c: c[0] < 2, asking, (0, last))
        return last, before

    def asking(carry):
        return carry[0] + 1, carry[1] + io_callback(host.answer, ANSWER, 0, ordered=True)

    def silent(carry):
        jax.debug.callback(host.tell, carry[0], ordered=True)
        return carry[0] + 1, 2.0 * carry[1]

    jaxpr = jax.make_jaxpr(inside)(jnp.float32(1.0))
    assert can_be_replayed(jaxpr)
    found, answers = jax.jit(functools.partial(recorded, jaxpr))([jnp.float32(1.0)])
    jax.effects_barrier()
    assert (host.asked, host.told) == ([0] * 5, [2, 1, 0, 0, 1])
    again = jax.jit(functools.partial(replayed, jaxpr))([jnp.float32(1.0)], answers)
    jax.effects_barrier()
    assert len(host.asked) == 5
    assert len(host.told) == 5
    np.testing.assert_array_equal(np.hstack(found), np.hstack(again))


class Telling(Net):
    """Units whose drive passes a branch or a loop that tells its host, and is told nothing."""

    def update(self, x):
        drive = 0.7 * self.h.value + braintrace.matmul(x, self.w.value)

        def told(value, k=0):
            self.tell(k)
            return jnp.tanh(value)

        if self.kind == "branch":
            self.h.value = jax.lax.cond(jnp.sum(x) < 1e9, told, jnp.tanh, drive)
        else:
            loop = jax.lax.scan(lambda v, k: (told(v, k), None), drive, jnp.arange(2))
            self.h.value = loop[0]
        return self.h.value @ self.w_out.value


@pytest.mark.parametrize(
    ("kind", "times", "path"),
    [
        ("branch", 1, "one chunk"),
        ("branch", 1, "chunks of two"),
        ("branch", 1, "masked"),
        ("branch", 1, "stream"),
        ("loop", 2, "own loop"),
    ],
)
def test_a_branch_or_loop_on_the_way_to_a_state_tells_once(kind, times, path):
    host = Host()
    learner = braintrace.compile(Telling(kind, host), "d_rtrl", data()[0][0], batch_size=BATCH)
    host.forget()
    PATHS[path](learner)
    jax.effects_barrier()
    assert host.told == [*range(times)] * STEPS


def test_no_derivative_goes_through_a_loop_that_asks():
    class Asking(Net):
        def update(self, x):
            def settled(carry):
                h, error = carry
                return 0.5 * h, self.ask(error.astype(int)).astype(float)

            self.h.value = 0.7 * self.h.value + braintrace.matmul(x, self.w.value)
            found = jax.lax.while_loop(lambda c: c[1] > 0.5, settled, (self.h.value, 1.0))
            return found[0] @ self.w_out.value

    learner = braintrace.compile(Asking("", Host()), "d_rtrl", data()[0][0], batch_size=BATCH)
    with pytest.raises(ValueError, match="while_with_callback` has no derivative"):
        of_sequence(learner)

"""Attributes that a model, or a function of the user, writes while it is traced."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_paths import RUNS
from jax.experimental import io_callback

import braintrace

LENGTH, BATCH = 6, 2
XS = np.random.default_rng(0).normal(size=(LENGTH, BATCH, 3)).astype(np.float32)
WEIGHT = 0.3 * np.sin(np.arange(12, dtype=np.float32)).reshape(3, 4)


class Leaky(brainstate.nn.Module):
    """A leaky layer; ``gain(self)`` returns its decay."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jax.device_put(WEIGHT))
        self.decay = np.float32(0.9)

    def gain(self):
        return self.decay

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = self.gain() * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value

    def set_decay(self, decay):
        self.decay = np.float32(decay)


class MadeAtFirst(Leaky):
    """Its decay is made when it is first needed."""

    made = None

    def gain(self):
        if self.made is None:
            self.made = np.full(4, self.decay)
        return self.made

    def set_decay(self, decay):
        self.made = np.full(4, decay, np.float32)


class MadeAtFirstInADict(Leaky):
    def __init__(self):
        super().__init__()
        self.made = {}

    def gain(self):
        return self.made.setdefault("decay", self.decay)

    def set_decay(self, decay):
        self.made["decay"] = np.float32(decay)


class OwnMode(Leaky):
    """It writes its decay in one mode, in which it starts."""

    is_own = True

    def gain(self):
        if self.is_own:
            self.decay = np.float32(0.9)
        return self.decay

    def set_decay(self, decay):
        self.is_own, self.decay = False, np.float32(decay)


class Noting(Leaky):
    """It notes its last input, and how often it was traced."""

    last, count = None, 0

    def gain(self):
        self.count += 1
        return self.decay

    def update(self, x):
        self.last = x
        return super().update(x)


@jax.jit
@jax.grad
def by_backpropagation(w, gains):
    """The gradient of the losses of a sequence whose decay changes."""

    def step(h, now):
        gain, x = now
        h = gain * h + x @ w
        return h, (h**2).sum()

    return jax.lax.scan(step, jnp.zeros((BATCH, 4)), (gains, XS))[1].sum()


def compiled(model, rule="d_rtrl"):
    return braintrace.compile(model, rule, XS[0], batch_size=BATCH)


@pytest.mark.by_day(*(f"MadeAtFirst-{run}" for run in RUNS), "OwnMode-own loop", "Noting-sequence")
@pytest.mark.parametrize(
    ("kind", "run"),
    [
        *((MadeAtFirst, run) for run in RUNS),
        (MadeAtFirstInADict, "sequence"),
        (OwnMode, "own loop"),
        (OwnMode, "stream"),
        (Noting, "sequence"),
        (Noting, "pure"),
    ],
)
def test_the_user_may_change_what_the_model_has_written(kind, run):
    """More than once, and back to what it was."""
    model = kind()
    learner = compiled(model)
    parts = [RUNS[run](learner, XS[:1])["w",]]  # with its own decay
    for x, decay in zip(XS[1:], (0.4, 0.7, 0.4, 0.9, 0.7), strict=True):
        model.set_decay(decay)
        parts.append(RUNS[run](learner, x[None])["w",])
    expected = by_backpropagation(WEIGHT, np.float32([0.9, 0.4, 0.7, 0.4, 0.9, 0.7]))
    np.testing.assert_allclose(sum(map(np.asarray, parts)), expected, rtol=1e-5)


def test_a_model_that_notes_things_is_traced_once_for_each_size():
    model = Noting()
    learner = compiled(model)
    for size in (3, BATCH, 3, BATCH):
        learner.reset_state(size)
        learner(np.ones((size, 3), np.float32))
    assert model.count == 2


def test_a_model_that_notes_things_keeps_its_programs():
    """Whatever it has noted, in batches of several sizes and after changes to and fro."""
    model = Noting()
    learner = compiled(model)
    graphs = {}
    for size in (BATCH, 3, BATCH, 3):
        for decay in (0.9, 0.4):
            learner.reset_state(size)
            model.set_decay(decay)
            learner(np.ones((size, 3), np.float32))
            assert graphs.setdefault((size, decay), learner.graph) is learner.graph


def test_copies_go_on_with_what_the_model_has_written():
    model = MadeAtFirst()
    learner = compiled(model)
    learner(XS[0])
    twin = copy.deepcopy(learner)
    twin.algorithm.model.set_decay(0.4)
    first = XS[0] @ WEIGHT
    np.testing.assert_allclose(twin(XS[1]), 0.4 * first + XS[1] @ WEIGHT, rtol=1e-5)
    np.testing.assert_allclose(learner(XS[1]), 0.9 * first + XS[1] @ WEIGHT, rtol=1e-5)


@pytest.mark.parametrize("run", ["sequence", "stream", "pure"])
def test_a_step_function_that_changes_the_model_before_its_step_is_refused(run):
    """Also where it restores the value: one call has one model."""
    model = Leaky()
    learner = compiled(model)
    learner(XS[0])

    def with_other_decay(x):
        before = model.decay
        model.set_decay(0.4)
        output = learner(x)
        model.decay = before
        return (output**2).sum()

    functional = learner.functional()
    before = np.asarray(model.h.value)
    calls = {
        "sequence": lambda: learner.etrace_grad(XS, step_fn=with_other_decay),
        "stream": lambda: learner.etrace_online(
            XS, step_fn=with_other_decay, update_fn=lambda gradients: None
        ),
        "pure": lambda: functional.grad(functional.state(), XS, step_fn=with_other_decay),
    }
    told = r"`step_fn` changes attributes of `Leaky`.*: `decay` \(.*0.9.* then, .*0.4.* now\).*argu"
    with pytest.raises(braintrace.NotCompiledError, match=told):
        calls[run]()
    np.testing.assert_array_equal(model.h.value, before)
    model.set_decay(0.9)
    expected = 0.9 * before + XS[1] @ WEIGHT
    np.testing.assert_allclose(learner(XS[1]), expected, rtol=1e-5)


@pytest.mark.parametrize("writer", ["step_fn", "update_fn"])
def test_what_a_function_changes_after_its_step_holds_from_the_next_call_on(writer):
    model = Leaky()
    learner = compiled(model)

    def step_fn(x):
        loss = (learner(x) ** 2).sum()
        if writer == "step_fn":
            model.set_decay(0.4)
        return loss

    def update_fn(gradients):
        if writer == "update_fn":
            model.set_decay(0.4)

    learner.etrace_online(XS[:2], step_fn=step_fn, update_fn=update_fn)
    output = learner(XS[2])
    h = np.zeros((BATCH, 4), np.float32)
    for decay, x in zip((0.9, 0.9, 0.4), XS, strict=False):
        h = decay * h + x @ WEIGHT
    np.testing.assert_allclose(output, h, rtol=1e-5)


def with_slope(slope, tanh=lambda x: jnp.tanh(x)):
    """Return ``tanh`` with a derivative of its own, which reads ``slope()`` when it is traced."""
    spike = jax.custom_jvp(tanh)
    spike.defjvp(lambda primals, tangents: (spike(*primals), slope() * tangents[0]))
    return spike


def of_jax(slope):
    return with_slope(slope, jnp.tanh)


def backward(slope):
    spike = jax.custom_vjp(lambda x: jnp.tanh(x))
    spike.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (slope() * g,))
    return spike


def gradient(slope):
    return jax.custom_gradient(lambda x: (jnp.tanh(x), lambda g: slope() * g))


class Spiking(Leaky):
    """A leaky layer in a function whose derivative reads an attribute, and that notes things."""

    slope = 1.0

    def __init__(self, spike=with_slope):
        super().__init__()
        self.spike = spike

    def update(self, x):
        self.last = x
        self.h.value = super().update(x)
        return self.spike(lambda: self.slope)(self.h.value)


@pytest.mark.by_day(
    "sequence-with_slope", "own loop-of_jax", "sequence-gradient", "own loop-backward"
)
@pytest.mark.parametrize("spike", [with_slope, of_jax, backward, gradient])
@pytest.mark.parametrize("run", RUNS)
def test_a_derivative_sees_a_change_of_an_attribute(run, spike):
    """Although the values of the step do not change."""
    model, twin = Spiking(spike), Spiking(spike)
    twin.slope = 3.0
    learner, expected = compiled(model), compiled(twin)
    RUNS[run](learner, XS[:1])
    learner.reset_state()
    model.slope = 3.0
    found = np.asarray(RUNS[run](learner, XS[:1])["w",])
    np.testing.assert_allclose(found, RUNS[run](expected, XS[:1])["w",], rtol=1e-6)


@pytest.mark.parametrize("call", [jax.debug.callback, lambda f, x: io_callback(f, None, x)])
def test_a_callback_sees_another_function(call):
    class Recorded(Leaky):
        def update(self, x):
            output = super().update(x)
            call(self.sink, output)
            return output

    first, second = [], []
    model = Recorded()
    model.sink = first.append
    learner = compiled(model)
    learner(XS[0])
    model.sink = second.append
    learner(XS[1])
    jax.effects_barrier()
    assert [len(first), len(second)] == [1, 1]


def test_a_note_of_a_step_function_compiles_nothing_where_derivatives_are_the_users_own():
    model = Spiking()
    learner = compiled(model)

    def step_fn(x):
        output = learner(x)
        model.loss = (output**2).sum()
        return model.loss

    graph = learner.graph
    for _ in range(3):
        learner.etrace_grad(XS, step_fn=step_fn)
        learner(XS[0])
    assert learner.graph is graph

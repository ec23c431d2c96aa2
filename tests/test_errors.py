"""Mistakes that newcomers make first, or that would give a wrong number in silence."""

import pickle

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import nn

XS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 2, 3)
X = XS[0]


class Leaky(brainstate.nn.Module):
    def __init__(self, weight=None, start=0.0):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)) if weight is None else weight)
        self.start = start

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(self.start + jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


class Memoryless(Leaky):
    def update(self, x):
        return braintrace.matmul(x, self.w.value)


class WithoutBatch(Leaky):
    def init_state(self, **_):
        self.h = brainstate.HiddenState(jnp.zeros(4))


class Reservoir(Leaky):
    def update(self, x):
        drive = 0.1 * jnp.sum(self.h.value, axis=-1, keepdims=True) + jnp.sum(x)
        self.h.value = jnp.tanh(drive + 0.5 * self.h.value)
        return self.h.value @ self.w.value.T


def compiled(model=None, algorithm="d_rtrl", example=X, batch_size=2, **options):
    model = Leaky() if model is None else model
    return braintrace.compile(model, algorithm, example, batch_size=batch_size, **options)


@pytest.fixture(scope="module")
def shared():
    return compiled()


@pytest.fixture
def learner(shared):
    shared.reset_state()
    return shared


def function(step):
    model = braintrace.from_function(step, {"w": jnp.ones((3, 4))}, {"h": jnp.zeros((2, 4))})
    return compiled(model, "rtrl")


def without_unit(neuron):
    with brainstate.environ.context(dt=1.0):
        compiled(neuron, example=X * u.mA)


COMPILATION = {
    "a function as the model": (lambda: compiled(lambda x: x), "OptionError", "from_function"),
    "an unknown rule": (lambda: compiled(algorithm="bptt"), "OptionError", "d_rtrl"),
    "an option of another rule": (lambda: compiled(decay=0.9), "TypeError", "decay"),
    "the loss of another package": (lambda: compiled(loss_output=0), "OptionError", "`step_fn`"),
    "a solver of another package": (lambda: compiled(fast_solve=True), "OptionError", "out"),
    "prints of another package": (lambda: compiled(verbose=True), "OptionError", "report"),
    "a method of another package": (lambda: compiled(vjp_method=""), "OptionError", "`window=k`"),
    "no batch size": (lambda: compiled(batch_size=None), "TypeError", "batch_size"),
    "another batch size": (lambda: compiled(batch_size=3), "TypeError", "`x`"),
    "states without a batch": (lambda: compiled(WithoutBatch()), "CompilationError", "'h'"),
    "no hidden state": (lambda: compiled(Memoryless()), "CompilationError", "HiddenState"),
    "nothing that learns": (
        lambda: compiled(brainstate.nn.ValinaRNNCell(3, 4), mark="explicit"),
        "CompilationError",
        "braintrace.matmul",
    ),
    "integer weights": (
        lambda: compiled(Leaky(jnp.ones((3, 4), int))),
        "DtypeError",
        "'w'",
    ),
    "complex states": (lambda: compiled(Leaky(start=0j)), "CompilationError", "complex"),
    "a fixed reservoir": (lambda: compiled(Reservoir()), "CompilationError", "`Immediate`"),
    "no time step": (lambda: compiled(nn.LIF(3), example=X * u.mA), "OptionError", "dt"),
    "not initialised": (
        lambda: braintrace.D_RTRL(Leaky()).traces,
        "NotInitializedError",
        "compile_graph",
    ),
    "not compiled": (lambda: braintrace.D_RTRL(Leaky())(X), "NotCompiledError", "compile_graph"),
    "a state with other names": (
        lambda: function(lambda params, state, x: ({"g": state["h"]}, x)),
        "ShapeError",
        "state",
    ),
    "no pair of a state and an output": (
        lambda: function(lambda params, state, x: state["h"]),
        "OptionError",
        "output",
    ),
    "a bias that would be broadcast": (
        lambda: braintrace.matmul(X, jnp.ones((3, 4)), jnp.ones((2, 4))),
        "ShapeError",
        "`bias`",
    ),
    "a time step without a unit": (
        lambda: without_unit(nn.LIF(3)),
        "UnitError",
        "time step",
    ),
}


def grad(b, *sequences, step_fn=None, **options):
    loss = step_fn or (lambda x, *_: b(x).sum())
    return b.etrace_grad(*(sequences or (XS,)), step_fn=loss, **options)


def online(b, **options):
    return b.etrace_online(XS, step_fn=lambda x: b(x).sum(), **options)


def written(b, name):
    state = getattr(b.module, name)
    state.value = 2 * state.value
    return b(X).sum()


FLAGS = np.zeros(3, bool)
CALLS = {
    "another size": (lambda b: b(jnp.ones((2, 5))), "ShapeError", "(2, 3)"),
    "another batch": (lambda b: b.predict(XS[:, :1]), "ShapeError", "reset_state"),
    "one sample": (lambda b: b(X[0]), "ShapeError", "x[None]"),
    "no batch axis": (lambda b: b.predict(XS[:, 0]), "ShapeError", "xs[:, None]"),
    "batch before time": (lambda b: grad(b, XS.swapaxes(0, 1)), "ShapeError", "time is the first"),
    "complex inputs": (lambda b: b(X * 1j), "DtypeError", "complex64"),
    "units of inputs": (lambda b: b(X * u.mV), "ShapeError", "mV"),
    "different lengths": (lambda b: grad(b, XS, XS[:3]), "ShapeError", "time axis"),
    "flags of `reset`": (lambda b: grad(b, reset=FLAGS), "ShapeError", "`reset`"),
    "numbers as flags": (lambda b: grad(b, reset=np.zeros(4)), "ShapeError", "booleans"),
    "flags of `where`": (lambda b: b.reset_state(where=FLAGS), "ShapeError", "`where`"),
    "weights of `mask`": (lambda b: grad(b, mask=np.ones(3)), "ShapeError", "`mask`"),
    "weights of samples": (lambda b: grad(b, mask=np.ones((4, 2))), "ShapeError", "sequence"),
    "no call": (lambda b: grad(b, step_fn=lambda x: x.sum()), "OptionError", "0 times"),
    "two calls": (lambda b: grad(b, step_fn=lambda x: (b(x) + b(x)).sum()), "OptionError", "once"),
    "no scalar": (lambda b: grad(b, step_fn=b), "OptionError", "scalar"),
    "a loss in mV": (
        lambda b: grad(b, step_fn=lambda x: b(x).sum() * u.mV),
        "OptionError",
        "Divide it",
    ),
    "a written state": (lambda b: grad(b, step_fn=lambda x: written(b, "h")), "OptionError", "'h'"),
    "a written weight": (
        lambda b: grad(b, step_fn=lambda x: written(b, "w")),
        "OptionError",
        "parameter",
    ),
    "no optimizer": (lambda b: online(b), "OptionError", "optimizer"),
    "both": (
        lambda b: online(b, optimizer=optax.sgd(0.1), update_fn=print),
        "OptionError",
        "optimizer",
    ),
    "a word that is no choice": (
        lambda b: online(b, optimizer=optax.sgd(0.1), nonfinite="drop"),
        "OptionError",
        "skip",
    ),
    "pickle": (lambda b: pickle.dumps(b), "NotPicklableError", "save"),
}


def check(call, expected, word):
    with pytest.raises(getattr(braintrace, expected, None) or __builtins__[expected]) as caught:
        call()
    assert word in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize("name", COMPILATION)
def test_a_wrong_model_is_told(name):
    check(*COMPILATION[name])


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_told(name, learner):
    call, *told = CALLS[name]
    check(lambda: call(learner), *told)


def test_an_error_of_a_model_names_the_call():
    class Broken(Leaky):
        def update(self, x):
            return super().update(x) + jnp.ones(7)

    with pytest.raises((TypeError, ValueError), match="7") as caught:
        compiled(Broken())
    assert "`Broken.update`" in "".join(caught.value.__notes__)

"""Calls that are wrong, each with a part of the error's message.

A row is ``(text, call)``: `call` gets a `Bench` and is wrong in one thing; `text` is a phrase of
the message, or a tuple of phrases. `test_wrong_calls` checks every row.
"""

import dataclasses
import functools
from typing import NamedTuple

import brainstate
import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from drivers import build_learner

import braintrace
from braintrace import nn

CASE = cases.BY_NAME["leaky"]
XS, YS = CASE.sequences(2, 4)
X = XS[0]
STATE = brainstate.ParamState(jnp.ones((3, 4)))
OBJECTS = np.array([[object(), 1], [2, 3]], dtype=object)
KEY = jax.random.key(0)
RAGGED = [[1.0, 2.0], [3.0]]
IS_A_STATE = "is a ParamState; expected an array of numbers. Give its `.value`"


class Frame:
    """Looks like a table of some data frame library: columns with dtypes, no dtype of its own."""

    shape = (4, 2)
    dtypes = ("float64", "object")

    def __len__(self):
        return 4


@dataclasses.dataclass(frozen=True)
class Bench:
    """Learners that the rows share, and what is usually given to them."""

    learner: braintrace.Learner
    mapped: braintrace.Learner
    windows: braintrace.Learner
    currents: braintrace.Learner

    def loss(self, x, y):
        return CASE.loss(self.learner(x), y)

    def grad(self, *sequences, **options):
        sequences = sequences or (XS, YS)
        return self.learner.etrace_grad(*sequences, **{"step_fn": self.loss, **options})

    def online(self, *sequences, **options):
        sequences = sequences or (XS, YS)
        given = {"step_fn": self.loss, "update_fn": lambda gradients: None, **options}
        return self.learner.etrace_online(*sequences, **given)

    def stepping(self, *arguments):
        """A gradient whose step function calls the learner with wrong arguments."""
        return self.grad(step_fn=lambda x, y: jnp.sum(self.learner(*arguments)))

    def returning(self, result, **options):
        """A gradient whose step function returns something else than a loss."""
        return self.grad(step_fn=lambda x, y: result(self.learner(x), y), **options)


@functools.cache
def bench():
    with brainstate.environ.context(dt=1.0 * u.ms):
        currents = braintrace.compile(Currents(), "d_rtrl", X * u.mA, batch_size=2)
    with pytest.warns(DeprecationWarning, match="multi-step"):
        windows = build_learner(CASE, vjp_method="multi-step")
    return Bench(
        learner=build_learner(CASE),
        mapped=build_learner(CASE, style="mapped"),
        windows=windows,
        currents=currents,
    )


class Currents(brainstate.nn.Module):
    """Integrate-and-fire neurons behind a weight; the input is a current."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.neurons = nn.LIF(4, R=1.0 * u.ohm)

    def update(self, x):
        return self.neurons(braintrace.matmul(x, self.w.value))


class OfBatch(brainstate.nn.Module):
    """A leaky layer that only has states for a batch; the step can be replaced."""

    def __init__(self, step=None):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.step = step

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        if self.step is not None:
            return self.step(self, x)
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


class OfSample(OfBatch):
    """The same with states for one sample only."""

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(4))


class Started(OfBatch):
    """The same with a part whose states have a gain at the start."""

    def __init__(self):
        super().__init__()
        self.part = StartedPart()

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)

    def update(self, x):
        return self.part(super().update(x))


class StartedPart(brainstate.nn.Module):
    def init_state(self, *_, gain=1.0, batch_size=None):
        self.v = brainstate.HiddenState(gain * jnp.ones((batch_size, 4)))

    def update(self, x):
        self.v.value = 0.9 * self.v.value + x
        return self.v.value


class Marked(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.LSTMCell(3, 4)

    def update(self, x):
        return self.cell(x)


def compiled(model=None, algorithm="d_rtrl", *arguments, **options):
    arguments = arguments or (X,)
    model = CASE.build() if model is None else model
    return braintrace.compile(model, algorithm, *arguments, **{"batch_size": 2, **options})


def stepping(step, *arguments, **options):
    return compiled(OfBatch(step), "d_rtrl", *arguments, **options)


def algorithm(**options):
    return braintrace.D_RTRL(CASE.build(), **options)


def initialised(*arguments, **options):
    model = CASE.build()
    brainstate.nn.init_all_states(model, batch_size=2)
    braintrace.D_RTRL(model).compile_graph(*arguments, **options)


def started_compile(model, *arguments, **options):
    with brainstate.environ.context(dt=1.0 * u.ms):
        return compiled(model, "d_rtrl", *arguments, **options)


def written(state):
    state.h.value = 0.9 * state.h.value
    return state.h.value


COMPILE = {
    "no model": ("`model` is None", lambda b: braintrace.compile(None, "d_rtrl", X)),
    "a class for a model": (
        "`model` is the GraphNodeMeta",
        lambda b: braintrace.compile(OfBatch, "d_rtrl", X),
    ),
    "a function for a model": (
        ("`model` is the function", "`braintrace.from_function`"),
        lambda b: braintrace.compile(lambda x: x, "d_rtrl", X),
    ),
    "a learner for a model": (
        "`model` is a Learner",
        lambda b: braintrace.compile(b.learner, "d_rtrl", X),
    ),
    "unknown algorithm": (
        "`algorithm` is 'bptt'; expected one of 'd_rtrl'",
        lambda b: compiled(None, "bptt"),
    ),
    "name with a slip": (
        "`algorithm` is 'drtl'; did you mean 'd_rtrl'?",
        lambda b: compiled(None, "drtl"),
    ),
    "no algorithm": ("`algorithm` is None", lambda b: compiled(None, None)),
    "a number for an algorithm": ("`algorithm` is 3", lambda b: compiled(None, 3)),
    "a class of another kind": (
        "`algorithm` is the GraphNodeMeta `OfBatch`",
        lambda b: compiled(None, OfBatch),
    ),
    "the base class": (
        "`algorithm` is the GraphNodeMeta",
        lambda b: compiled(None, braintrace.ETraceAlgorithm),
    ),
    "an algorithm made before": ("`algorithm` is a D_RTRL", lambda b: compiled(None, algorithm())),
    "batch_size forgotten, lstm": (
        "batch, pass `batch_size=2`",
        lambda b: compiled(nn.LSTMCell(3, 4), batch_size=None),
    ),
    "batch_size forgotten, leaky": (
        "batch, pass `batch_size=2`",
        lambda b: compiled(batch_size=None),
    ),
    "batch_size forgotten, spikes": (
        "batch, pass `batch_size=2`",
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X * u.mA, batch_size=None),
    ),
    "batch_size wanted by init_state": (
        "`init_state` of `OfBatch` fails with `batch_size`",
        lambda b: compiled(OfBatch(), batch_size=None),
    ),
    "batch_size unknown to init_state": (
        "`init_state` of `OfSample` fails with `batch_size`",
        lambda b: compiled(OfSample(), batch_size=2),
    ),
    "another batch_size": (("and `batch_size` is 3", "'h'"), lambda b: compiled(batch_size=3)),
    "vmap, other batch": (
        "(2, 3) and `batch_size` is",
        lambda b: compiled(vmap=True, batch_size=3),
    ),
    "vmap, scalar": (
        "`example_arguments` have the shapes () and `batch_size`",
        lambda b: compiled(None, "d_rtrl", 1.0, vmap=True),
    ),
    "vmap, no argument": (
        "`example_arguments` have",
        lambda b: braintrace.compile(CASE.build(), "d_rtrl", vmap=True),
    ),
    "unknown option": (
        "D_RTRL does not accept `decay`; its options are",
        lambda b: compiled(decay=0.9),
    ),
    "option of another algorithm": (
        "D_RTRL does not accept `decay_or_rank`; its options are",
        lambda b: compiled(decay_or_rank=0.9),
    ),
    "window and vjp_method": (
        "`window` is 2 and `vjp_method` is 'multi-step'",
        lambda b: compiled(window=2, vjp_method="multi-step"),
    ),
    "no example": (
        "`GenericModel.update` takes (x)",
        lambda b: braintrace.compile(CASE.build(), "d_rtrl", batch_size=2),
    ),
    "too many examples": (
        "`GenericModel.update` takes (x)",
        lambda b: compiled(None, "d_rtrl", X, X),
    ),
    "example None": ("`x` is None", lambda b: compiled(None, "d_rtrl", None)),
    "example State": (f"`x` {IS_A_STATE}", lambda b: compiled(None, "d_rtrl", STATE)),
    "example with other features": (
        "`x` has shape (2, 5)",
        lambda b: compiled(None, "d_rtrl", jnp.ones((2, 5))),
    ),
    "example list": ("`x` is a list of an array", lambda b: compiled(None, "d_rtrl", RAGGED)),
    "current without unit": (
        ("`update` fails for `x`", "mV", "ohm"),
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X, batch_size=2),
    ),
    "current in volt": (
        "`x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X * u.mV, batch_size=2),
    ),
    "no time step": (
        "`brainstate.environ.set(dt=1.0 * saiunit.ms)`",
        lambda b: compiled(nn.LIF(3), "d_rtrl", X * u.mA),
    ),
    "no update": ("update is not implemented", lambda b: compiled(brainstate.nn.Module())),
    "update returns a State": (
        ("`OfBatch.update` fails for `x`", "write `.value` behind", "'h'"),
        lambda b: stepping(lambda m, x: m.h),
    ),
    "update returns a string": (
        "`OfBatch.update` fails for",
        lambda b: stepping(lambda m, x: (written(m), "a")[1]),
    ),
    "State plus array": (
        "A State stands where its value is meant: write `.value` behind it",
        lambda b: stepping(lambda m, x: m.h + x),
    ),
    "array plus State": (
        "A State stands where its value is meant: write `.value` behind it",
        lambda b: stepping(lambda m, x: x @ jnp.ones((3, 4)) + m.h),
    ),
    "State in jnp": (
        "A State stands where its value is meant: write `.value` behind it",
        lambda b: stepping(lambda m, x: jnp.tanh(m.h)),
    ),
    "State in matmul": (
        f"`weight` {IS_A_STATE}",
        lambda b: stepping(lambda m, x: braintrace.matmul(x, m.w)),
    ),
    "attribute of a State's value": (
        "A State stands where its value is meant: write `.value` behind it",
        lambda b: stepping(lambda m, x: m.h.shape),
    ),
    "State written to a State": (
        "A State stands where its value is meant: write `.value` behind it",
        lambda b: stepping(lambda m, x: setattr(m.h, "value", m.w)),
    ),
    "decision on a traced value": (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: m.h.value if x.sum() > 0 else x),
    ),
    "number of a traced value": (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: float(x[0, 0])),
    ),
    "numpy of a traced value": (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: np.tanh(np.array(x))),
    ),
    "shapes that do not fit": (
        "`OfBatch.update` fails for `x` = an array of dtype float32 and shape (2, 3)",
        lambda b: stepping(lambda m, x: x + jnp.ones(5)),
    ),
    "a product that does not fit": (
        "`OfBatch.update` fails for `x` = an array of dtype float32 and shape (2, 3)",
        lambda b: stepping(lambda m, x: x @ jnp.ones((4, 4))),
    ),
    "a scan that does not fit": (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: jax.lax.scan(lambda c, a: (c, a), 0.0, x, length=7)),
    ),
    "units that do not fit": (
        ("`OfBatch.update` fails for", "mV"),
        lambda b: stepping(lambda m, x: x * u.mV + m.h.value),
    ),
    "a unit in a plain function": (
        "`OfBatch.update` fails for",
        lambda b: stepping(lambda m, x: jnp.exp(x * u.mV)),
    ),
    "a State made in update": (
        "`OfBatch.update` fails for",
        lambda b: stepping(lambda m, x: setattr(m, "new", brainstate.HiddenState(m.h.value + x))),
    ),
}


def deleted(array):
    """A copy whose memory has been freed."""
    copy = jnp.array(array)
    copy.delete()
    return copy


def cyclic():
    """A list that contains itself."""
    tree = [X]
    tree.append(tree)
    return tree


def escaped(array):
    """A tracer of a transformation that has ended."""
    kept = []
    jax.jit(kept.append)(array)
    return kept[0]


GONE = {
    "deleted": ("is a deleted array", "freed by `delete()`", deleted),
    "escaped": ("is a tracer that has left its transformation", "that has ended", escaped),
    "masked": (
        "is a masked array",
        "Fill the masked entries first: `array.filled(value)`",
        lambda array: np.ma.masked_array(array, mask=array > 0),
    ),
}
WITHOUT_NUMBERS = {
    kind: ((f"`x` {what}", fix), lambda b, make=make: b.learner(make(X)))
    for kind, (what, fix, make) in GONE.items()
}


class Mapped(brainstate.nn.Module):
    """A product for each of several weights, by `jax.vmap`."""

    def __init__(self, in_axes):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((5, 3, 4)))
        self.in_axes = in_axes

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((5, batch_size, 4)))

    def update(self, x):
        x = x if self.in_axes[0] is None else jnp.stack([x] * 5)
        drive = jax.vmap(braintrace.matmul, in_axes=self.in_axes)(x, self.w.value)
        self.h.value = 0.9 * self.h.value + drive
        return self.h.value


class Unbounded(brainstate.nn.Module):
    """A `while` loop of unknown length before the state, or behind it."""

    def __init__(self, place):
        super().__init__()
        self.encoder = brainstate.ParamState(jnp.ones((3, 3)))
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.place = place

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        x = x @ self.encoder.value
        x = loop(x) if self.place == "before" else x
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        return loop(self.h.value) if self.place == "behind" else self.h.value


def loop(x):
    def step(carry):
        return carry[0] + 1, jnp.tanh(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


def gradient_of_unbounded(place, method, in_step_fn=False):
    learner = compiled(Unbounded(place))
    between = loop if in_step_fn else lambda y: y
    functions = {"step_fn": lambda x: jnp.sum(between(learner(x)))}
    if method == "functional":
        pure = learner.functional()
        return pure.grad(pure.state(), XS, **functions)
    if method == "etrace_online":
        functions["update_fn"] = lambda gradients: None
    return getattr(learner, method)(XS, **functions)


LOOPS = {
    **{
        f"while {place}, {method}": (
            (
                "A gradient goes back through a `while` loop of `update` (",
                "wrong_calls.py",
                f"Before the loop are {before}.",
                "Use a loop of known length (`scan`, `for_loop`, or `fori_loop`",
            ),
            lambda b, place=place, method=method: gradient_of_unbounded(place, method),
        )
        for place, before in (("before", "'encoder'"), ("behind", "'encoder', 'h', 'w'"))
        for method in ("etrace_grad", "etrace_online", "functional")
    },
    "while in step_fn": (
        "`while` loop of unknown length in `step_fn`",
        lambda b: gradient_of_unbounded(None, "etrace_grad", in_step_fn=True),
    ),
    **{
        f"vmap over weights {in_axes}": (
            ("maps `etp_mm` with 'w' over its weight", "`braintrace.grouped_matmul`"),
            lambda b, in_axes=in_axes: compiled(Mapped(in_axes)),
        )
        for in_axes in ((None, 0), (0, 0))
    },
}

LOWER = {
    "lower without step_fn": (
        "`lower('etrace_grad', ...)` needs `step_fn`; its options are `step_fn`, `window`, `mask`",
        lambda b: b.learner.lower("etrace_grad", XS, YS),
    ),
    "lower, stream without step_fn": (
        ("`lower('etrace_online', ...)`", "`step_fn`, `optimizer`, `update_fn`"),
        lambda b: b.learner.lower("etrace_online", XS),
    ),
    "lower, unknown option": (
        (
            "`lower('etrace_grad', ..., step_fn=..., foo=...)` does not accept `foo`",
            "`reduction`, `chunk_size`",
        ),
        lambda b: b.learner.lower("etrace_grad", XS, YS, step_fn=b.loss, foo=1),
    ),
    "lower, option of another method": (
        (
            "`lower('etrace_grad', ..., step_fn=..., every=...)` does not accept `every`",
            "`chunk_size`",
        ),
        lambda b: b.learner.lower("etrace_grad", XS, YS, step_fn=b.loss, every=2),
    ),
    "lower, option of a step": (
        "`lower('update', ..., foo=...)` does not accept `foo`; its options are none",
        lambda b: b.learner.lower("update", X, foo=1),
    ),
    "lower, predict with a mask": (
        "`lower('predict', ..., mask=...)` does not accept `mask`; its options are `reset`",
        lambda b: b.learner.lower("predict", XS, mask=1),
    ),
    **{
        f"plot in {value!r}": (
            f"`ax` is {value!r}; expected axes of Matplotlib",
            lambda b, value=value: b.learner.plot(ax=value),
        )
        for value in ("x", 3)
    },
    "plot_traces in a string": (
        "`axes` is 'x'; expected axes of Matplotlib",
        lambda b: braintrace.plot_traces(b.learner, "w_in", axes="x"),
    ),
}

FOUND_AT_RANDOM = {
    "a list in itself": (
        "`arguments[0]` is a list that contains itself",
        lambda b: b.learner(cyclic()),
    ),
    "a dict in itself": (
        "`step_fn` is a list that contains itself",
        lambda b: b.grad(step_fn=cyclic()),
    ),
    "a sequence in itself": ("list that contains itself", lambda b: b.grad(cyclic(), YS)),
    "keys of two kinds": (
        ("`mask` is a dict of an array", "expected a pytree"),
        lambda b: b.grad(mask={1: X, "a": X}),
    ),
    "keys for a mask": (
        "`mask` has dtype key<fry>",
        lambda b: b.grad(mask=jax.random.split(KEY, 4)),
    ),
    "a deleted array in a list": (
        "`x` is a list of a deleted",
        lambda b: braintrace.matmul([deleted(X)], X),
    ),
    "a deleted mantissa": (
        "`x` is a deleted array of",
        lambda b: braintrace.matmul(u.Quantity(deleted(X), unit=u.mV), X),
    ),
    "keys for numbers": ("`x` is an array of dtype key<fry>", lambda b: braintrace.matmul(KEY, X)),
    "sizes beyond 64 bits": (
        "`in_size` is 100000000000000000000000000000000000000000000000000",
        lambda b: nn.Linear(10**50, 3),
    ),
    "a unit for axes": (
        "`axes` is 2.0 in ms; expected axes of Matplotlib",
        lambda b: braintrace.plot_traces(b.learner, "w_in", axes=2.0 * u.ms),
    ),
    "plot_traces in jit": (
        ("`plot_traces` draws values", "call it outside"),
        lambda b: jax.jit(lambda x: braintrace.plot_traces(b.learner, "w_in"))(X),
    ),
    "gradient_check in jit": (
        ("`gradient_check` compares", "call it outside"),
        lambda b: jax.jit(check)(),
    ),
    "a path of arrays": (
        "`path` is 'an array of dtype float32",
        lambda b: b.learner.eligibility(jnp.ones(2)),
    ),
    "a filter of no argument": (
        ("`mark` is the function", "arguments but 1 was given"),
        lambda b: compiled(mark=lambda: True),
    ),
    "a class for step_fn": (
        "`step_fn` called the learner 0 times",
        lambda b: b.grad(step_fn=ValueError),
    ),
    "a network of one argument": (
        "`network` takes (n), but is called with no argument",
        lambda b: braintrace.plan(lambda n: CASE.build(), "d_rtrl", X, batch_size=2),
    ),
    "more steps than numbers": (
        "`steps` is 4611686018427387904",
        lambda b: braintrace.plan(CASE.build, "d_rtrl", X, batch_size=2, steps=2**62),
    ),
    "a trace beyond all memory": (
        ("`TDTrace.init`: the trace would have shape", "bytes"),
        lambda b: braintrace.TDTrace(0.5).init({"w": X}, 2**62),
    ),
    "exported strings": (
        "`slice 0` is 'abc'",
        lambda b: b.learner.export_step("abc", YS[0], step_fn=b.loss, optimizer=optax.sgd(0.1)),
    ),
}

ALGORITHM = {
    "D_RTRL of nothing": ("`model` is None", lambda b: braintrace.D_RTRL(None)),
    "D_RTRL of a class": (
        "`model` is the GraphNodeMeta `OfBatch`",
        lambda b: braintrace.D_RTRL(OfBatch),
    ),
    "ES_D_RTRL of a State": ("`model` is a ParamState", lambda b: braintrace.ES_D_RTRL(STATE)),
    "Learner of nothing": ("`algorithm` is None", lambda b: braintrace.Learner(None)),
    "Learner of a model": (
        "`algorithm` is a GenericModel",
        lambda b: braintrace.Learner(CASE.build()),
    ),
    "Learner of a name": ("`algorithm` is 'd_rtrl'", lambda b: braintrace.Learner("d_rtrl")),
    "call before compile_graph": ("`compile_graph` with an example", lambda b: algorithm()(X)),
    "reset before compile_graph": (
        "`compile_graph` with an example",
        lambda b: algorithm().reset_state(2),
    ),
    "reset_state before compile_graph": (
        "`compile_graph` with an example",
        lambda b: braintrace.Learner(algorithm()).reset_state(),
    ),
    "traces before compile_graph": (
        "`compile_graph` with an example",
        lambda b: algorithm().traces,
    ),
    "zero_traces before compile_graph": (
        "`compile_graph` with an example",
        lambda b: algorithm().zero_traces(),
    ),
    **{
        f"{name} before compile_graph": (
            "`compile_graph` with an example",
            lambda b, name=name, more=more: getattr(braintrace.Learner(algorithm()), name)(
                XS, **more
            ),
        )
        for name, more in {
            "etrace_grad": {"step_fn": lambda x: x.sum()},
            "etrace_online": {"step_fn": lambda x: x.sum(), "update_fn": lambda g: None},
            "etrace_evolve": {},
            "predict": {},
        }.items()
    },
    "report before compile_graph": (
        "`compile_graph` with an example",
        lambda b: braintrace.Learner(algorithm()).report(),
    ),
    "compile_graph before init_state": (
        ("`brainstate.nn.init_all_states(model)`", "`GenericModel` has no 'h'"),
        lambda b: algorithm().compile_graph(X),
    ),
    "compile_etrace_graph before init_state": (
        ("`brainstate.nn.init_all_states(model)`", "`OfBatch` has no 'h'"),
        lambda b: braintrace.compile_etrace_graph(OfBatch(), X),
    ),
    "compile_etrace_graph of nothing": (
        "`model` is None",
        lambda b: braintrace.compile_etrace_graph(None, X),
    ),
    "compile_graph without arguments": ("`GenericModel.update` takes (x)", lambda b: initialised()),
    "compile_graph with a sequence": (
        ("`update` changes State 'h'", "`x` = an array of dtype float32 and shape (4, 2, 3)"),
        lambda b: initialised(XS),
    ),
    "compile_graph with a string": ("`x` is 'abc'", lambda b: initialised("abc")),
    "compile_graph with another batch": (
        ("a batch of `batch_size`=3", "arguments have shapes (2, 3)"),
        lambda b: initialised(X, batch_size=3),
    ),
    "a sequence without data": (
        "`x` is None",
        lambda b: initialised(braintrace.MultiStepData(None)),
    ),
    "a sequence without steps": (
        "of at least one step; the shapes given are (0, 2, 3)",
        lambda b: initialised(braintrace.MultiStepData(XS[:0])),
    ),
}


def sequence_rows(prefix, run):
    """What no driver takes for a sequence."""
    return {
        f"{prefix} {name}": (text, lambda b, values=values: run(b, *values))
        for name, (text, values) in {
            "of a number": (
                "of at least one step; the shapes given are ()",
                (3.0, YS),
            ),
            "of nothing": ("of at least one step; the shapes given are none", (None,)),
            "of lengths": (
                ("sequence needs the same leading", "are (4, 2, 3), (3, 2, 2)"),
                (XS, YS[:3]),
            ),
            "of no steps": (
                "Every sequence needs the same leading time axis, of at least one step",
                (XS[:0], YS[:0]),
            ),
            "of ragged lists": (
                "Every sequence needs the same leading time axis, of at least one step",
                (RAGGED, YS),
            ),
        }.items()
    }


def reset_rows(prefix, run):
    """What no driver takes for `reset`."""
    return {
        f"{prefix} reset {name}": (text, lambda b, value=value: run(b, reset=value))
        for name, (text, value) in {
            "float": ("`reset` has shape (4,) and dtype float32", jnp.zeros(4)),
            "integer": ("`reset` has shape (4,) and dtype int32", jnp.zeros(4, int)),
            "length": ("`reset` has shape (3,) and", np.zeros(3, bool)),
            "axes": ("`reset` has shape (4, 2, 1)", np.zeros((4, 2, 1), bool)),
            "batch": ("`reset` has shape (4, 3)", np.zeros((4, 3), bool)),
            "number": ("`reset` has shape () and", True),
        }.items()
    }


def step_rows(prefix, run):
    """What no driver takes for `step_fn`, or for its result."""
    rows = {
        "of one argument": ("`step_fn` takes (x)", lambda x: x),
        "of three arguments": ("`step_fn` takes (x, y, z)", lambda x, y, z: x),
        "None": ("`step_fn` is None", None),
        "in a loop": (
            "`step_fn` calls the learner inside a compiled function, branch or loop",
            lambda x, y: brainstate.transform.for_loop(bench().learner, x[None]).sum(),
        ),
        "that writes a state before the call": (
            "`step_fn` writes the hidden State 'h'",
            lambda x, y: (scale(bench(), "h"), bench().loss(x, y))[1],
        ),
        "that writes a state after the call": (
            "`step_fn` writes the hidden State 'h'",
            lambda x, y: (bench().loss(x, y), scale(bench(), "h"))[0],
        ),
        "without a call": (
            "`step_fn` called the learner 0 times; it must call it exactly once",
            lambda x, y: y.sum(),
        ),
    }
    results = {
        "string": ("it returned 'loss'", lambda out, y: "loss"),
        "State": (("`step_fn` must return a scalar", "Return its `.value`"), lambda out, y: STATE),
        "dict": (
            "`step_fn` must return a scalar loss, a floating-point number; it returned a dict",
            lambda out, y: {"loss": out.sum()},
        ),
        "nothing": (
            "`step_fn` must return a scalar loss, a floating-point number; it returned None",
            lambda out, y: None,
        ),
        "pair": (
            ("`step_fn` must return a scalar", "`has_aux=True` it returns"),
            lambda out, y: (out.sum(), out),
        ),
        "list": (
            "`step_fn` must return a scalar loss, a floating-point number; it returned a list",
            lambda out, y: [out.sum()],
        ),
        "array": (
            ("`step_fn` must return a scalar", "float32 and shape (2, 2)"),
            lambda out, y: out - y,
        ),
        "integer": (
            ("`step_fn` must return a scalar", "dtype int32 and shape ()"),
            lambda out, y: jnp.sum(out > y),
        ),
        "boolean": (
            ("`step_fn` must return a scalar", "of dtype bool and shape ()"),
            lambda out, y: jnp.any(out > y),
        ),
        "complex": (
            ("`step_fn` must return a scalar", "dtype complex64 and shape ()"),
            lambda out, y: jnp.sum(out) * 1j,
        ),
        "unit": (
            "`step_fn` returned a loss in mV. Divide it by its unit, or pass `unit_aware=True`",
            lambda out, y: out.sum() * u.mV,
        ),
        "does not fit": (
            (
                "`step_fn` fails for `x` =",
                "(2, 3), `y` = an array of dtype float32 and shape (2, 2)",
            ),
            lambda out, y: (out - jnp.ones(5)).sum(),
        ),
        "decides": ("`step_fn` fails for `x` =", lambda out, y: 1.0 if out.sum() > 0 else 2.0),
        "adds a unit": (("`step_fn` fails for `x`", "mV"), lambda out, y: (out * u.mV + out).sum()),
        "adds a State": (
            ("`step_fn` fails for `x`", "write `.value` behind it"),
            lambda out, y: (out[0] + STATE).sum(),
        ),
    }
    calls = {
        "no argument": ("`x` = an array of dtype float32 and shape (2, 3)", ()),
        "two arguments": ("(2, 3), and is called with `x`", (X, X)),
        "other features": (
            "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
            (jnp.ones((2, 5)),),
        ),
        "other batch": (
            (
                "`x` of `update` has shape (3, 3); the model was compiled for (2, 3)",
                "`reset_state` with the new",
            ),
            (jnp.ones((3, 3)),),
        ),
        "a string": ("`x` is 'abc'", ("abc",)),
        "nothing": ("`x` = an array of dtype float32", (None,)),
        "a State": (f"`x` {IS_A_STATE}", (STATE,)),
        "a unit": ("`x` = an array of dtype float32 and shape (2, 3) in mV", (X * u.mV,)),
        "complex": ("`x` of `update` has dtype complex64", (X * 1j,)),
    }
    found = {
        f"{prefix} step_fn {n}": (w, lambda b, f=f: run(b, step_fn=f)) for n, (w, f) in rows.items()
    }
    for name, (text, result) in results.items():
        found[f"{prefix} loss {name}"] = (
            text,
            lambda b, f=result: run(b, step_fn=lambda x, y: f(b.learner(x), y)),
        )
    for name, (text, given) in calls.items():
        found[f"{prefix} learner of {name}"] = (
            text,
            lambda b, given=given: run(b, step_fn=lambda x, y: jnp.sum(b.learner(*given))),
        )
    return found


def grad(b, *sequences, **options):
    return b.grad(*sequences, **options)


def online(b, *sequences, **options):
    return b.online(*sequences, **options)


GRADIENT = {
    **sequence_rows("etrace_grad", grad),
    **reset_rows("etrace_grad", grad),
    **step_rows("etrace_grad", grad),
    "weights of another model": (
        "`weights['w']` is a ParamState",
        lambda b: b.grad(weights={"w": STATE}),
    ),
    "weights that are arrays": (
        "`weights['w']` is an array of dtype float32 and shape (2, 3)",
        lambda b: b.grad(weights={"w": X}),
    ),
    "has_aux without a pair": (
        "`has_aux=True`, `step_fn` must return a pair",
        lambda b: b.grad(has_aux=True),
    ),
    "aux that is a State": (
        ("`step_fn` returned what cannot", "Give its `.value`"),
        lambda b: b.returning(lambda out, y: (out.sum(), STATE), has_aux=True),
    ),
    "aux that is a string": (
        "`step_fn` returned what cannot be stacked over time: `aux` is 'abc'",
        lambda b: b.returning(lambda out, y: (out.sum(), "abc"), has_aux=True),
    ),
    **{
        f"mask {name}": (f"`mask` {text}", lambda b, value=value: b.grad(mask=value))
        for name, (text, value) in {
            "length": ("has shape (3,); expected one weight per step, (4,)", jnp.ones(3)),
            "axes": ("has shape (4, 2)", jnp.ones((4, 2))),
            "number": ("has shape ()", 1.0),
            "complex": ("has dtype complex64", jnp.ones(4, jnp.complex64)),
            "NaN": ("has weights that are not finite", [1.0, np.nan, 1.0, 1.0]),
            "infinite": ("has weights that are not finite", [1.0, np.inf, 1.0, 1.0]),
            "too large": ("has weights with the sum inf", np.full(4, 3e38, np.float32)),
            "whose reciprocal is zero": (
                "has weights with the sum 1.2",
                np.full(4, 3e37, np.float32),
            ),
        }.items()
    },
    "learner called twice": (
        "2 times; it must call it exactly once",
        lambda b: b.grad(step_fn=lambda x, y: b.loss(x, y) + b.loss(x, y)),
    ),
    "learner called in a jit": (
        "`step_fn` calls the learner inside a compiled function, branch or loop",
        lambda b: b.grad(step_fn=brainstate.transform.jit(lambda x, y: b.loss(x, y))),
    ),
    "another learner called": (
        "`step_fn` called the learner 0 times; it must call it exactly once",
        lambda b: b.grad(step_fn=lambda x, y: jnp.sum(b.mapped(x))),
    ),
    "the learner as step_fn": (
        "`step_fn` must return a scalar",
        lambda b: b.grad(XS, step_fn=b.learner),
    ),
    "step_fn writes a parameter": (
        "`step_fn` writes a parameter",
        lambda b: b.grad(step_fn=lambda x, y: (b.loss(x, y), scale(b, "w_in"))[0]),
    ),
    "memory_budget of a given chunk_size": (
        "`memory_budget` is 1024 and `chunk_size` is 2",
        lambda b: b.grad(memory_budget=1024, chunk_size=2),
    ),
    "windows, memory_budget": (
        ("`memory_budget` is given with `vjp_method='multi-step'`", "Give `chunk_size` instead"),
        lambda b: b.windows.etrace_grad(
            XS, step_fn=lambda x: b.windows(x).sum(), memory_budget=2**20
        ),
    ),
}


def scale(b, name):
    state = getattr(b.learner.algorithm.model, name)
    state.value = 2 * state.value


WATCHING = {
    "progress": ("`progress` is 'yes'", {"progress": "yes"}),
    "log_every 0": ("`log_every` is 0", {"log_every": 0, "on_log": print}),
    "on_log word": (
        "`on_log` is 'print'; expected a function",
        {"log_every": 1, "on_log": "print"},
    ),
    "log_every alone": ("`log_every` is 1 and `on_log` is None: give both", {"log_every": 1}),
    "on_log alone": (
        "`log_every` is None and `on_log` is the builtin_function_or_method `print`: give both",
        {"on_log": print},
    ),
}
DRIVERS = {
    "etrace_grad": grad,
    "etrace_online": online,
    "etrace_evolve": lambda b, **options: b.learner.etrace_evolve(XS, **options),
    "predict": lambda b, **options: b.learner.predict(XS, **options),
}


class Failing(NamedTuple):
    """A gradient transformation of which one function fails."""

    name: str

    def init(self, params):
        return params if self.name == "update" else jnp.ones(3) + jnp.ones(4)

    def update(self, updates, state, params=None):
        return jax.tree.map(lambda u: u + jnp.ones(7), updates), state


ONLINE = {
    **sequence_rows("etrace_online", online),
    **reset_rows("etrace_online", online),
    **step_rows("etrace_online", online),
    "update_fn None": (
        "`update_fn` and `optimizer` are both None",
        lambda b: b.online(update_fn=None),
    ),
    "update_fn of nothing": (
        "`update_fn` takes (), but is called with the `gradients`",
        lambda b: b.online(update_fn=lambda: None),
    ),
    "update_fn of two": (
        "`update_fn` takes (g, a), but is called with the `gradients`",
        lambda b: b.online(update_fn=lambda g, a: None),
    ),
    "update_fn of one with has_aux": (
        "`update_fn` takes (g), but is called with the `gradients` and the `aux`",
        lambda b: b.online(
            step_fn=lambda x, y: (b.loss(x, y), y), update_fn=lambda g: None, has_aux=True
        ),
    ),
    "update_fn that does not fit": (
        "`update_fn` fails for `g`",
        lambda b: b.online(update_fn=lambda g: g[("w_in",)] + jnp.ones(7)),
    ),
    "update_fn that changes a dtype": (
        "'w_in' from float32[3, 4] to float16[3, 4]",
        lambda b: b.online(update_fn=lambda g: narrowed(b)),
    ),
    "no optimizer": (
        "`update_fn` and `optimizer` are both None",
        lambda b: b.online(update_fn=None),
    ),
    "optimizer number": (
        ("`optimizer` is 3", "`update(gradients)` changes"),
        lambda b: b.online(update_fn=None, optimizer=3),
    ),
    "optimizer class": (
        ("`optimizer` is the GraphNodeMeta", "`update(gradients)` changes"),
        lambda b: b.online(update_fn=None, optimizer=brainstate.nn.Module),
    ),
    "optimizer and update_fn": (
        "Both `update_fn` and `optimizer`",
        lambda b: b.online(optimizer=optax.sgd(0.1)),
    ),
    "optimizer of something else": (
        "`optimizer.init` fails for",
        lambda b: b.online(update_fn=None, optimizer=Failing("init")),
    ),
    "optimizer that does not fit": (
        "`optimizer.update` fails",
        lambda b: b.online(update_fn=None, optimizer=Failing("update")),
    ),
    "optimizer_state before there is one": (
        ("`optimizer_state` can be", "`learner.init_optimizer(optimizer)`"),
        lambda b: setattr(b.learner, "optimizer_state", 3),
    ),
    "init_optimizer number": ("`optimizer` is 3", lambda b: b.learner.init_optimizer(3)),
    "online window of more steps than every": (
        "`window` is 4 and `every` is 2",
        lambda b: b.online(window=4, every=2),
    ),
    "nonfinite word": (
        "`nonfinite` is 'drop'; expected 'skip', 'raise' or 'ignore'",
        lambda b: b.online(nonfinite="drop"),
    ),
    "nonfinite raise inside": (
        "`nonfinite='raise'` cannot check values inside",
        lambda b: brainstate.transform.jit(lambda: b.online(nonfinite="raise"))(),
    ),
    "online mask of another length": (
        "`mask` has shape (3,); expected one weight per step, (4,)",
        lambda b: b.online(mask=np.ones(3)),
    ),
    **{
        f"{name} {what}": (text, lambda b, n=name, o=options: DRIVERS[n](b, **o))
        for name in ("etrace_grad", "etrace_online", "etrace_evolve", "predict")
        for what, (text, options) in WATCHING.items()
    },
    "logs within blocks": (
        "`log_every` is 3, and parameters change or windows end every 2",
        lambda b: b.online(every=2, log_every=3, on_log=print),
    ),
    "progress inside": (
        "`progress` and `log_every` of `etrace_online` do not work inside",
        lambda b: brainstate.transform.jit(lambda: b.online(progress=True))(),
    ),
    "online windows": (
        "`vjp_method='multi-step'`",
        lambda b: b.windows.etrace_online(
            XS, step_fn=lambda x: b.windows(x).sum(), update_fn=lambda g: None
        ),
    ),
    "step_fn writes a parameter online": (
        "`step_fn` writes the parameter 'w_in'",
        lambda b: b.online(step_fn=lambda x, y: (b.loss(x, y), scale(b, "w_in"))[0]),
    ),
}


def narrowed(b):
    state = b.learner.algorithm.model.w_in
    state.value = state.value.astype(jnp.float16)


def evolve(b, xs=XS, *others, **options):
    return b.learner.etrace_evolve(xs, *others, **options)


def predict(b, xs=XS, *others, **options):
    return b.learner.predict(xs, *others, **options)


ALONE = {
    **sequence_rows("etrace_evolve", evolve),
    **reset_rows("etrace_evolve", evolve),
    **reset_rows("predict", predict),
    "evolve two sequences": ("`x` = an array of dtype float32", lambda b: evolve(b, XS, XS)),
    "evolve features": (
        "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
        lambda b: evolve(b, jnp.ones((4, 2, 5))),
    ),
    "evolve batch": (
        "`x` of `update` has shape (5, 3); the model was compiled for (2, 3)",
        lambda b: evolve(b, jnp.ones((4, 5, 3))),
    ),
    "predict nothing": (
        "of at least one step; the shapes given are none",
        lambda b: b.learner.predict(),
    ),
    "predict a unit": (
        "`x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: predict(b, XS * u.mV),
    ),
    "predict a table of samples": (
        "`x` of `update` has shape (3,); the model was compiled for (2, 3)",
        lambda b: predict(b, XS[0]),
    ),
    "currents without a unit": ("mA, and is called with `x`", lambda b: b.currents.predict(XS)),
    "currents in volt": (
        "mA, and is called with `x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: b.currents.etrace_evolve(XS * u.mV),
    ),
    "currents in another scale": (
        "mA, and is called with `x` = an array of dtype float32 and shape (2, 3) in uA",
        lambda b: b.currents.predict(XS * u.uA),
    ),
}

CALL = {
    "learner of no argument": (
        "`x` = an array of dtype float32 and shape (2, 3)",
        lambda b: b.learner(),
    ),
    "learner of two": ("(2, 3), and is called with `x`", lambda b: b.learner(X, X)),
    "learner of features": (
        "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
        lambda b: b.learner(jnp.ones((2, 5))),
    ),
    "learner of a batch": (
        (
            "`x` of `update` has shape (5, 3); the model was compiled for (2, 3)",
            "`reset_state` with the new",
        ),
        lambda b: b.learner(jnp.ones((5, 3))),
    ),
    "learner of a sample": (
        "`x` of `update` has shape (3,); the model was compiled for (2, 3)",
        lambda b: b.learner(X[0]),
    ),
    "learner of nothing": ("`x` = an array of dtype float32", lambda b: b.learner(None)),
    "learner of a State": (f"`x` {IS_A_STATE}", lambda b: b.learner(STATE)),
    "learner of a dict": ("`x` = an array of dtype float32", lambda b: b.learner({"x": X})),
    "learner of complex numbers": (
        "`x` of `update` has dtype complex64",
        lambda b: b.learner(X * 1j),
    ),
    "learner of a unit": (
        "`x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: b.learner(X * u.mV),
    ),
    "currents without unit": ("mA, and is called with `x`", lambda b: b.currents(X)),
    "mapped learner of a sample": (
        "`x` of `update` has shape (3,); the model was compiled for (2, 3)",
        lambda b: b.mapped(X[0]),
    ),
    "a sequence and a step": (
        "`MultiStepData` and some",
        lambda b: b.learner(braintrace.MultiStepData(XS), X),
    ),
    "a sequence of a number": (
        ("`MultiStepData` needs the", "the shapes given are ()"),
        lambda b: b.learner(braintrace.MultiStepData(1.0)),
    ),
    "a sequence of a string": (
        "`MultiStepData 0` is 'abc'",
        lambda b: b.learner(braintrace.MultiStepData("abc")),
    ),
    "a sequence of no steps": (
        ("`MultiStepData` needs the", "shapes given are (0, 2, 3)"),
        lambda b: b.learner(braintrace.MultiStepData(XS[:0])),
    ),
    "a window of no steps": (
        ("`MultiStepData` needs the", "shapes given are (0, 2, 3)"),
        lambda b: b.windows(braintrace.MultiStepData(XS[:0])),
    ),
    "a window of a number": (
        ("`MultiStepData` needs the", "the shapes given are ()"),
        lambda b: b.windows(braintrace.MultiStepData(1.0)),
    ),
    "reset_state with an option of nobody": (
        (
            "`init_state` of `OfBatch` and its modules declares; expected one of `batch_size`",
            "`reset_state` got `fancy`",
        ),
        lambda b: compiled(OfBatch()).reset_state(2, fancy=1),
    ),
    **{
        f"reset_state of {where} with {name}": (
            (
                f"`reset_state` got `{name}`, which no `init_state` of `{of}`",
                "'where'? expected one of `batch_size`, `where`",
            ),
            lambda b, make=make, name=name: make(b).reset_state(**{name: np.ones(2, bool)}),
        )
        for where, of, make in (
            ("a learner", type(CASE.build()).__name__, lambda b: b.learner),
            ("layers that take anything", "LSTMCell", lambda b: compiled(nn.LSTMCell(3, 4))),
            ("layers of brainstate", "Marked", lambda b: compiled(Marked(), mark="auto")),
            ("an algorithm", "LSTMCell", lambda b: compiled(nn.LSTMCell(3, 4)).algorithm),
        )
        for name in ("were", "whree")
    },
    "reset_state where, with a slip in a name of init_state": (
        ("`reset_state` got `gian`", "'gain'? expected one of `batch_size`, `where`, `gain`"),
        lambda b: compiled(Started()).reset_state(where=np.ones(2, bool), gian=2.0),
    ),
    "reset_state of what is no longer there": (
        ("`reset_state` got `batchsize`", "'batch_size'? expected one"),
        lambda b: compiled(nn.LSTMCell(3, 4)).reset_state(batchsize=3),
    ),
    **{
        f"functional of {value!r}": (
            f"`a` is {value!r}; expected a State",
            lambda b, value=value: b.learner.functional(a=value),
        )
        for value in (3, "a", None, [], {})
    },
    **{
        f"reset_state where {name}": (
            f"`where` {text}",
            lambda b, value=value: b.learner.reset_state(where=value),
        )
        for name, (text, value) in {
            "float": ("has shape (2,) and dtype float32", jnp.ones(2)),
            "length": ("has shape (3,), one flag per sample", np.ones(3, bool)),
            "axes": ("has shape (2, 1)", np.ones((2, 1), bool)),
        }.items()
    },
    "reset_state where and batch_size": (
        "`batch_size=2`. `where` resets",
        lambda b: b.learner.reset_state(2, where=np.ones(2, bool)),
    ),
    "learner under jax.jit": (
        "A learner is called inside a transformation of JAX",
        lambda b: jax.jit(b.learner)(X),
    ),
    "learner under jax.vmap": (
        "A learner is called inside a transformation of JAX",
        lambda b: jax.vmap(b.learner)(XS),
    ),
    "learner under jax.grad": (
        "A learner is called inside a transformation of JAX",
        lambda b: jax.grad(lambda x: b.learner(x).sum())(X),
    ),
}


def check(loss=lambda out, y: ((out - y) ** 2).mean(), xs=XS, ys=YS, model=None, **options):
    model = CASE.build() if model is None else model
    return braintrace.gradient_check(model, "d_rtrl", xs, ys, loss, **{"batch_size": 2, **options})


CHECK = {
    "check loss None": ("`loss` is None", lambda b: check(None)),
    "check loss of one": ("`loss` takes (output)", lambda b: check(lambda output: output.sum())),
    "check loss of nothing": (
        "loss, a floating-point number; it returned None",
        lambda b: check(lambda out, y: None),
    ),
    "check lengths": ("are (4, 2, 3), (3, 2, 2)", lambda b: check(ys=YS[:3])),
    "check strings": ("`xs` is 'abc'", lambda b: check(xs="abc")),
    "check nothing": ("`xs` is None", lambda b: check(xs=None)),
    "check objects": ("`ys` is an array of dtype object", lambda b: check(ys=OBJECTS)),
    "check model": ("`model` is 3", lambda b: check(model=3)),
    "check primitive": (
        "`etp_mm` is not an ETP primitive of this library",
        lambda b: braintrace.check_primitive("etp_mm", X, X),
    ),
    "inline nothing": ("`inline`: `fn` is None", lambda b: braintrace.inline(None)),
    "register without name": (
        "A primitive's name must be a non-empty string",
        lambda b: braintrace.register_primitive("", jnp.add),
    ),
    "register without implementation": (
        "`wrong` must be callable",
        lambda b: braintrace.register_primitive("wrong", None),
    ),
    "register, batched": (
        "`batched` is 'yes'",
        lambda b: braintrace.register_primitive("wrong", jnp.add, batched="yes"),
    ),
    "rules of nothing": (
        "`None` is not an ETP primitive of this library",
        lambda b: braintrace.get_primitive_spec(None),
    ),
    "spec of nothing": ("`spec` is None", lambda b: braintrace.register_primitive_spec(None)),
}


def of_function(step=lambda params, state, x: (state, x), params=None, state=None, **options):
    """A learner of a function; without options, a model."""
    params = {"w": jnp.ones((3, 4))} if params is None else params
    state = {"h": jnp.zeros((2, 4))} if state is None else state
    model = braintrace.from_function(step, params, state)
    return braintrace.compile(model, "rtrl", X, **options) if options else model


def returning(new_state):
    return of_function(lambda params, state, x: (new_state(state["h"]), x), batch_size=2)


FUNCTION = {
    "from_function of nothing": (
        "`step` is None; expected a function",
        lambda b: of_function(None),
    ),
    **{
        f"from_function params {name}": (text, lambda b, params=params: of_function(params=params))
        for name, (text, params) in {
            "none": ("`params` is {}", {}),
            "numbers": (("`params` is {'a': 0.5}", "as arrays (`jnp.asarray`)"), {"a": 0.5}),
            "integers": ("`params` is a dict of an array of dtype int32", {"a": jnp.arange(3)}),
            "a State": (f"`params/w` {IS_A_STATE}", {"w": STATE}),
        }.items()
    },
    **{
        f"from_function state {name}": (text, lambda b, state=state: of_function(state=state))
        for name, (text, state) in {
            "none": ("`state` is {}", {}),
            "integers": ("`state` is a dict of an array of dtype int32", {"t": jnp.arange(3)}),
            "a State": (f"`state/h` {IS_A_STATE}", {"h": STATE}),
        }.items()
    },
    "from_function of another batch": (
        (
            "'state/h' starts as an array",
            "(2, 4), but `batch_size` is 3. Use a state whose first axis",
            "compile with `vmap=True`",
        ),
        lambda b: of_function(batch_size=3),
    ),
    "from_function without its batch": (
        ("`init_state` of `FunctionModel` fails with `batch_size` None", "'batch'"),
        lambda b: of_function(state=lambda batch: {"h": jnp.zeros((batch, 4))}, vmap=False),
    ),
    "from_function with other inputs": (
        ("`inputs[0]` = an array of dtype float32 and shape (2, 3)", "positional argument: 'y'"),
        lambda b: of_function(lambda params, state, x, y: (state, x), batch_size=2),
    ),
    "from_function, a step without a pair": (
        "of dtype float32 and shape (2, 4); expected a pair `(state, output)`",
        lambda b: of_function(lambda params, state, x: state["h"], batch_size=2),
    ),
    **{
        f"from_function, a step that returns {name}": (text, lambda b, new=new: returning(new))
        for name, (text, new) in {
            "another leaf": (
                (
                    "`step`, which returns `(state, output)`, returns a state with 'state/g'",
                    "shape (2, 4), no 'state/h'",
                ),
                lambda h: {"g": h},
            ),
            "more": (
                "'state/g', an array of dtype float32 and shape (2, 4); expected 'state/h'",
                lambda h: {"h": h, "g": h},
            ),
            "less": (
                "returns a state with no 'state/h'; expected 'state/h'",
                lambda h: {"h": None},
            ),
            "another shape": ("'state/h' from float32[2, 4] to float32[4]", lambda h: {"h": h[0]}),
            "another dtype": (
                "'state/h' from float32[2, 4] to float16[2, 4]",
                lambda h: {"h": h.astype("float16")},
            ),
            "a unit": (
                "'state/h' from float32[2, 4] to float32[2, 4] in mV",
                lambda h: {"h": h * u.mV},
            ),
        }.items()
    },
    "from_function, a step that returns a list": (
        ("`step`", "PyTreeDef([*]); expected PyTreeDef((*,))"),
        lambda b: of_function(
            lambda params, state, x: (list(state), x), state=(jnp.zeros((2, 4)),), batch_size=2
        ),
    ),
    "from_function, a step that changes what is no array": (
        ("`step`", "'b' in a place without an array"),
        lambda b: of_function(
            lambda params, state, x: ({**state, "name": "b"}, x),
            state={"h": jnp.zeros((2, 4)), "name": "a"},
            batch_size=2,
        ),
    ),
    "set_params of others": (
        "`params` has 'params/v', 1.0, no 'params/w'",
        lambda b: of_function().set_params({"v": 1.0}),
    ),
    "as_params of names": (
        "which has ('params', 'w')",
        lambda b: of_function().as_params({"w": 1.0}),
    ),
}

EVERY = {
    **COMPILE,
    **ALGORITHM,
    **GRADIENT,
    **ONLINE,
    **ALONE,
    **CALL,
    **CHECK,
    **FUNCTION,
    **WITHOUT_NUMBERS,
    **LOWER,
    **LOOPS,
    **FOUND_AT_RANDOM,
}

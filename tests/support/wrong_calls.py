"""Calls that are wrong, each with a part of the error's message.

A row is ``(text, call)``: `call` gets a `Bench` and is wrong in one thing; `text` is a phrase of
the message, or a tuple of phrases. `test_wrong_calls` checks every row.
"""

import dataclasses
import functools
from typing import NamedTuple

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from drivers import build_learner

import braintrace
from braintrace import nn

CASE = catalogue.BY_NAME["Leaky"]
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


COMPILE = [
    ("`model` is None", lambda b: braintrace.compile(None, "d_rtrl", X)),
    ("`model` is the GraphNodeMeta", lambda b: braintrace.compile(OfBatch, "d_rtrl", X)),
    (
        ("`model` is the function", "`braintrace.from_function`"),
        lambda b: braintrace.compile(lambda x: x, "d_rtrl", X),
    ),
    ("`model` is a Learner", lambda b: braintrace.compile(b.learner, "d_rtrl", X)),
    ("`algorithm` is 'bptt'; expected one of 'd_rtrl'", lambda b: compiled(None, "bptt")),
    ("`algorithm` is 'drtl'; did you mean 'd_rtrl'?", lambda b: compiled(None, "drtl")),
    ("`algorithm` is None", lambda b: compiled(None, None)),
    ("`algorithm` is 3", lambda b: compiled(None, 3)),
    ("`algorithm` is the GraphNodeMeta `OfBatch`", lambda b: compiled(None, OfBatch)),
    ("`algorithm` is the GraphNodeMeta", lambda b: compiled(None, braintrace.ETraceAlgorithm)),
    ("`algorithm` is a D_RTRL", lambda b: compiled(None, algorithm())),
    ("batch, pass `batch_size=2`", lambda b: compiled(nn.LSTMCell(3, 4), batch_size=None)),
    ("batch, pass `batch_size=2`", lambda b: compiled(batch_size=None)),
    (
        "batch, pass `batch_size=2`",
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X * u.mA, batch_size=None),
    ),
    (
        "`init_state` of `OfBatch` fails with `batch_size`",
        lambda b: compiled(OfBatch(), batch_size=None),
    ),
    (
        "`init_state` of `OfSample` fails with `batch_size`",
        lambda b: compiled(OfSample(), batch_size=2),
    ),
    (("and `batch_size` is 3", "'h'"), lambda b: compiled(batch_size=3)),
    ("(2, 3) and `batch_size` is", lambda b: compiled(vmap=True, batch_size=3)),
    (
        "`example_arguments` have the shapes () and `batch_size`",
        lambda b: compiled(None, "d_rtrl", 1.0, vmap=True),
    ),
    ("`example_arguments` have", lambda b: braintrace.compile(CASE.build(), "d_rtrl", vmap=True)),
    ("D_RTRL does not accept `decay`; its options are", lambda b: compiled(decay=0.9)),
    (
        "D_RTRL does not accept `decay_or_rank`; its options are",
        lambda b: compiled(decay_or_rank=0.9),
    ),
    (
        "`window` is 2 and `vjp_method` is 'multi-step'",
        lambda b: compiled(window=2, vjp_method="multi-step"),
    ),
    (
        "`Leaky.update` takes (x)",
        lambda b: braintrace.compile(CASE.build(), "d_rtrl", batch_size=2),
    ),
    ("`Leaky.update` takes (x)", lambda b: compiled(None, "d_rtrl", X, X)),
    ("`x` is None", lambda b: compiled(None, "d_rtrl", None)),
    (f"`x` {IS_A_STATE}", lambda b: compiled(None, "d_rtrl", STATE)),
    ("`x` has shape (2, 5)", lambda b: compiled(None, "d_rtrl", jnp.ones((2, 5)))),
    ("`x` is a list of an array", lambda b: compiled(None, "d_rtrl", RAGGED)),
    (
        ("`update` fails for `x`", "mV", "ohm"),
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X, batch_size=2),
    ),
    (
        "`x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: started_compile(nn.LIF(3, R=1.0 * u.ohm), X * u.mV, batch_size=2),
    ),
    (
        "`brainstate.environ.set(dt=1.0 * saiunit.ms)`",
        lambda b: compiled(nn.LIF(3), "d_rtrl", X * u.mA),
    ),
    ("update is not implemented", lambda b: compiled(brainstate.nn.Module())),
    (
        ("`OfBatch.update` fails for `x`", "append `.value`", "'h'"),
        lambda b: stepping(lambda m, x: m.h),
    ),
    ("`OfBatch.update` fails for", lambda b: stepping(lambda m, x: (written(m), "a")[1])),
    (
        "A State is used as a value: append `.value`",
        lambda b: stepping(lambda m, x: m.h + x),
    ),
    (
        "A State is used as a value: append `.value`",
        lambda b: stepping(lambda m, x: x @ jnp.ones((3, 4)) + m.h),
    ),
    (
        "A State is used as a value: append `.value`",
        lambda b: stepping(lambda m, x: jnp.tanh(m.h)),
    ),
    (f"`weight` {IS_A_STATE}", lambda b: stepping(lambda m, x: braintrace.matmul(x, m.w))),
    (
        "A State is used as a value: append `.value`",
        lambda b: stepping(lambda m, x: m.h.shape),
    ),
    (
        "A State is used as a value: append `.value`",
        lambda b: stepping(lambda m, x: setattr(m.h, "value", m.w)),
    ),
    (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: m.h.value if x.sum() > 0 else x),
    ),
    ("`OfBatch.update` fails for `x`", lambda b: stepping(lambda m, x: float(x[0, 0]))),
    ("`OfBatch.update` fails for `x`", lambda b: stepping(lambda m, x: np.tanh(np.array(x)))),
    (
        "`OfBatch.update` fails for `x` = an array of dtype float32 and shape (2, 3)",
        lambda b: stepping(lambda m, x: x + jnp.ones(5)),
    ),
    (
        "`OfBatch.update` fails for `x` = an array of dtype float32 and shape (2, 3)",
        lambda b: stepping(lambda m, x: x @ jnp.ones((4, 4))),
    ),
    (
        "`OfBatch.update` fails for `x`",
        lambda b: stepping(lambda m, x: jax.lax.scan(lambda c, a: (c, a), 0.0, x, length=7)),
    ),
    (("`OfBatch.update` fails for", "mV"), lambda b: stepping(lambda m, x: x * u.mV + m.h.value)),
    ("`OfBatch.update` fails for", lambda b: stepping(lambda m, x: jnp.exp(x * u.mV))),
    (
        "`OfBatch.update` fails for",
        lambda b: stepping(lambda m, x: setattr(m, "new", brainstate.HiddenState(m.h.value + x))),
    ),
]


def deleted(array):
    """A copy whose memory has been freed."""
    copy = jnp.array(array)
    copy.delete()
    return copy


def escaped(array):
    """A tracer of a transformation that has ended."""
    kept = []
    jax.jit(kept.append)(array)
    return kept[0]


GONE = [
    ("is a deleted array", "deleted (`delete()`)", deleted),
    ("is a leaked tracer", "that has ended", escaped),
    (
        "is a masked array",
        "Fill the masked entries first: `array.filled(value)`",
        lambda array: np.ma.masked_array(array, mask=array > 0),
    ),
]
WITHOUT_NUMBERS = [
    ((f"`x` {what}", fix), lambda b, make=make: b.learner(make(X))) for what, fix, make in GONE
]


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


LOOPS = [
    *[
        (
            (
                "A gradient goes back through a `while` loop of `update` (",
                "wrong_calls.py",
                f"Before the loop are {before}.",
                "Use a loop of known length (`scan`, `for_loop`, or `fori_loop`",
            ),
            lambda b, place=place, method=method: gradient_of_unbounded(place, method),
        )
        for (place, before) in (("before", "'encoder'"), ("behind", "'encoder', 'h', 'w'"))
        for method in ("etrace_grad", "etrace_online", "functional")
    ],
    (
        "`while` loop of unknown length in `step_fn`",
        lambda b: gradient_of_unbounded(None, "etrace_grad", in_step_fn=True),
    ),
    *[
        (
            ("maps `etp_mm` with 'w' over its weight", "`braintrace.grouped_matmul`"),
            lambda b, in_axes=in_axes: compiled(Mapped(in_axes)),
        )
        for in_axes in ((None, 0), (0, 0))
    ],
]

LOWER = [
    (
        "`lower('etrace_grad', ...)` needs `step_fn`; its options are `step_fn`, `window`, `mask`",
        lambda b: b.learner.lower("etrace_grad", XS, YS),
    ),
    (
        ("`lower('etrace_online', ...)`", "`step_fn`, `optimizer`, `update_fn`"),
        lambda b: b.learner.lower("etrace_online", XS),
    ),
    (
        (
            "`lower('etrace_grad', ..., step_fn=..., foo=...)` does not accept `foo`",
            "`reduction`, `chunk_size`",
        ),
        lambda b: b.learner.lower("etrace_grad", XS, YS, step_fn=b.loss, foo=1),
    ),
    (
        (
            "`lower('etrace_grad', ..., step_fn=..., every=...)` does not accept `every`",
            "`chunk_size`",
        ),
        lambda b: b.learner.lower("etrace_grad", XS, YS, step_fn=b.loss, every=2),
    ),
    (
        "`lower('update', ..., foo=...)` does not accept `foo`; its options are none",
        lambda b: b.learner.lower("update", X, foo=1),
    ),
    (
        "`lower('predict', ..., mask=...)` does not accept `mask`; its options are `reset`",
        lambda b: b.learner.lower("predict", XS, mask=1),
    ),
    *[
        (
            f"`ax` is {value!r}; expected axes of Matplotlib",
            lambda b, value=value: b.learner.plot(ax=value),
        )
        for value in ("x", 3)
    ],
    (
        "`axes` is 'x'; expected axes of Matplotlib",
        lambda b: braintrace.plot_traces(b.learner, "w_in", axes="x"),
    ),
]

FOUND_AT_RANDOM = [
    (("`mask` is a dict of an array", "expected a pytree"), lambda b: b.grad(mask={1: X, "a": X})),
    ("`mask` has dtype key<fry>", lambda b: b.grad(mask=jax.random.split(KEY, 4))),
    ("`x` is a list of a deleted", lambda b: braintrace.matmul([deleted(X)], X)),
    (
        "`x` is a deleted array of",
        lambda b: braintrace.matmul(u.Quantity(deleted(X), unit=u.mV), X),
    ),
    ("`x` is an array of dtype key<fry>", lambda b: braintrace.matmul(KEY, X)),
    (
        "`in_size` is 100000000000000000000000000000000000000000000000000",
        lambda b: nn.Linear(10**50, 3),
    ),
    (
        "`axes` is 2.0 in ms; expected axes of Matplotlib",
        lambda b: braintrace.plot_traces(b.learner, "w_in", axes=2.0 * u.ms),
    ),
    (
        ("`plot_traces` draws values", "call it outside"),
        lambda b: jax.jit(lambda x: braintrace.plot_traces(b.learner, "w_in"))(X),
    ),
    (("`gradient_check` compares", "call it outside"), lambda b: jax.jit(check)()),
    ("`path` is 'an array of dtype float32", lambda b: b.learner.eligibility(jnp.ones(2))),
    (
        ("`mark` is the function", "arguments but 1 was given"),
        lambda b: compiled(mark=lambda: True),
    ),
    ("`step_fn` called the learner 0 times", lambda b: b.grad(step_fn=ValueError)),
    (
        "`network` takes (n), but is called with no argument",
        lambda b: braintrace.plan(lambda n: CASE.build(), "d_rtrl", X, batch_size=2),
    ),
    (
        "`steps` is 4611686018427387904",
        lambda b: braintrace.plan(CASE.build, "d_rtrl", X, batch_size=2, steps=2**62),
    ),
    (
        ("`TDTrace.init`: the trace would have shape", "bytes"),
        lambda b: braintrace.TDTrace(0.5).init({"w": X}, 2**62),
    ),
    (
        "`slice 0` is 'abc'",
        lambda b: b.learner.export_step("abc", YS[0], step_fn=b.loss, optimizer=optax.sgd(0.1)),
    ),
]

ALGORITHM = [
    ("`model` is None", lambda b: braintrace.D_RTRL(None)),
    ("`model` is the GraphNodeMeta `OfBatch`", lambda b: braintrace.D_RTRL(OfBatch)),
    ("`model` is a ParamState", lambda b: braintrace.ES_D_RTRL(STATE)),
    ("`algorithm` is None", lambda b: braintrace.Learner(None)),
    ("`algorithm` is a Leaky", lambda b: braintrace.Learner(CASE.build())),
    ("`algorithm` is 'd_rtrl'", lambda b: braintrace.Learner("d_rtrl")),
    ("`compile_graph` with an example", lambda b: algorithm()(X)),
    ("`compile_graph` with an example", lambda b: algorithm().reset_state(2)),
    ("`compile_graph` with an example", lambda b: braintrace.Learner(algorithm()).reset_state()),
    ("`compile_graph` with an example", lambda b: algorithm().traces),
    ("`compile_graph` with an example", lambda b: algorithm().zero_traces()),
    *[
        (
            "`compile_graph` with an example",
            lambda b, name=name, more=more: getattr(braintrace.Learner(algorithm()), name)(
                XS, **more
            ),
        )
        for (name, more) in {
            "etrace_grad": {"step_fn": lambda x: x.sum()},
            "etrace_online": {"step_fn": lambda x: x.sum(), "update_fn": lambda g: None},
            "etrace_evolve": {},
            "predict": {},
        }.items()
    ],
    ("`compile_graph` with an example", lambda b: braintrace.Learner(algorithm()).report()),
    (
        ("`brainstate.nn.init_all_states(model)`", "`Leaky` has no 'h'"),
        lambda b: algorithm().compile_graph(X),
    ),
    (
        ("`brainstate.nn.init_all_states(model)`", "`OfBatch` has no 'h'"),
        lambda b: braintrace.compile_etrace_graph(OfBatch(), X),
    ),
    ("`model` is None", lambda b: braintrace.compile_etrace_graph(None, X)),
    ("`Leaky.update` takes (x)", lambda b: initialised()),
    (
        ("`update` changes State 'h'", "`x` = an array of dtype float32 and shape (4, 2, 3)"),
        lambda b: initialised(XS),
    ),
    ("`x` is 'abc'", lambda b: initialised("abc")),
    (
        ("a batch of `batch_size`=3", "arguments have shapes (2, 3)"),
        lambda b: initialised(X, batch_size=3),
    ),
    ("`x` is None", lambda b: initialised(braintrace.MultiStepData(None))),
    (
        "of at least one step; the shapes given are (0, 2, 3)",
        lambda b: initialised(braintrace.MultiStepData(XS[:0])),
    ),
]


def sequence_rows(run):
    """What no driver takes for a sequence."""
    return [
        (text, lambda b, values=values: run(b, *values))
        for text, values in [
            ("of at least one step; the shapes given are ()", (3.0, YS)),
            ("of at least one step; the shapes given are none", (None,)),
            (("sequence needs the same leading", "are (4, 2, 3), (3, 2, 2)"), (XS, YS[:3])),
            (
                "Every sequence needs the same leading time axis, of at least one step",
                (XS[:0], YS[:0]),
            ),
            ("Every sequence needs the same leading time axis, of at least one step", (RAGGED, YS)),
        ]
    ]


def reset_rows(run):
    """What no driver takes for `reset`."""
    return [
        (text, lambda b, value=value: run(b, reset=value))
        for text, value in [
            ("`reset` has shape (4,) and dtype float32", jnp.zeros(4)),
            ("`reset` has shape (4,) and dtype int32", jnp.zeros(4, int)),
            ("`reset` has shape (3,) and", np.zeros(3, bool)),
            ("`reset` has shape (4, 2, 1)", np.zeros((4, 2, 1), bool)),
            ("`reset` has shape (4, 3)", np.zeros((4, 3), bool)),
            ("`reset` has shape () and", True),
        ]
    ]


def step_rows(run):
    """What no driver takes for `step_fn`, or for its result."""
    rows = [
        ("`step_fn` takes (x)", lambda x: x),
        ("`step_fn` takes (x, y, z)", lambda x, y, z: x),
        ("`step_fn` is None", None),
        (
            "`step_fn` calls the learner inside a compiled function, branch or loop",
            lambda x, y: brainstate.transform.for_loop(bench().learner, x[None]).sum(),
        ),
        (
            "`step_fn` writes the hidden State 'h'",
            lambda x, y: (scale(bench(), "h"), bench().loss(x, y))[1],
        ),
        (
            "`step_fn` writes the hidden State 'h'",
            lambda x, y: (bench().loss(x, y), scale(bench(), "h"))[0],
        ),
        (
            "`step_fn` called the learner 0 times; it must call it exactly once",
            lambda x, y: y.sum(),
        ),
    ]
    results = [
        ("it returned 'loss'", lambda out, y: "loss"),
        (("`step_fn` must return a scalar", "Return its `.value`"), lambda out, y: STATE),
        (
            "`step_fn` must return a scalar loss, a floating-point number; it returned a dict",
            lambda out, y: {"loss": out.sum()},
        ),
        (
            "`step_fn` must return a scalar loss, a floating-point number; it returned None",
            lambda out, y: None,
        ),
        (
            ("`step_fn` must return a scalar", "`has_aux=True` it returns"),
            lambda out, y: (out.sum(), out),
        ),
        (
            "`step_fn` must return a scalar loss, a floating-point number; it returned a list",
            lambda out, y: [out.sum()],
        ),
        (("`step_fn` must return a scalar", "float32 and shape (2, 2)"), lambda out, y: out - y),
        (
            ("`step_fn` must return a scalar", "dtype int32 and shape ()"),
            lambda out, y: jnp.sum(out > y),
        ),
        (
            ("`step_fn` must return a scalar", "of dtype bool and shape ()"),
            lambda out, y: jnp.any(out > y),
        ),
        (
            ("`step_fn` must return a scalar", "dtype complex64 and shape ()"),
            lambda out, y: jnp.sum(out) * 1j,
        ),
        (
            "`step_fn` returned a loss in mV. Divide it by its unit, or pass `unit_aware=True`",
            lambda out, y: out.sum() * u.mV,
        ),
        (
            (
                "`step_fn` fails for `x` =",
                "(2, 3), `y` = an array of dtype float32 and shape (2, 2)",
            ),
            lambda out, y: (out - jnp.ones(5)).sum(),
        ),
        ("`step_fn` fails for `x` =", lambda out, y: 1.0 if out.sum() > 0 else 2.0),
        (("`step_fn` fails for `x`", "mV"), lambda out, y: (out * u.mV + out).sum()),
        (
            ("`step_fn` fails for `x`", "append `.value`"),
            lambda out, y: (out[0] + STATE).sum(),
        ),
    ]
    calls = [
        ("`x` = an array of dtype float32 and shape (2, 3)", ()),
        ("(2, 3), and is called with `x`", (X, X)),
        (
            "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
            (jnp.ones((2, 5)),),
        ),
        (
            (
                "`x` of `update` has shape (3, 3); the model was compiled for (2, 3)",
                "`reset_state` with the new",
            ),
            (jnp.ones((3, 3)),),
        ),
        ("`x` is 'abc'", ("abc",)),
        ("`x` = an array of dtype float32", (None,)),
        (f"`x` {IS_A_STATE}", (STATE,)),
        ("`x` = an array of dtype float32 and shape (2, 3) in mV", (X * u.mV,)),
        ("`x` of `update` has dtype complex64", (X * 1j,)),
    ]
    return [
        *[(text, lambda b, f=f: run(b, step_fn=f)) for text, f in rows],
        *[
            (text, lambda b, f=f: run(b, step_fn=lambda x, y: f(b.learner(x), y)))
            for text, f in results
        ],
        *[
            (text, lambda b, x=given: run(b, step_fn=lambda *_: jnp.sum(b.learner(*x))))
            for text, given in calls
        ],
    ]


def grad(b, *sequences, **options):
    return b.grad(*sequences, **options)


def online(b, *sequences, **options):
    return b.online(*sequences, **options)


GRADIENT = [
    *sequence_rows(grad),
    *reset_rows(grad),
    *step_rows(grad),
    ("`weights['w']` is a ParamState", lambda b: b.grad(weights={"w": STATE})),
    (
        "`weights['w']` is an array of dtype float32 and shape (2, 3)",
        lambda b: b.grad(weights={"w": X}),
    ),
    ("`has_aux=True`, `step_fn` must return a pair", lambda b: b.grad(has_aux=True)),
    (
        ("`step_fn` returned what cannot", "Give its `.value`"),
        lambda b: b.returning(lambda out, y: (out.sum(), STATE), has_aux=True),
    ),
    (
        "`step_fn` returned what cannot be stacked over time: `aux` is 'abc'",
        lambda b: b.returning(lambda out, y: (out.sum(), "abc"), has_aux=True),
    ),
    *[
        (f"`mask` {text}", lambda b, value=value: b.grad(mask=value))
        for text, value in [
            ("has shape (3,); expected one weight per step, (4,)", jnp.ones(3)),
            ("has shape (4, 2)", jnp.ones((4, 2))),
            ("has shape ()", 1.0),
            ("has dtype complex64", jnp.ones(4, jnp.complex64)),
            ("has weights that are not finite", [1.0, np.nan, 1.0, 1.0]),
            ("has weights that are not finite", [1.0, np.inf, 1.0, 1.0]),
            ("has weights with the sum inf", np.full(4, 3e38, np.float32)),
            ("has weights with the sum 1.2", np.full(4, 3e37, np.float32)),
        ]
    ],
    (
        "2 times; it must call it exactly once",
        lambda b: b.grad(step_fn=lambda x, y: b.loss(x, y) + b.loss(x, y)),
    ),
    (
        "`step_fn` calls the learner inside a compiled function, branch or loop",
        lambda b: b.grad(step_fn=brainstate.transform.jit(lambda x, y: b.loss(x, y))),
    ),
    (
        "`step_fn` called the learner 0 times; it must call it exactly once",
        lambda b: b.grad(step_fn=lambda x, y: jnp.sum(b.mapped(x))),
    ),
    ("`step_fn` must return a scalar", lambda b: b.grad(XS, step_fn=b.learner)),
    (
        "`step_fn` writes a parameter",
        lambda b: b.grad(step_fn=lambda x, y: (b.loss(x, y), scale(b, "w_in"))[0]),
    ),
    (
        "`memory_budget` is 1024 and `chunk_size` is 2",
        lambda b: b.grad(memory_budget=1024, chunk_size=2),
    ),
    (
        ("`memory_budget` is given with `vjp_method='multi-step'`", "Give `chunk_size` instead"),
        lambda b: b.windows.etrace_grad(
            XS, step_fn=lambda x: b.windows(x).sum(), memory_budget=2**20
        ),
    ),
]


def scale(b, name):
    state = getattr(b.learner.algorithm.model, name)
    state.value = 2 * state.value


WATCHING = [
    ("`log_every` is 1 and `on_log` is None: give both", {"log_every": 1}),
    (
        "`log_every` is None and `on_log` is the builtin_function_or_method `print`: give both",
        {"on_log": print},
    ),
]
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


ONLINE = [
    *sequence_rows(online),
    *reset_rows(online),
    *step_rows(online),
    (
        "`update_fn` takes (), but is called with the `gradients`",
        lambda b: b.online(update_fn=lambda: None),
    ),
    (
        "`update_fn` takes (g, a), but is called with the `gradients`",
        lambda b: b.online(update_fn=lambda g, a: None),
    ),
    (
        "`update_fn` takes (g), but is called with the `gradients` and the `aux`",
        lambda b: b.online(
            step_fn=lambda x, y: (b.loss(x, y), y), update_fn=lambda g: None, has_aux=True
        ),
    ),
    (
        "`update_fn` fails for `g`",
        lambda b: b.online(update_fn=lambda g: g[("w_in",)] + jnp.ones(7)),
    ),
    (
        "'w_in' from float32[3, 4] to float16[3, 4]",
        lambda b: b.online(update_fn=lambda g: narrowed(b)),
    ),
    ("`update_fn` and `optimizer` are both None", lambda b: b.online(update_fn=None)),
    (
        ("`optimizer` is 3", "`update(gradients)` changes"),
        lambda b: b.online(update_fn=None, optimizer=3),
    ),
    (
        ("`optimizer` is the GraphNodeMeta", "`update(gradients)` changes"),
        lambda b: b.online(update_fn=None, optimizer=brainstate.nn.Module),
    ),
    ("Both `update_fn` and `optimizer`", lambda b: b.online(optimizer=optax.sgd(0.1))),
    ("`optimizer.init` fails for", lambda b: b.online(update_fn=None, optimizer=Failing("init"))),
    ("`optimizer.update` fails", lambda b: b.online(update_fn=None, optimizer=Failing("update"))),
    (
        ("`optimizer.update` fails", "`optimizer.gradient_transformation()` accepts"),
        lambda b: b.online(update_fn=None, optimizer=optax.MultiSteps(optax.sgd(0.1), 2)),
    ),
    (
        ("`optimizer_state` can be", "`learner.init_optimizer(optimizer)`"),
        lambda b: setattr(b.learner, "optimizer_state", 3),
    ),
    ("`optimizer` is 3", lambda b: b.learner.init_optimizer(3)),
    ("`window` is 4 and `every` is 2", lambda b: b.online(window=4, every=2)),
    (
        "`nonfinite` is 'drop'; expected 'skip', 'raise' or 'ignore'",
        lambda b: b.online(nonfinite="drop"),
    ),
    (
        "`nonfinite='raise'` cannot check values inside",
        lambda b: brainstate.transform.jit(lambda: b.online(nonfinite="raise"))(),
    ),
    (
        "`mask` has shape (3,); expected one weight per step, (4,)",
        lambda b: b.online(mask=np.ones(3)),
    ),
    *[
        (text, lambda b, n=name, o=options: DRIVERS[n](b, **o))
        for name in ("etrace_grad", "etrace_online", "etrace_evolve", "predict")
        for text, options in WATCHING
    ],
    (
        "`log_every` is 3, and parameters change or windows end every 2",
        lambda b: b.online(every=2, log_every=3, on_log=print),
    ),
    (
        "`progress` and `log_every` of `etrace_online` do not work inside",
        lambda b: brainstate.transform.jit(lambda: b.online(progress=True))(),
    ),
    (
        "`vjp_method='multi-step'`",
        lambda b: b.windows.etrace_online(
            XS, step_fn=lambda x: b.windows(x).sum(), update_fn=lambda g: None
        ),
    ),
    (
        "`step_fn` writes the parameter 'w_in'",
        lambda b: b.online(step_fn=lambda x, y: (b.loss(x, y), scale(b, "w_in"))[0]),
    ),
]


def narrowed(b):
    state = b.learner.algorithm.model.w_in
    state.value = state.value.astype(jnp.float16)


def evolve(b, xs=XS, *others, **options):
    return b.learner.etrace_evolve(xs, *others, **options)


def predict(b, xs=XS, *others, **options):
    return b.learner.predict(xs, *others, **options)


ALONE = [
    *sequence_rows(evolve),
    *reset_rows(evolve),
    *reset_rows(predict),
    ("`x` = an array of dtype float32", lambda b: evolve(b, XS, XS)),
    (
        "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
        lambda b: evolve(b, jnp.ones((4, 2, 5))),
    ),
    (
        "`x` of `update` has shape (5, 3); the model was compiled for (2, 3)",
        lambda b: evolve(b, jnp.ones((4, 5, 3))),
    ),
    ("of at least one step; the shapes given are none", lambda b: b.learner.predict()),
    ("`x` = an array of dtype float32 and shape (2, 3) in mV", lambda b: predict(b, XS * u.mV)),
    (
        "`x` of `update` has shape (3,); the model was compiled for (2, 3)",
        lambda b: predict(b, XS[0]),
    ),
    ("mA, and is called with `x`", lambda b: b.currents.predict(XS)),
    (
        "mA, and is called with `x` = an array of dtype float32 and shape (2, 3) in mV",
        lambda b: b.currents.etrace_evolve(XS * u.mV),
    ),
    (
        "mA, and is called with `x` = an array of dtype float32 and shape (2, 3) in uA",
        lambda b: b.currents.predict(XS * u.uA),
    ),
]

CALL = [
    ("`x` = an array of dtype float32 and shape (2, 3)", lambda b: b.learner()),
    ("(2, 3), and is called with `x`", lambda b: b.learner(X, X)),
    (
        "`x` of `update` has shape (2, 5); the model was compiled for (2, 3)",
        lambda b: b.learner(jnp.ones((2, 5))),
    ),
    (
        (
            "`x` of `update` has shape (5, 3); the model was compiled for (2, 3)",
            "`reset_state` with the new",
        ),
        lambda b: b.learner(jnp.ones((5, 3))),
    ),
    (
        "`x` of `update` has shape (3,); the model was compiled for (2, 3)",
        lambda b: b.learner(X[0]),
    ),
    ("`x` = an array of dtype float32", lambda b: b.learner(None)),
    (f"`x` {IS_A_STATE}", lambda b: b.learner(STATE)),
    ("`x` = an array of dtype float32", lambda b: b.learner({"x": X})),
    ("`x` of `update` has dtype complex64", lambda b: b.learner(X * 1j)),
    ("`x` = an array of dtype float32 and shape (2, 3) in mV", lambda b: b.learner(X * u.mV)),
    ("mA, and is called with `x`", lambda b: b.currents(X)),
    ("`x` of `update` has shape (3,); the model was compiled for (2, 3)", lambda b: b.mapped(X[0])),
    ("`MultiStepData` and some", lambda b: b.learner(braintrace.MultiStepData(XS), X)),
    (
        ("`MultiStepData` needs the", "the shapes given are ()"),
        lambda b: b.learner(braintrace.MultiStepData(1.0)),
    ),
    ("`MultiStepData 0` is 'abc'", lambda b: b.learner(braintrace.MultiStepData("abc"))),
    (
        ("`MultiStepData` needs the", "shapes given are (0, 2, 3)"),
        lambda b: b.learner(braintrace.MultiStepData(XS[:0])),
    ),
    (
        ("`MultiStepData` needs the", "shapes given are (0, 2, 3)"),
        lambda b: b.windows(braintrace.MultiStepData(XS[:0])),
    ),
    (
        ("`MultiStepData` needs the", "the shapes given are ()"),
        lambda b: b.windows(braintrace.MultiStepData(1.0)),
    ),
    (
        (
            "`init_state` of `OfBatch` and its modules declares; expected one of `batch_size`",
            "`reset_state` got `fancy`",
        ),
        lambda b: compiled(OfBatch()).reset_state(2, fancy=1),
    ),
    *[
        (
            (
                f"`reset_state` got `{name}`, which no `init_state` of `{of}`",
                "'where'? expected one of `batch_size`, `where`",
            ),
            lambda b, make=make, name=name: make(b).reset_state(**{name: np.ones(2, bool)}),
        )
        for (where, of, make) in (
            ("a learner", type(CASE.build()).__name__, lambda b: b.learner),
            ("layers that take anything", "LSTMCell", lambda b: compiled(nn.LSTMCell(3, 4))),
            ("layers of brainstate", "Marked", lambda b: compiled(Marked(), mark="auto")),
            ("an algorithm", "LSTMCell", lambda b: compiled(nn.LSTMCell(3, 4)).algorithm),
        )
        for name in ("were", "whree")
    ],
    (
        ("`reset_state` got `gian`", "'gain'? expected one of `batch_size`, `where`, `gain`"),
        lambda b: compiled(Started()).reset_state(where=np.ones(2, bool), gian=2.0),
    ),
    (
        ("`reset_state` got `batchsize`", "'batch_size'? expected one"),
        lambda b: compiled(nn.LSTMCell(3, 4)).reset_state(batchsize=3),
    ),
    *[
        (
            f"`a` is {value!r}; expected a State",
            lambda b, value=value: b.learner.functional(a=value),
        )
        for value in (3, "a", None, [], {})
    ],
    *[
        (f"`where` {text}", lambda b, value=value: b.learner.reset_state(where=value))
        for text, value in [
            ("has shape (2,) and dtype float32", jnp.ones(2)),
            ("has shape (3,), one flag per sample", np.ones(3, bool)),
            ("has shape (2, 1)", np.ones((2, 1), bool)),
        ]
    ],
    ("`batch_size=2`. `where` resets", lambda b: b.learner.reset_state(2, where=np.ones(2, bool))),
    ("A learner is called inside a transformation of JAX", lambda b: jax.jit(b.learner)(X)),
    ("A learner is called inside a transformation of JAX", lambda b: jax.vmap(b.learner)(XS)),
    (
        "A learner is called inside a transformation of JAX",
        lambda b: jax.grad(lambda x: b.learner(x).sum())(X),
    ),
]


def check(loss=lambda out, y: ((out - y) ** 2).mean(), xs=XS, ys=YS, model=None, **options):
    model = CASE.build() if model is None else model
    return braintrace.gradient_check(model, "d_rtrl", xs, ys, loss, **{"batch_size": 2, **options})


CHECK = [
    ("`loss` is None", lambda b: check(None)),
    ("`loss` takes (output)", lambda b: check(lambda output: output.sum())),
    ("loss, a floating-point number; it returned None", lambda b: check(lambda out, y: None)),
    ("are (4, 2, 3), (3, 2, 2)", lambda b: check(ys=YS[:3])),
    ("`xs` is 'abc'", lambda b: check(xs="abc")),
    ("`xs` is None", lambda b: check(xs=None)),
    ("`ys` is an array of dtype object", lambda b: check(ys=OBJECTS)),
    ("`model` is 3", lambda b: check(model=3)),
    (
        "`etp_mm` is not an ETP primitive of this library",
        lambda b: braintrace.check_primitive("etp_mm", X, X),
    ),
    ("`inline`: `fn` is None", lambda b: braintrace.inline(None)),
    (
        "A primitive's name must be a non-empty string",
        lambda b: braintrace.register_primitive("", jnp.add),
    ),
    ("`wrong` must be callable", lambda b: braintrace.register_primitive("wrong", None)),
    (
        "`batched` is 'yes'",
        lambda b: braintrace.register_primitive("wrong", jnp.add, batched="yes"),
    ),
    (
        "`None` is not an ETP primitive of this library",
        lambda b: braintrace.get_primitive_spec(None),
    ),
    ("`spec` is None", lambda b: braintrace.register_primitive_spec(None)),
]


def of_function(step=lambda params, state, x: (state, x), params=None, state=None, **options):
    """A learner of a function; without options, a model."""
    params = {"w": jnp.ones((3, 4))} if params is None else params
    state = {"h": jnp.zeros((2, 4))} if state is None else state
    model = braintrace.from_function(step, params, state)
    return braintrace.compile(model, "rtrl", X, **options) if options else model


def returning(new_state):
    return of_function(lambda params, state, x: (new_state(state["h"]), x), batch_size=2)


FUNCTION = [
    ("`step` is None; expected a function", lambda b: of_function(None)),
    *[
        (text, lambda b, params=params: of_function(params=params))
        for text, params in [
            ("`params` is {}", {}),
            (("`params` is {'a': 0.5}", "as arrays (`jnp.asarray`)"), {"a": 0.5}),
            ("`params` is a dict of an array of dtype int32", {"a": jnp.arange(3)}),
            (f"`params/w` {IS_A_STATE}", {"w": STATE}),
        ]
    ],
    *[
        (text, lambda b, state=state: of_function(state=state))
        for text, state in [
            ("`state` is {}", {}),
            ("`state` is a dict of an array of dtype int32", {"t": jnp.arange(3)}),
            (f"`state/h` {IS_A_STATE}", {"h": STATE}),
        ]
    ],
    (
        (
            "'state/h' starts as an array",
            "(2, 4), but `batch_size` is 3. Use a state whose first axis",
            "compile with `vmap=True`",
        ),
        lambda b: of_function(batch_size=3),
    ),
    (
        ("`init_state` of `FunctionModel` fails with `batch_size` None", "'batch'"),
        lambda b: of_function(state=lambda batch: {"h": jnp.zeros((batch, 4))}, vmap=False),
    ),
    (
        ("`inputs[0]` = an array of dtype float32 and shape (2, 3)", "positional argument: 'y'"),
        lambda b: of_function(lambda params, state, x, y: (state, x), batch_size=2),
    ),
    (
        "of dtype float32 and shape (2, 4); expected a pair `(state, output)`",
        lambda b: of_function(lambda params, state, x: state["h"], batch_size=2),
    ),
    *[
        (text, lambda b, new=new: returning(new))
        for text, new in [
            (
                (
                    "`step`, which returns `(state, output)`, returns a state with 'state/g'",
                    "shape (2, 4), no 'state/h'",
                ),
                lambda h: {"g": h},
            ),
            (
                "'state/g', an array of dtype float32 and shape (2, 4); expected 'state/h'",
                lambda h: {"h": h, "g": h},
            ),
            ("returns a state with no 'state/h'; expected 'state/h'", lambda h: {"h": None}),
            ("'state/h' from float32[2, 4] to float32[4]", lambda h: {"h": h[0]}),
            ("'state/h' from float32[2, 4] to float16[2, 4]", lambda h: {"h": h.astype("float16")}),
            ("'state/h' from float32[2, 4] to float32[2, 4] in mV", lambda h: {"h": h * u.mV}),
        ]
    ],
    (
        ("`step`", "PyTreeDef([*]); expected PyTreeDef((*,))"),
        lambda b: of_function(
            lambda params, state, x: (list(state), x), state=(jnp.zeros((2, 4)),), batch_size=2
        ),
    ),
    (
        ("`step`", "'b' in a place without an array"),
        lambda b: of_function(
            lambda params, state, x: ({**state, "name": "b"}, x),
            state={"h": jnp.zeros((2, 4)), "name": "a"},
            batch_size=2,
        ),
    ),
    ("`params` has 'params/v', 1.0, no 'params/w'", lambda b: of_function().set_params({"v": 1.0})),
    ("which has ('params', 'w')", lambda b: of_function().as_params({"w": 1.0})),
]

EVERY = [
    *COMPILE,
    *ALGORITHM,
    *GRADIENT,
    *ONLINE,
    *ALONE,
    *CALL,
    *CHECK,
    *FUNCTION,
    *WITHOUT_NUMBERS,
    *LOWER,
    *LOOPS,
    *FOUND_AT_RANDOM,
]

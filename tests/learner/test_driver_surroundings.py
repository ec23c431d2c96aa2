"""Drivers in the hands of others: mapped, cloned, in half precision, on unusual data."""

import functools
import typing

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import build_learner

import braintrace

CASE = catalogue.BY_NAME["IndRNN"]
XS, TARGETS = map(np.asarray, CASE.sequences(2, 6))


class Leaky(brainstate.nn.Module):
    """A leaky integrator without memory of its own where ``decay`` is 0."""

    def __init__(self, decay=0.5, dtype=jnp.float32):
        super().__init__()
        self.decay = decay
        self.w = brainstate.ParamState(jnp.ones((2, 3), dtype))
        self.readout = brainstate.ParamState(jnp.ones((3, 1), dtype))

    def init_state(self, batch_size=1):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3), self.w.value.dtype))

    def update(self, x):
        self.h.value = self.decay * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value @ self.readout.value


class Chained(brainstate.nn.Module):
    """Two coupled states; the output of an operation enters each, by additions alone."""

    def __init__(self, apart):
        super().__init__()
        self.apart = apart
        self.w = brainstate.ParamState(jnp.linspace(-1.0, 1.0, 6).reshape(2, 3))
        self.r = brainstate.ParamState(jnp.linspace(0.5, -1.5, 6).reshape(2, 3))

    def init_state(self, batch_size=1):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
        self.g = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        entering = braintrace.matmul(jnp.sin(3 * x), self.r.value)
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        if self.apart:
            entering = 2 * entering
        self.g.value = 0.7 * self.g.value + self.h.value + entering
        return self.g.value


def test_traces_have_the_precision_of_their_sequence_wherever_they_are_read():
    with jax.enable_x64(True):
        xs = np.linspace(0.0, 1.0, 12).reshape(6, 1, 2)
        learner = braintrace.compile(Leaky(dtype=jnp.float64), "d_rtrl", xs[0], batch_size=1)
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x)))
    (trace,) = [
        t for t in jax.tree.leaves(learner.functional().unsharded_state().traces) if t.ndim > 1
    ]
    expected = sum(0.5 ** (5 - step) * xs[step, 0] for step in range(6))
    assert trace.dtype == np.float64
    np.testing.assert_allclose(np.asarray(trace).reshape(2, -1)[:, 0], expected, rtol=1e-14)


def gradients_of(model, algorithm, xs, **options):
    learner = braintrace.compile(model, algorithm, xs[0], batch_size=xs.shape[1])
    return learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum(), **options)


def test_output_traces_are_not_shared_across_a_state():
    xs = XS[..., :2]
    apart = Chained(True)  # a product by two is no addition; half the weight makes up for it
    apart.r.value = apart.r.value / 2
    expected = gradients_of(apart, "es_d_rtrl", xs)
    found = gradients_of(Chained(False), "es_d_rtrl", xs)
    assert_gradients_close(found, {**expected, ("r",): expected[("r",)] / 2}, 1e-5)


def test_a_sequence_gradient_can_be_mapped():
    sequences = np.stack([XS, -XS, 2 * XS])
    learner, alone = build_learner(CASE, "d_rtrl"), build_learner(CASE, "d_rtrl")

    def gradient(learner):
        step = lambda x: (learner(x) ** 2).sum()  # noqa: E731
        return lambda xs: learner.etrace_grad(xs, step_fn=step, chunk_size=4)

    states = list(learner.states(brainstate.ShortTermState).values())
    found = brainstate.transform.vmap(gradient(learner), out_states=states)(sequences)
    separate = gradient(alone)
    for index, xs in enumerate(sequences):
        alone.reset_state(2)
        own = jax.tree.map(lambda g, i=index: np.asarray(g)[i], found)
        assert_gradients_close(own, separate(xs), 1e-5)
        after = alone.states(brainstate.ShortTermState).values()
        for mapped, own in zip(states, after, strict=True):
            sample = jax.tree.map(lambda v, i=index: np.asarray(v)[i], mapped.value)
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-4), sample, own.value
            )


def test_a_clone_moves_its_own_states():
    learner = build_learner(CASE, "d_rtrl")
    run = [learner.predict, learner.etrace_evolve]
    for driver in run:
        driver(XS)
    learner.etrace_grad(XS, step_fn=lambda x: learner(x).sum(), chunk_size=3, reduction="sum")
    before = {path: state.value for path, state in learner.states().items()}
    twin = brainstate.graph.clone(learner)
    expected = learner.predict(XS)
    for path, state in learner.states().items():
        state.value = before[path]
    np.testing.assert_array_equal(twin.predict(XS), expected)
    twin.etrace_evolve(XS)
    for path, state in learner.states().items():
        jax.tree.map(np.testing.assert_array_equal, state.value, before[path])


class Pair(typing.NamedTuple):
    """A container whose parts have names."""

    first: brainstate.State
    second: brainstate.State


class Growing(brainstate.nn.Module):
    """A leaky unit and readouts: two that are one, in a list in a dictionary, in a named tuple."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(0.3 * jnp.ones((3, 4)))
        self.tied = self.other = brainstate.ParamState(jnp.ones((4, 1)))
        self.heads = {"all": [brainstate.ParamState(jnp.ones((4, 1)))]}
        self.pair = Pair(*(brainstate.ParamState(jnp.ones((4, 1))) for _ in range(2)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value

    def loss(self, h):
        heads = [self.tied, self.other, *self.heads["all"], *self.pair]
        return sum(jnp.sum((h @ head.value) ** 2) for head in heads)


def _untie(model):
    model.other = brainstate.ParamState(5 * jnp.ones((4, 1)))


def _append(model):
    model.heads["all"].append(brainstate.ParamState(5 * jnp.ones((4, 1))))


def _replace(model):
    model.pair = Pair(brainstate.ParamState(5 * jnp.ones((4, 1))), model.pair.second)


def _begin(model):
    brainstate.nn.init_all_states(model)


@pytest.mark.by_day("_untie", "_append")
@pytest.mark.parametrize("change", [_untie, _append, _replace, _begin])
def test_states_that_come_later_learn_with_the_same_step_function(change):
    """As in a learner that is made after the change."""
    learners = []
    for when in ("before", "after"):
        model = Growing()
        if when == "before":
            change(model)
        learners.append(braintrace.compile(model, "d_rtrl", XS[0], batch_size=2))
    fresh, learner = learners
    steps = [lambda x, own=own: own.algorithm.model.loss(own(x)) for own in learners]
    first = learner.etrace_grad(XS, step_fn=steps[1])
    change(learner.algorithm.model)
    learner.reset_state(2)
    found = learner.etrace_grad(XS, step_fn=steps[1])
    expected = fresh.etrace_grad(XS, step_fn=steps[0])
    assert set(found) == set(expected) == set(learner.algorithm.model.states(brainstate.ParamState))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
    if change is not _begin:
        assert np.max(np.abs(found["w",] - first["w",])) > 1


@pytest.mark.optimised
@pytest.mark.parametrize("window", [None, 1])
def test_gradients_in_half_precision_add_up(window):
    model, xs = Leaky(0.0, jnp.bfloat16), jnp.ones((600, 1, 2), jnp.bfloat16)
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=1, window=window)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: learner(x).sum(), chunk_size=1, reduction="sum"
    )
    assert {gradient.dtype for gradient in found.values()} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(found[("w",)], 600)
    np.testing.assert_array_equal(found[("readout",)], 1200)


class Scaled(brainstate.nn.Module):
    """A layer whose output is scaled as a whole, in half precision."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3), jnp.bfloat16))
        self.readout = brainstate.ParamState(jnp.ones((3, 3), jnp.bfloat16))
        self.bias = brainstate.ParamState(jnp.zeros(3, jnp.bfloat16))
        self.gain = brainstate.ParamState(jnp.ones((), jnp.bfloat16))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3), jnp.bfloat16))

    def update(self, x):
        self.h.value = jnp.bfloat16(0.5) * self.h.value + braintrace.matmul(x, self.w.value)
        return (self.h.value @ self.readout.value + self.bias.value) * self.gain.value


@pytest.mark.optimised
@pytest.mark.parametrize("chunk_size", ["auto", 900])
def test_sums_over_many_steps_are_not_in_half_precision(chunk_size):
    xs = jnp.ones((900, 4, 2), jnp.bfloat16)
    learner = braintrace.compile(Scaled(), "d_rtrl", xs[0], batch_size=4)
    found, losses = learner.etrace_grad(
        xs,
        step_fn=lambda x: learner(x).mean(),
        reduction="sum",
        return_value=True,
        chunk_size=chunk_size,
    )
    # The loss is linear in a gain of one.
    value = np.sum(np.float64(losses))
    np.testing.assert_allclose(np.float64(found[("gain",)]), value, rtol=0.005)
    np.testing.assert_allclose(np.float64(found[("bias",)]), len(xs) / 3, rtol=0.005)


def test_the_infinite_loss_of_a_padded_step_is_zero():
    learner = build_learner(CASE, "d_rtrl")
    scale, mask = jnp.array([1.0, 2.0, 0.0, 3.0, 1.0, 0.0]), jnp.array([1, 1, 0, 1, 1, 0])
    _, losses = learner.etrace_grad(
        XS,
        scale,
        step_fn=lambda x, s: (learner(x) ** 2).sum() + jnp.log(s),
        mask=mask,
        return_value=True,
    )
    assert np.isfinite(losses).all()
    np.testing.assert_array_equal(losses == 0, mask == 0)


def test_sequences_of_numpy_in_double_precision():
    xs = np.ones((4, 1, 2))
    assert xs.dtype == np.float64
    learner = braintrace.compile(Leaky(), "d_rtrl", xs[0], batch_size=1)
    options = {"step_fn": lambda x: (learner(x) ** 2).sum()}
    found = learner.etrace_grad(xs, chunk_size=np.int64(2), **options)
    learner.reset_state()
    expected = learner.etrace_grad(jnp.ones((4, 1, 2)), chunk_size=2, **options)
    assert_gradients_close(found, expected, 1e-6)


@pytest.mark.parametrize(
    ("example", "fitting", "refused"),
    [
        (jnp.uint8, [jnp.bool_, jnp.uint8], [jnp.int8, jnp.int32]),
        (jnp.int32, [jnp.uint8, jnp.int16], [jnp.uint32, jnp.float16]),
        (jnp.float16, [jnp.int32, jnp.float16], [jnp.float32, jnp.bfloat16]),
        (jnp.bfloat16, [jnp.float16, jnp.float32], [jnp.complex64]),
    ],
)
def test_numbers_that_the_dtype_of_the_example_cannot_hold(example, fitting, refused):
    learner = braintrace.compile(Leaky(), "d_rtrl", jnp.zeros((1, 2), example), batch_size=1)
    for dtype in fitting:
        learner(jnp.ones((1, 2), dtype))
    for dtype in refused:
        with pytest.raises(braintrace.DtypeError, match="Compile with an example of dtype"):
            learner(jnp.ones((1, 2), dtype))


def test_a_key_that_nobody_has_read_before():
    """A random State makes its key when it is first read, here by the trace of the step."""

    class Noisy(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((3, 4)))
            self.random = brainstate.random.RandomState(np.array([1, 2], np.uint32))

        def init_state(self, batch_size):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

        def update(self, x):
            kept = self.random.rand(4) > 0.5
            self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w.value) * kept
            return self.h.value

    model = Noisy()
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    gradients = learner.etrace_grad(jnp.ones((5, 2, 3)), step_fn=lambda x: learner(x).sum())
    assert np.any(gradients["w",])


def test_a_loss_on_a_state_that_reads_the_past():
    """A prediction error, made of the hidden state before the step, in a State of its own."""

    class Predictive(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(0.3 * jnp.ones((3, 4)))

        def init_state(self, batch_size):
            self.h = brainstate.HiddenState(jnp.ones((batch_size, 4)))
            self.error = brainstate.ShortTermState(jnp.zeros((batch_size, 3)))

        def update(self, x):
            self.error.value = x - 0.3 * self.h.value[:, :3]
            self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w.value)
            return self.h.value

    def loss(model, run):
        return lambda x: 0.01 * (run(x) ** 2).sum() + (model.error.value**2).sum()

    xs = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 3)), jnp.float32)
    model, plain = Predictive(), Predictive()
    brainstate.nn.init_all_states(plain, batch_size=2)
    weights = plain.states(brainstate.ParamState)
    step = loss(plain, plain)
    gradient = brainstate.transform.grad(lambda: sum(step(x) for x in xs), weights)
    expected = brainstate.transform.jit(gradient)()
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    for chunk_size in (1, 3, "auto"):
        learner.reset_state(2)
        options = {"step_fn": loss(model, learner), "reduction": "sum", "chunk_size": chunk_size}
        found = learner.etrace_grad(xs, **options)
        np.testing.assert_allclose(found["w",], expected["w",], rtol=1e-5)


def test_states_of_different_precision_in_one_group():
    class Mixed(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((3, 4), jnp.bfloat16))

        def init_state(self, batch_size):
            self.v = brainstate.HiddenState(jnp.zeros((batch_size, 4), jnp.bfloat16))
            self.m = brainstate.HiddenState(jnp.zeros((batch_size, 4), jnp.float32))

        def update(self, x):
            drive = braintrace.matmul(x, self.w.value)
            self.v.value = jnp.bfloat16(0.5) * self.v.value + drive
            self.m.value = 0.5 * self.m.value + self.v.value.astype(jnp.float32)
            return self.m.value

    xs = jnp.ones((4, 2, 3), jnp.bfloat16)
    learner = braintrace.compile(Mixed(), "d_rtrl", xs[0], batch_size=2)
    options = {"step_fn": lambda x: learner(x).sum(), "reduction": "sum"}
    found = [learner.etrace_grad(xs, **options, chunk_size=1)]
    learner.reset_state(2)
    found += [learner.etrace_grad(xs, **options, chunk_size=2)]
    # Per sample: v = 1, 1.5, 1.75, 1.875 and m = v + m / 2 for a drive of one per step.
    expected = 2 * (1 + 2 + 2.75 + 3.25)
    for gradients in found:
        assert gradients["w",].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(gradients["w",]), expected, rtol=1e-2)


def test_results_without_elements_over_several_chunks():
    learner = build_learner(CASE)
    xs, targets = CASE.sequences(2, 7)

    def step(x, target):
        return CASE.loss(learner(x), target), jnp.zeros((0, 2))

    _, aux = learner.etrace_grad(xs, targets, step_fn=step, has_aux=True, chunk_size=3)
    assert aux.shape == (7, 0, 2)


class WithMean(brainstate.nn.Module):
    """Written for one sample, with a running mean of which there is one."""

    def __init__(self, follows, kind=brainstate.LongTermState):
        super().__init__()
        self.follows = follows
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.mean = kind(jnp.arange(4.0))

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(4))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value) - self.mean.value
        if self.follows:
            self.mean.value = 0.9 * self.mean.value + 0.1 * drive
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value


@pytest.mark.parametrize("kind", [brainstate.LongTermState, brainstate.State])
def test_a_mapped_model_shares_what_it_only_reads(kind):
    xs = XS[..., :1] * jnp.ones(3)
    learner = braintrace.compile(WithMean(False, kind), "d_rtrl", xs[0], batch_size=2, vmap=True)
    options = {"step_fn": lambda x: (learner(x) ** 2).sum(), "reduction": "sum"}
    found = learner.etrace_grad(xs, **options, chunk_size=4)
    model = WithMean(False, kind)

    def total(xs):
        model.init_state()
        return sum((model(x) ** 2).sum() for x in xs)

    weights = {("w",): model.w}
    gradient = brainstate.transform.jit(brainstate.transform.grad(total, weights))
    expected = sum(gradient(xs[:, sample])["w",] for sample in range(2))
    np.testing.assert_allclose(found["w",], expected, rtol=1e-5)


def test_a_mapped_model_that_writes_what_there_is_one_of_is_refused():
    with pytest.raises(braintrace.CompilationError, match=r"'mean'.*ShortTermState"):
        braintrace.compile(WithMean(True), "d_rtrl", XS[0], batch_size=2, vmap=True)


class Counted(brainstate.HiddenState):
    """Counts how often its value is written."""

    def _write_value(self, value):
        vars(self)["writes"] = vars(self).get("writes", 0) + 1
        super()._write_value(value)


class OfCounted(Leaky):
    def init_state(self, batch_size=1):
        self.h = Counted(jnp.zeros((batch_size, 3)))


@pytest.mark.parametrize("register", ["on the State", "for all States"])
def test_hooks_of_states_see_what_a_call_reads_and_writes(register):
    learner = braintrace.compile(Leaky(), "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    h, seen = learner.algorithm.model.h, []
    learner(jnp.ones((1, 2)))

    def noted(kind):
        return lambda context: seen.append((kind, context.state_ref()))

    hooks = h if register == "on the State" else brainstate.GlobalHookRegistry.instance()
    handles = [hooks.register_hook(kind, noted(kind)) for kind in ("read", "write_after")]
    try:
        learner(jnp.ones((1, 2)))
        assert {kind for kind, state in seen if state is h} == {"read", "write_after"}
    finally:
        for handle in handles:
            handle.remove()


def test_a_class_of_states_that_writes_in_its_own_way_is_left_to_it():
    learner = braintrace.compile(OfCounted(), "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    h = learner.algorithm.model.h
    before = vars(h)["writes"]
    learner(jnp.ones((1, 2)))
    learner.etrace_evolve(jnp.ones((4, 1, 2)))
    assert vars(h)["writes"] == before + 2

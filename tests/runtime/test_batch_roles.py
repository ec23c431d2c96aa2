"""Samples are known by the role of an axis: whatever else is as long, and whatever has no samples.

The oracle is `jax.grad` through the whole sequence, with resets written out.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close
from backpropagation import through_time
from drivers import snapshot, stream_gradient, summed

import braintrace

F = 2
SIZES = pytest.mark.parametrize(
    ("batch", "units", "steps"),
    [(3, 4, 5), (3, 3, 5), (3, 5, 3), (1, 1, 4), (3, 3, 3)],
    ids=["all differ", "batch = units", "batch = steps", "batch of one", "all equal"],
)


class Shared(brainstate.nn.Module):
    """A state for each sample, beside one that all samples share and add to."""

    sideways = False

    def __init__(self, units):
        super().__init__()
        values = np.random.default_rng(0).normal(size=(2, F, units)).astype(np.float32)
        self.w, self.v = (brainstate.ParamState(jax.device_put(x)) for x in values)
        self.units = units

    def init_state(self, batch_size=None):
        batch = () if batch_size is None else (batch_size,)
        shape = (self.units, *batch) if self.sideways else (*batch, self.units)
        self.h = brainstate.HiddenState(jnp.full(shape, 0.2))
        self.theta = brainstate.HiddenState(jnp.full(self.units, 0.5))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        common = braintrace.matmul(x, self.v.value)
        self.h.value = 0.5 * self.h.value + (drive.T if self.sideways else drive)
        self.theta.value = 0.9 * self.theta.value + (common.mean(0) if x.ndim > 1 else common)
        return (self.h.value.T if self.sideways else self.h.value) * self.theta.value


class Sideways(Shared):
    """The batch is the last axis of the state, and a number counts steps."""

    sideways = True

    def init_state(self, batch_size=None):
        super().init_state(batch_size)
        self.count = brainstate.ShortTermState(jnp.zeros(()))

    def update(self, x):
        self.count.value = self.count.value + 1
        return super().update(x)


def data(batch, steps):
    generator = np.random.default_rng(1)
    xs = generator.normal(size=(steps, batch, F)).astype(np.float32)
    flags = generator.random((steps, batch)) < 0.4
    flags[steps // 2] = True  # all samples at once: the shared state as well
    flags[-1] = np.arange(batch) == 0  # and one alone, when it has left its start
    return xs, flags


def expected(model, xs, flags):
    """The gradient of all losses, and the states at the end, with resets written out."""
    gradients, last = _expected(model.w.value, model.v.value, xs, flags)
    return dict(zip((("w",), ("v",)), gradients, strict=True)), last


@jax.jit
def _expected(w, v, xs, flags):
    def total(w, v):
        def step(carry, now):
            (h, theta, count), (x, new) = carry, now
            h = jnp.where(new[:, None], 0.2, h)
            theta = jnp.where(new.all(), 0.5, theta)
            count = jnp.where(new.all(), 0, count)
            h, theta = 0.5 * h + x @ w, 0.9 * theta + (x @ v).mean(0)
            return (h, theta, count + 1), jnp.sum((h * theta) ** 2)

        units = w.shape[1]
        start = jnp.full((xs.shape[1], units), 0.2), jnp.full(units, 0.5), 0.0
        last, losses = jax.lax.scan(step, start, (xs, flags))
        return losses.sum(), last

    return jax.grad(total, argnums=(0, 1), has_aux=True)(w, v)


def compiled(model, xs, rule="d_rtrl", **options):
    return braintrace.compile(model, rule, xs[0], batch_size=xs.shape[1], **options)


def check_states(model, last):
    h = model.h.value.T if model.sideways else model.h.value
    values = [h, model.theta.value, *([model.count.value] if model.sideways else [])]
    for value, reference in zip(values, last, strict=False):
        np.testing.assert_allclose(value, reference, rtol=2e-5, atol=1e-6)


def grad_of(learner, xs, **options):
    def step_fn(x):
        return (learner(x) ** 2).sum()

    return learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options)


def by_chunks(learner, xs, flags):
    return grad_of(learner, xs, reset=flags, chunk_size=2)


def in_one_chunk(learner, xs, flags):
    return grad_of(learner, xs, reset=flags, chunk_size=len(xs))


def split_over_calls(learner, xs, flags):
    parts = (slice(0, 1), slice(1, len(xs)))
    found = [grad_of(learner, xs[part], reset=flags[part]) for part in parts]
    return jax.tree.map(jnp.add, *found)


def reset_between_calls(learner, xs, flags):
    found = []
    for x, new in zip(xs, flags, strict=True):
        learner.reset_state(where=new)
        found.append(grad_of(learner, x[None]))
    return summed(found)


def in_the_users_own_grad(learner, xs, flags):
    weights = learner.algorithm.param_states

    def loss(x, new):
        learner.reset_state(where=new)
        differentiate = brainstate.transform.grad(lambda: (learner(x) ** 2).sum(), weights)
        return differentiate()

    found = brainstate.transform.for_loop(loss, xs, jax.device_put(flags))
    return jax.tree.map(lambda g: g.sum(0), found)


def by_a_stream(learner, xs, flags):
    """The parameters stay: the gradients of all steps are collected."""
    step_fn = lambda x: (learner(x) ** 2).sum()  # noqa: E731
    return stream_gradient(learner, xs, step_fn=step_fn, reset=flags)


def asked_for_in_a_stream(learner, xs, flags):
    """Resets of the next step, asked for by `update_fn`."""
    total = {p: brainstate.State(jnp.zeros_like(s.value)) for p, s in params(learner).items()}

    def collect(gradients, later):
        for path, gradient in gradients.items():
            total[path].value = total[path].value + gradient
        learner.reset_state(where=later)

    def step_fn(x, later):
        return (learner(x) ** 2).sum(), later

    learner.reset_state(where=flags[0])
    later = np.concatenate([flags[1:], np.zeros_like(flags[:1])])
    learner.etrace_online(xs, later, step_fn=step_fn, update_fn=collect, has_aux=True)
    return {path: state.value for path, state in total.items()}


def by_pure_functions(learner, xs, flags):
    pure, found = learner.functional(), []
    state = pure.state()
    for x, new in zip(xs, flags, strict=True):
        state = pure.reset(state, where=new)
        state, gradients = pure.grad(
            state, x[None], step_fn=lambda x: (learner(x) ** 2).sum(), reduction="sum"
        )
        found.append(gradients)
    pure.restore(state)
    return summed(found)


def params(learner):
    return learner.algorithm.param_states


PATHS = (
    by_chunks,
    in_one_chunk,
    split_over_calls,
    reset_between_calls,
    in_the_users_own_grad,
    by_a_stream,
    asked_for_in_a_stream,
    by_pure_functions,
)


@pytest.mark.parametrize(("batch", "units", "steps"), [(1, 1, 4), (3, 3, 3)])
def test_a_nan_in_one_sample_is_gone_after_its_reset(batch, units, steps):
    xs, flags = data(batch, steps)
    bad = xs.copy()
    bad[0, 0] = np.inf
    flags[1] = True
    model = Shared(units)
    learner = compiled(model, xs)

    learner.etrace_evolve(bad[:1])
    assert not np.isfinite(model.h.value).all()
    found = grad_of(learner, xs[1:], reset=flags[1:])
    reference, last = expected(model, xs[1:], flags[1:])
    assert_gradients_close(found, reference, 2e-5)
    check_states(model, last)


def test_what_is_not_finite_in_a_shared_state_resets_all_samples():
    xs, _ = data(3, 4)
    model = Shared(3)
    learner = compiled(model, xs)
    xs[1, 0] = np.nan
    with pytest.warns(braintrace.NonFiniteWarning, match="All samples were reset"):
        learner.etrace_online(
            xs[:2],
            step_fn=lambda x: (learner(x) ** 2).sum(),
            update_fn=lambda gradients: None,
        )
    assert_states_close(
        [model.h.value, model.theta.value],
        [np.full((3, 3), 0.2, np.float32), np.full(3, 0.5, np.float32)],
    )


ONE = np.array([True, False, False])
CALLS = {
    "where": lambda learner, xs: learner.reset_state(where=ONE),
    "where in pure functions": lambda learner, xs: learner.functional().reset(
        learner.functional().state(), where=ONE
    ),
    "reset": lambda learner, xs: grad_of(learner, xs, reset=np.tile(ONE, (len(xs), 1))),
    "reset of a stream": lambda learner, xs: learner.etrace_online(
        xs,
        step_fn=lambda x: learner(x).sum(),
        update_fn=lambda g: None,
        reset=np.tile(ONE, (len(xs), 1)),
    ),
    "reset of states": lambda learner, xs: learner.etrace_evolve(
        xs, reset=np.tile(ONE, (len(xs), 1))
    ),
    "reset of outputs": lambda learner, xs: learner.predict(xs, reset=np.tile(ONE, (len(xs), 1))),
    "where in a stream": lambda learner, xs: learner.etrace_online(
        xs,
        step_fn=lambda x: learner(x).sum(),
        update_fn=lambda g: learner.reset_state(where=ONE),
    ),
}


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_units_are_no_samples(rule):
    xs = data(1, 3)[0][:, 0]
    learner = braintrace.compile(Shared(3), rule, xs[0])
    grad_of(learner, xs)
    before = snapshot(learner)
    words = r"no batch axis: `init_state` creates State 'h' of shape \(3,\) without one"
    for call in CALLS.values():
        with pytest.raises(braintrace.ShapeError, match=words):
            call(learner, xs)
        assert_states_close(snapshot(learner), before)


def test_an_unbatched_model_with_a_flag_for_all():
    xs, flags = data(1, 4)
    model = Shared(4)
    learner = braintrace.compile(model, "d_rtrl", xs[0, 0])
    reference, last = expected(model, xs, flags)
    found = grad_of(learner, xs[:, 0], reset=flags[:, 0])
    assert_gradients_close(found, reference, 2e-5)
    np.testing.assert_allclose(model.h.value, np.asarray(last[0])[0], rtol=2e-5)


def test_lanes_of_a_foreign_map_have_flags_of_their_own():
    xs, flags = data(3, 5)
    model = Shared(3)
    learner = braintrace.compile(model, "d_rtrl", xs[0, 0])
    pure = learner.functional()

    def of_lane(xs, flags):
        def step(state, now):
            x, new = now
            state = pure.reset(state, where=new)
            state, gradients = pure.grad(
                state, x[None], step_fn=lambda x: (learner(x) ** 2).sum(), reduction="sum"
            )
            return state, gradients

        return jax.tree.map(lambda g: g.sum(0), jax.lax.scan(step, pure.state(), (xs, flags))[1])

    found = jax.jit(jax.vmap(of_lane, in_axes=(1, 1)))(xs, flags)
    found = jax.tree.map(np.asarray, found)
    for lane in range(3):
        own = slice(lane, lane + 1)
        reference, _ = expected(model, xs[:, own], flags[:, own])
        assert_gradients_close({p: g[lane] for p, g in found.items()}, reference, 2e-5)


@pytest.mark.parametrize("rule", ["es_d_rtrl", "rtrl"])
def test_rules_that_cannot_keep_a_shared_state_apart_say_so(rule):
    xs, flags = data(3, 4)
    options = {"decay_or_rank": 0.8} if rule == "es_d_rtrl" else {}
    if rule == "rtrl":
        with pytest.raises(braintrace.CompilationError, match=r"'theta' of shape \(3,\).* no axis"):
            compiled(Shared(3), xs, rule)
        return
    learner = compiled(Shared(3), xs, rule, **options)
    with pytest.raises(braintrace.OptionError, match="share"):
        grad_of(learner, xs, reset=flags)
    with pytest.raises(braintrace.OptionError, match="All samples"):
        grad_of(learner, xs)
        learner.reset_state(where=flags[0])
    grad_of(learner, xs, reset=flags[:, 0])


class Fixed(brainstate.nn.Module):
    """States of one batch, made in the constructor or by an `init_state` that takes no size."""

    def __init__(self, batch, units, own_init):
        super().__init__()
        weight = np.linspace(-1.0, 1.0, F * units, dtype=np.float32).reshape(F, units)
        self.w = brainstate.ParamState(jax.device_put(weight))
        self.shape, self.own_init = (batch, units), own_init
        self.start()

    def start(self):
        self.h = brainstate.HiddenState(jnp.full(self.shape, 0.2))

    def init_state(self, **_):
        if self.own_init:
            self.start()

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.parametrize(
    ("is_told", "batch", "units", "own_init"),
    [(True, 3, 4, True), (True, 3, 3, False), (False, 3, 4, False), (False, 3, 3, True)],
)
def test_rows_of_operations_are_samples_where_nothing_else_says_so(batch, units, own_init, is_told):
    xs, flags = data(batch, 5)
    model = Fixed(batch, units, own_init)
    size = {"batch_size": batch} if is_told else {}
    learner = braintrace.compile(model, "d_rtrl", xs[0], **size)
    found = grad_of(learner, xs, reset=flags)

    def step(params, h, x, new):
        h = 0.5 * jnp.where(new[:, None], 0.2, h) + x @ params["w",]
        return h, (h**2).sum()

    start, params = np.full((batch, units), 0.2, np.float32), {("w",): model.w.value}
    assert_gradients_close(found, through_time(step, params, start, xs, flags), 2e-5)


class Unreached(Fixed):
    """A state that no operation reaches."""

    def start(self):
        super().start()
        self.trace = brainstate.ShortTermState(jnp.zeros((self.shape[0], F)))

    def update(self, x):
        self.trace.value = 0.5 * self.trace.value + x
        return super().update(x)


class Joined(Fixed):
    """A state of one batch that all rows reach, in one axis."""

    def start(self):
        self.h = brainstate.HiddenState(jnp.zeros(self.shape[0] * self.shape[1]))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value).ravel()
        return self.h.value


class Flat(Shared):
    """A state of all samples, one after the other in one axis."""

    def init_state(self, batch_size=None):
        super().init_state(batch_size)
        self.flat = brainstate.ShortTermState(jnp.zeros(batch_size * self.units))

    def update(self, x):
        self.flat.value = 0.5 * self.flat.value + self.h.value.ravel()
        return super().update(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Unreached(3, 3, True), r"'trace' is unknown: `init_state` gives it the shape"),
        (lambda: Joined(3, 4, True), r"'h' is unknown: `init_state` gives it the shape \(12,\)"),
        (lambda: Flat(3), r"'flat' is unknown: its shape is \(9,\), and \(18,\) with `batch"),
    ],
)
def test_what_is_ambiguous_is_refused_by_name(model, words):
    xs, flags = data(3, 3)
    learner = compiled(model(), xs)
    grad_of(learner, xs, reset=flags[:, 0])
    for call in (lambda: grad_of(learner, xs, reset=flags), lambda: learner.reset_state(where=ONE)):
        with pytest.raises(braintrace.ShapeError, match=words):
            call()


class PartlyFixed(Shared):
    """One State follows the batch size, and another one has a fixed batch."""

    def init_state(self, batch_size=None):
        super().init_state(batch_size)
        self.fixed = brainstate.HiddenState(jnp.zeros((3, self.units)))

    def update(self, x):
        self.fixed.value = 0.5 * self.fixed.value + braintrace.matmul(x, self.w.value)
        return super().update(x) + self.fixed.value


def test_a_state_of_one_shape_among_others_is_refused():
    xs, flags = data(3, 3)
    learner = compiled(PartlyFixed(4), xs)
    reason = r"'fixed' is unknown: .* the same shape for every batch"
    with pytest.raises(braintrace.ShapeError, match=reason):
        grad_of(learner, xs, reset=flags)
    grad_of(learner, xs, reset=flags[:, 0])


@pytest.mark.parametrize("rule", ["d_rtrl", "immediate"])
def test_the_state_of_a_function_has_samples_in_front(rule):
    def step(params, h, x):
        h = jnp.tanh(0.5 * h + x @ params["w"])
        return h, h

    xs, flags = data(3, 4)
    weights = {"w": np.ones((F, 3), np.float32)}
    state = np.full((3, 3), 0.1, np.float32)
    model = braintrace.from_function(step, weights, state)
    options = {} if rule == "immediate" else {"mark": "auto"}
    learner = compiled(model, xs, rule, **options)
    expected = state
    for x, new in zip(xs, flags, strict=True):
        expected = np.tanh(0.5 * np.where(new[:, None], state, expected) + x @ weights["w"])
    outputs = learner.predict(xs, reset=flags)
    np.testing.assert_allclose(np.asarray(outputs)[-1], expected, rtol=1e-5)


def test_a_batch_of_another_size_is_known_again():
    xs, flags = data(3, 4)
    model = Shared(2)
    learner = compiled(model, data(2, 4)[0])
    with pytest.raises(braintrace.ShapeError, match="not have size 3"):
        learner.reset_state(where=flags[0])
    learner.reset_state(3)
    reference, last = expected(model, xs, flags)
    assert_gradients_close(grad_of(learner, xs, reset=flags), reference, 2e-5)
    check_states(model, last)

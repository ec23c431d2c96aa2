"""`etrace_grad`: its options, what a loss may do, and what of its result has a derivative.

Rules, paths, chunks, masks, resets and windows meet in ``tests/test_gradients.py``.
"""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import saiunit as u
from learners import (
    LEAKY,
    LSTM,
    TARGETS,
    XS,
    assert_same,
    expected_gradient,
    gradient,
    learner_of,
    squared_error,
    step_of,
    weights_of,
)
from oracle import assert_close
from paths import Request, by_own_gradient
from random_models import BATCH, STEPS, UNITS, Marked, named

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
MASK = np.array([1.0, 0.0, 0.5, 2.0, 0.0, 1.0])


# --- options


@pytest.mark.core
@pytest.mark.parametrize("mask", [None, MASK, 0 * MASK], ids=["all", "some", "none"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_weigh_the_steps(reduction, mask):
    found = gradient(learner_of(), reduction=reduction, mask=mask)
    if mask is not None and not mask.any():
        assert not any(map(np.any, found.values()))
        return
    total = STEPS if mask is None else mask.sum()
    scale = 1 / total if reduction == "mean" else 1.0
    expected = jax.tree.map(lambda leaf: scale * leaf, expected_gradient(mask=mask))
    assert_close(found, expected, 1e-9, reduction)


def test_losses_and_auxiliary_results_come_with_it():
    learner, options = learner_of(), {"mask": MASK, "chunk_size": 4}

    def step_fn(x, target):
        output = learner(x)
        return squared_error(output, target), {"output": output}

    expected = gradient(learner, **options)
    learner.reset_state()
    outputs = learner.predict(XS)
    results = {}
    for return_value in (False, True):
        learner.reset_state()
        found, *rest = learner.etrace_grad(
            *(XS, TARGETS),
            step_fn=step_fn,
            reduction="sum",
            has_aux=True,
            return_value=return_value,
            **options,
        )
        assert_close(named(found), expected, 1e-9)
        results[return_value] = rest
    (aux,), (losses, same) = results[False], results[True]
    assert_same(same, aux)
    assert_same(aux["output"], outputs)
    each = np.array([squared_error(y, t) for y, t in zip(outputs, TARGETS, strict=True)])
    assert_same(losses, np.where(MASK == 0, 0, each))


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("return_value", [False, True])
def test_several_results_have_names(return_value, has_aux):
    learner = learner_of()
    pure, asked = learner.functional(), {"has_aux": has_aux}

    def step_fn(x, target):
        loss = squared_error(learner(x), target)
        return (loss, x) if has_aux else loss

    options = {"step_fn": step_fn, "return_value": return_value, **asked}
    call = {"step_fn": step_fn, "update_fn": lambda gradients, *aux: None, **asked}
    extra = ("losses",) * return_value + ("aux",) * has_aux
    of_grad = [learner.etrace_grad, lambda *xs, **o: pure.grad(pure.state(), *xs, **o)[1]]
    of_online = [learner.etrace_online, lambda *xs, **o: pure.online(pure.state(), *xs, **o)[1]]
    for methods, given, names in (
        (of_grad, options, ("gradients", *extra)),
        (of_online, call, ("losses", *("aux",) * has_aux)),
    ):
        for method in methods:
            found = method(XS, TARGETS, **given)
            assert getattr(found, "_fields", names) == names
            assert isinstance(found, tuple) == (len(names) > 1)


def test_a_gradient_that_a_state_of_the_user_would_carry_is_reported():
    """A squared error of differences in time, as in TD(0), with the last value in a State."""
    last = brainstate.State(jnp.zeros((BATCH, 2)))

    def loss_of(learner, is_held):
        def step(x):
            y, before = learner(x), last.value
            last.value = jax.lax.stop_gradient(y) if is_held else y
            return jnp.sum((y - before) ** 2)

        return step

    def found(rule="d_rtrl", is_held=False, window=None, **options):
        last.value = jnp.zeros((BATCH, 2))
        learner = learner_of(LEAKY, rule, **options)
        step = loss_of(learner, is_held)
        return named(learner.etrace_grad(XS, step_fn=step, reduction="sum", window=window))

    with pytest.warns(braintrace.ApproximationWarning, match="step_fn"):
        told = found()
    assert_same(told, found(is_held=True))
    assert_same(found(window=STEPS), found("rtrl"))
    with pytest.raises(braintrace.CompilationError, match="step_fn"):
        found(strict=True)


def change_of_state(learner, name):
    """The loss reads a hidden state before the step, as a penalty on its change does."""

    def step(x, target):
        before = getattr(learner.module, name).value
        output = learner(x)
        now = getattr(learner.module, name).value
        return squared_error(output, target) + jnp.sum((now - before) ** 2 + jnp.sin(before))

    return step


RESET = np.zeros((STEPS, BATCH), bool)
RESET[3, 1] = True


def by_descent(learner, name, **options):
    """The sum of the gradients that a stream gives to its update."""
    total = {path: jnp.zeros_like(state.value) for path, state in learner.param_states.items()}
    total = brainstate.State(total)
    scale = options.get("every", 1)

    def add(gradients):
        total.value = jax.tree.map(lambda old, g: old + scale * g, total.value, gradients)

    step = change_of_state(learner, name)
    learner.etrace_online(XS, TARGETS, step_fn=step, update_fn=add, **options)
    return named(total.value)


@pytest.mark.core
@pytest.mark.parametrize("reset", [None, RESET])
def test_a_loss_reads_a_state_before_the_step(reset):
    """Exact, as `RTRL` is, in chunks, windows, streams and pure functions."""
    expected, learner = learner_of(rule="rtrl"), learner_of(strict=True)
    options = {"reset": reset, "reduction": "sum"}
    wanted = named(
        expected.etrace_grad(XS, TARGETS, step_fn=change_of_state(expected, "h0"), **options)
    )
    step = change_of_state(learner, "h0")
    for cut in ({}, {"chunk_size": 2}, {"window": 3}, {"checkpoint": True}):
        learner.reset_state()
        assert_close(
            named(learner.etrace_grad(XS, TARGETS, step_fn=step, **options, **cut)), wanted, 1e-9
        )
    for every in (1, 3):
        learner.reset_state()
        assert_close(by_descent(learner, "h0", reset=reset, every=every), wanted, 1e-9)
    learner.reset_state()
    pure = learner.functional()
    _, found = jax.jit(lambda s: pure.grad(s, XS, TARGETS, step_fn=step, **options))(pure.state())
    assert_close(named(found), wanted, 1e-9)


@pytest.mark.parametrize("run", [by_descent, None])
def test_a_state_without_a_trace_that_is_read_before_the_step_is_reported(run):
    """No later step of an LSTM reads its output, but for its own products."""
    learner = learner_of(LSTM, strict=True)
    step = change_of_state(learner, "h0")
    with pytest.raises(braintrace.CompilationError, match="before it calls"):
        if run:
            run(learner, "h0")
        else:
            learner.etrace_grad(XS, TARGETS, step_fn=step)


def test_a_loss_of_the_step_before_is_reported():
    """The loss is a State of the user, and nothing else."""
    learner, last = learner_of(), brainstate.State(jnp.zeros(()))

    def step(x):
        loss, last.value = last.value, jnp.sum(learner(x))
        return loss

    with pytest.warns(braintrace.ApproximationWarning, match="step_fn"):
        learner.etrace_grad(XS, step_fn=step)


def test_states_of_the_user_are_written_in_a_step_function():
    learner, count = learner_of(), brainstate.ShortTermState(jnp.zeros(()))

    def step(x, target, number):
        before = count.value
        count.value = number
        return squared_error(learner(x), target) + before, (number, before)

    numbers = jnp.arange(1.0, STEPS + 1)
    found, (same, before) = learner.etrace_grad(
        XS, TARGETS, numbers, step_fn=step, has_aux=True, reduction="sum"
    )
    assert_close(named(found), expected_gradient(), 1e-9)
    assert_same(same, numbers)
    assert_same(before, numbers - 1)
    assert count.value == STEPS


# --- what a loss may do


def noisy(y, target):
    return squared_error(y * brainstate.random.bernoulli(0.5, y.shape), target)


def dropped(y, target):
    with brainstate.environ.context(fit=True):
        return squared_error(brainstate.nn.Dropout(0.5)(y), target)


@jax.custom_vjp
def called_back(y):
    return jnp.sin(y)


def _cosine(y, ct):
    host = jax.ShapeDtypeStruct(y.shape, y.dtype)
    run = jax.pure_callback(lambda y, ct: np.cos(y) * ct, host, y, ct, vmap_method="sequential")
    return (run,)


called_back.defvjp(lambda y: (jnp.sin(y), y), _cosine)


def guarded(y, target):
    """A branch whose derivative is not finite where it is not taken."""
    size = jnp.abs(y).sum()
    return jax.lax.cond(target.sum() > 9, lambda: jnp.log(size - 9), lambda: squared_error(y, 0.0))


def printed(y, target):
    jax.debug.callback(lambda _: None, y.sum())
    return squared_error(y, target)


LOSSES = {
    "noise": noisy,
    "dropout": dropped,
    "a callback in a derivative": lambda y, target: squared_error(called_back(y), target),
    "a branch": guarded,
    "a print": printed,
    "a sort": lambda y, target: jnp.sort(jnp.cumsum(y, axis=-1), axis=-1)[..., 0].sum(),
    "a loop": lambda y, target: jax.lax.scan(lambda c, t: (jnp.sin(c + t), None), y[0], target)[
        0
    ].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_may_do_what_has_a_derivative(name):
    learner = learner_of(LSTM)
    own, reset = learner_of(LSTM, which=1), np.zeros((STEPS, BATCH), bool)

    def step_fn(x, target):
        return LOSSES[name](learner(x), target)

    brainstate.random.seed(5)
    found = gradient(learner, step_fn=step_fn, chunk_size=3)
    brainstate.random.seed(5)
    asked = Request(XS, TARGETS, np.ones(STEPS), reset)
    assert_close(found, by_own_gradient(own, asked, LOSSES[name]), 1e-9, name)


ROOTS = {
    "at once": jnp.sqrt,
    "one by one": lambda value: jax.lax.cond(value > 1e6, jnp.cbrt, jnp.sqrt, value),
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0, 1], [0] * 3 + [1] * 3], ids=str)
def test_a_masked_step_counts_nothing_whatever_its_derivative(mask, root):
    """That of a root is infinite where its factor, a target, is zero."""
    learner, found = learner_of(), []
    mask = np.array(mask, float)

    def step_fn(x, y):
        return ROOTS[root](y.sum() * jnp.sum(learner(x) ** 2)), y

    for padding in (1.0, 0.0):
        targets = np.where(mask[:, None, None] == 0, padding, np.abs(TARGETS))
        learner.reset_state()
        options = {"step_fn": step_fn, "has_aux": True, "return_value": True, "chunk_size": 3}
        gradients, losses, aux = learner.etrace_grad(XS, targets, mask=mask, **options)
        assert_same(aux, targets)
        np.testing.assert_array_equal(losses == 0, mask == 0)
        found.append(named(gradients))
    assert_same(*found)
    assert all(np.isfinite(leaf).all() for leaf in found[0].values())


@pytest.mark.parametrize("window", [None, 2])
def test_a_loss_that_reads_nothing_has_a_gradient_of_zero(window):
    learner = learner_of(window=window)

    def step_fn(x):
        learner(x)
        return jnp.ones(())

    found, losses = learner.etrace_grad(XS, step_fn=step_fn, mask=MASK, return_value=True)
    assert not any(map(np.any, found.values()))
    np.testing.assert_array_equal(losses, MASK != 0)


# --- parameters with units, and of other types


class Conducting(Marked):
    """Voltages come in, conductances learn, and currents come out."""

    def matmul(self, x, w, b):
        return super().matmul(x * u.volt, w, b) / u.mA


def membrane():
    model = random_models.Module(LEAKY, Conducting(), np.float64)
    model.w0.value = model.w0.value * u.mS
    model.b0.value = 1000 * model.b0.value * u.uA
    return model


def test_gradients_have_the_units_of_their_parameters():
    learner = braintrace.compile(membrane(), "d_rtrl", XS[0], batch_size=BATCH)
    found = gradient(learner)
    for name, own in {"w0": u.mS, "b0": u.uA, "d0": u.UNITLESS}.items():
        assert u.get_unit(found[name]).has_same_dim(own), name
    expected = expected_gradient()
    scales = {"w0": 1, "b0": 1000, "d0": 1, "out": 1}
    mantissas = {name: u.get_mantissa(value) * scales[name] for name, value in found.items()}
    assert_close(mantissas, expected, 1e-9)


def test_numbers_and_numpy_arrays_are_parameters():
    with jax.enable_x64(False):
        params = {"w": np.eye(3), "gain": 0.5}

        def step(params, h, x):
            gain = braintrace.element_wise(params["gain"])
            h = 0.5 * h + gain * braintrace.matmul(x, params["w"])
            return h, h

        xs = np.ones((4, 2, 3), np.float32)
        model = braintrace.from_function(step, params, jnp.zeros((2, 3)))
        learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
        found = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")
        assert found["w"].dtype == np.float32
        # h^t = w (1 + 1/2 + ... + 1/2^(t-1)) / 2, summed over samples and steps
        np.testing.assert_allclose(found["w"], 2 * 0.5 * (1 + 1.5 + 1.75 + 1.875), rtol=1e-6)


# --- derivatives of what is returned


def with_weights(pure, weights):
    parameters = {(name,): value for name, value in weights.items()}
    return dataclasses.replace(pure.state(), parameters=parameters)


def squares(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def test_a_gradient_has_no_derivative():
    """What traces hold constant would be missing in silence; a stopped value has one of zero."""
    learner = learner_of()
    pure = learner.functional()

    def penalty(weights, xs, through=lambda value: value):
        state = with_weights(pure, weights)
        return squares(through(pure.grad(state, xs, TARGETS, step_fn=step_of(learner))[1]))

    for argument in (0, 1):
        with pytest.raises(braintrace.OptionError):
            jax.make_jaxpr(jax.grad(penalty, argument))(weights_of(learner), jnp.asarray(XS))
    stopped = jax.jit(jax.grad(lambda w: penalty(w, XS, jax.lax.stop_gradient)))
    assert not any(map(np.any, stopped(weights_of(learner)).values()))


def test_losses_and_auxiliary_results_have_the_derivative_of_backpropagation():
    learner = learner_of(LSTM)
    pure = learner.functional()

    def step_fn(x, target):
        loss = squared_error(learner(x), target)
        return jnp.zeros(()), loss

    def of_aux(weights):
        state = with_weights(pure, weights)
        return pure.grad(state, XS, TARGETS, step_fn=step_fn, has_aux=True)[1][1].sum()

    def of_losses(weights):
        state, options = with_weights(pure, weights), {"return_value": True, "chunk_size": 2}
        return pure.grad(state, XS, TARGETS, step_fn=step_of(learner), **options)[1][1].sum()

    def of_prediction(weights):
        return squared_error(pure.predict(with_weights(pure, weights), XS)[1], TARGETS)

    for function in (of_aux, of_losses, of_prediction):
        found = jax.jit(jax.grad(function))(weights_of(learner))
        assert_close(found, expected_gradient(LSTM, "bptt"), 1e-9, function.__name__)


def test_a_prediction_is_differentiated_twice():
    """That of a window of one step is, too."""
    learner = learner_of(window=1)
    pure = learner.functional()

    def by_step(weights, x):
        return jnp.sum(jnp.tanh(pure.step(with_weights(pure, weights), x)[1]))

    def by_prediction(weights, x):
        return jnp.sum(jnp.tanh(pure.predict(with_weights(pure, weights), x[None])[1]))

    def second(outputs):
        of_input = jax.grad(outputs, 1)
        return jax.jit(jax.grad(lambda weights: squares(of_input(weights, jnp.asarray(XS[0])))))

    found, expected = (second(f)(weights_of(learner)) for f in (by_step, by_prediction))
    assert_close(found, expected, 1e-9)
    assert len(found["d0"]) == UNITS

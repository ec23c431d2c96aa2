"""ES_D_RTRL with operations that are not linear in their input.

The oracle is the recursion as it stands in the books, with the filtered input written out: for an
embedding, counts of looked-up rows as a one-hot array.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from ops_catalogue import restored_registries

import braintrace
from braintrace._graph import specs_of

LENGTH, BATCH, INPUTS, OUTPUTS = 7, 3, 5, 4
ALPHA, DECAY = 0.7, 0.8
RANDOM = np.random.default_rng(2)
WEIGHT = RANDOM.normal(size=(INPUTS, OUTPUTS)) / 2
BIAS = RANDOM.normal(size=OUTPUTS) / 2
NUMBERS = RANDOM.normal(size=(LENGTH, BATCH, INPUTS)) * 2
TOKENS = RANDOM.integers(0, INPUTS, size=(LENGTH, BATCH))


def sine(x, weight):
    return jnp.sin(x) @ weight


def look_up(x, weight):
    return weight[x]


def registered(impl):
    """A user's operation."""
    return braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(
            name="etp_test",
            impl=impl,
            trace_axes={"weight": ("input", "output")},
            batched=True,
        )
    ).bind


@pytest.fixture(autouse=True)
def registrations():
    with restored_registries():
        yield


class Leaky(brainstate.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.weight = brainstate.ParamState(jnp.asarray(WEIGHT, jnp.float32))
        self.bias = brainstate.ParamState(jnp.asarray(BIAS, jnp.float32))

    def init_state(self, batch_size=None, **kwargs):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, OUTPUTS)))

    def update(self, x):
        y = self.operation(x, self.weight.value) + braintrace.element_wise(self.bias.value)
        self.h.value = DECAY * self.h.value + jnp.tanh(y)
        return self.h.value


def loss(h):
    return jnp.sum(h**2)


@functools.cache
def recursion(resets=()):
    """The gradient of each step's loss in float64, and that of a window of one step."""
    h = eps_f = np.zeros((BATCH, OUTPUTS))
    eps_x, seen = np.zeros((BATCH, INPUTS)), np.zeros((BATCH, 1))
    flags = np.zeros((LENGTH, BATCH, 1), bool)
    for step, sample in resets:
        flags[step, sample] = True
    steps, windows = [], []
    for phi, flag in zip(np.eye(INPUTS)[TOKENS], flags, strict=True):
        h, eps_f, eps_x, seen = (np.where(flag, 0, a) for a in (h, eps_f, eps_x, seen))
        y = phi @ np.float32(WEIGHT) + np.float32(BIAS)
        h = DECAY * h + np.tanh(y)
        now, past = 2 * h * (1 - np.tanh(y) ** 2), 2 * h * DECAY * eps_f
        past = past / (1 - ALPHA ** np.maximum(seen, 1))
        weight = phi.T @ now + eps_x.T @ past
        windows.append({"weight": weight, "bias": (now + past).sum(0)})
        seen = seen + 1
        eps_x = ALPHA * eps_x + phi
        eps_f = ALPHA * DECAY * eps_f + (1 - ALPHA) * (1 - np.tanh(y) ** 2)
        factor = 2 * h * eps_f / (1 - ALPHA**seen)
        steps.append({"weight": eps_x.T @ factor, "bias": factor.sum(0)})
    return steps, windows


def summed(gradients):
    return jax.tree.map(lambda *leaves: sum(leaves), *gradients)


def by_name(gradients):
    return {path[-1]: np.asarray(value) for path, value in gradients.items()}


def build(operation, example, algorithm="es_d_rtrl", **options):
    return braintrace.compile(
        Leaky(operation), algorithm, jnp.asarray(example), batch_size=BATCH, **options
    )


def step_of(learner):
    return lambda x: loss(learner(x))


def test_chunks_resets_and_streams_equal_the_recursion():
    xs = jnp.asarray(TOKENS)
    learner = build(braintrace.embedding, TOKENS[0], decay_or_rank=ALPHA)
    expected, _ = recursion()

    def gradient(xs, **options):
        step_fn = step_of(learner)
        return by_name(learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options))

    gradient(xs[:4])
    assert_gradients_close(gradient(xs[4:]), summed(expected[4:]), 1e-5, "a second call")
    resets = ((2, 0), (5, 1))
    flags = np.zeros((LENGTH, BATCH), bool)
    flags[tuple(zip(*resets, strict=True))] = True
    learner.reset_state()
    found = gradient(xs, reset=flags, chunk_size=5)
    assert_gradients_close(found, summed(recursion(resets)[0]), 1e-5, "resets")
    of_chunks = learner.algorithm.traces.value["x"]

    zeros = {"weight": jnp.zeros_like(WEIGHT), "bias": jnp.zeros(OUTPUTS)}
    total = brainstate.ShortTermState(zeros)

    def keep(gradients):
        total.value = {name: kept + gradients[(name,)] for name, kept in total.value.items()}

    learner.reset_state()
    learner.etrace_online(xs, step_fn=step_of(learner), update_fn=keep, reset=flags)
    assert_gradients_close(total.value, summed(recursion(resets)[0]), 1e-5, "stream")
    assert_gradients_close(learner.algorithm.traces.value["x"], of_chunks, 1e-5, "traces")


@pytest.mark.parametrize("window", [None, 1])
def test_the_gradient_of_ones_own_loop_equals_the_recursion(window):
    model = Leaky(braintrace.embedding)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    algorithm = braintrace.ES_D_RTRL(model, ALPHA, window=window)
    algorithm.compile_graph(jnp.asarray(TOKENS[0]))
    weights = model.states(brainstate.ParamState)
    gradient = brainstate.transform.grad(lambda x: loss(algorithm(x)), weights)
    step = brainstate.transform.jit(gradient)
    steps, windows = recursion()
    expected = steps if window is None else windows
    for x, wanted in zip(jnp.asarray(TOKENS), expected, strict=True):
        assert_gradients_close(by_name(step(x)), wanted, 1e-5, window)


BY_PATH = {"rules": {lambda path: True: ("ottt", {"decay": ALPHA})}}


@pytest.mark.parametrize("options", [{}, BY_PATH], ids=["of all weights", "of a weight"])
@pytest.mark.parametrize(("impl", "xs"), [(sine, NUMBERS), (look_up, TOKENS)])
def test_an_operation_that_is_not_linear_in_its_input_is_refused_by_name(impl, xs, options):
    with pytest.raises(braintrace.PrimitiveError, match=r"weight.*test_input_filter.py.*D_RTRL"):
        build(registered(impl), xs[0], **options)


def test_d_rtrl_takes_it():
    """The oracle: an embedding is the product of a one-hot array."""
    xs = jnp.asarray(TOKENS[:3])

    def gradient(operation, xs):
        learner = build(operation, xs[0], "d_rtrl")
        return learner.etrace_grad(xs, step_fn=step_of(learner), reduction="sum")

    found = gradient(registered(look_up), xs)
    expected = gradient(braintrace.matmul, jnp.eye(INPUTS)[xs])
    assert_gradients_close(found, expected, 1e-5, "embedding")


def add(total, column):
    return total + column, total


LINEAR = {
    "a product": lambda x, w: x @ w,
    "scaled by a function of the weight": lambda x, w: (3 * x) @ jnp.tanh(w),
    "a shift by zeros": lambda x, w: (
        jnp.concatenate([x, jnp.zeros_like(x)], 1) @ jnp.tile(w, (2, 1))
    ),
    "a loop": lambda x, w: jax.lax.map(lambda row: row @ w, x),
    "a branch": lambda x, w: jax.lax.cond(w.sum() > 0, lambda x: x, lambda x: -x, x) @ w,
    "rows picked": lambda x, w: jnp.roll(x, 1, axis=1)[:, jnp.arange(INPUTS)] @ w,
    "its own derivative": lambda x, w: jax.jit(jnp.matmul)(x, w),
}
NOT_LINEAR = {
    "a shift": lambda x, w: (x + 1) @ w,
    "saturation": lambda x, w: jnp.clip(x, -1e6, 1e6) @ w,
    "rectification": lambda x, w: jnp.where(x > 0, x, 0) @ w,
    "a square": lambda x, w: (x * x) @ w,
    "rounding": lambda x, w: x.astype(jnp.int32).astype(x.dtype) @ w,
    "a norm": lambda x, w: (x / jnp.linalg.norm(x, axis=1)[:, None]) @ w,
    "a branch on it": lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x) @ w,
    "a loop that adds": lambda x, w: jax.lax.scan(add, jnp.ones(len(x)), x.T)[1].T @ w,
}
STRUCTURES = [*((k, f, True) for k, f in LINEAR.items())]
STRUCTURES += [(k, f, False) for k, f in NOT_LINEAR.items()]


@pytest.mark.parametrize(("name", "impl", "is_linear"), STRUCTURES)
def test_jax_knows_what_is_linear(name, impl, is_linear):
    """No declaration, and no numbers: the first test would not see `clip` at a million."""

    def operation(x, weight):
        return impl(x, weight)

    model = Leaky(registered(operation))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    algorithm = braintrace.ES_D_RTRL(model)
    if is_linear:
        algorithm.compile_graph(jnp.asarray(NUMBERS[0]))
    else:
        with pytest.raises(braintrace.PrimitiveError, match="not linear"):
            algorithm.compile_graph(jnp.asarray(NUMBERS[0]))


@pytest.mark.parametrize("vmap", [False, True], ids=["batch axis", "mapped"])
def test_what_the_axes_of_filters_run_over(vmap):
    shape = (2, 1, 5)

    class Convolution(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = brainstate.ParamState(jnp.ones((2, 1, 3)))

        def init_state(self, batch_size=None, **kwargs):
            lead = () if batch_size is None else (batch_size,)
            self.h = brainstate.HiddenState(jnp.zeros((*lead, 2, 5)))

        def update(self, x):
            y = braintrace.conv(x[None] if vmap else x, self.kernel.value)
            self.h.value = 0.9 * self.h.value + jnp.tanh(y[0] if vmap else y)
            return self.h.value

    options = {"vmap": vmap, "batch_size": 2, "decay_or_rank": 0.9}
    learner = braintrace.compile(Convolution(), "es_d_rtrl", jnp.ones(shape), **options)
    specs = learner.algorithm.compiled.fused.trace_specs
    axes = {spec.operand: spec.axes for spec in specs_of(specs)}
    assert axes["input"] == ("batch", "spatial", "input")
    assert axes["output"] == ("batch", "spatial", "output")

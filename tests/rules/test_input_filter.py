"""ES_D_RTRL with operations that are not linear in their input.

The oracle is the recursion as it stands in the books, with the filtered input written out: for an
embedding, counts of looked-up rows as a one-hot array.
"""

import dataclasses
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


def sine(x, weight, *bias):
    y = jnp.sin(x) @ weight
    return y + bias[0] if bias else y


def look_up(x, weight, *bias):
    y = weight[x]
    return y + bias[0] if bias else y


def pull_back_by(impl):
    def pull_back(x, hidden_dim, weights):
        def forward(weights):
            return impl(x, weights["weight"], weights["bias"])

        return jax.vjp(forward, weights)[1](hidden_dim)[0]

    return pull_back


def spec(name, impl, input_filter, batched):
    """An operation that is not linear in ``x``; with a trace of the weight's shape."""

    def init_drtrl(x_var, y_var, weight_vars, n):
        lead = y_var.aval.shape[:-1]
        return {k: jnp.zeros((*lead, *v.aval.shape, n)) for k, v in weight_vars.items()}

    return braintrace.ETPPrimitiveSpec(
        name=name,
        impl=impl,
        yw_to_w=lambda f, trace: {
            "weight": trace["weight"] * f[..., None, :],
            "bias": trace["bias"] * f,
        },
        xy_to_dw=pull_back_by(impl),
        init_drtrl=init_drtrl,
        init_pp=lambda x, y, w, n: jnp.zeros((*y.aval.shape, n)),
        trainable_invars_fn=lambda params: {"weight": 1, "bias": 2},
        batched=batched,
        input_filter=input_filter,
    )


def bias_too(product):
    """``pull_back`` from that of the weight, for a batch or one sample."""

    def pull_back(trace, hidden_dim, weights):
        trace, hidden_dim = jnp.atleast_2d(trace), jnp.atleast_2d(hidden_dim)
        return {"weight": product(trace, hidden_dim), "bias": hidden_dim.sum(0)}

    return pull_back


def count(trace, x):
    return trace.at[jnp.arange(len(x)), x].add(1) if x.ndim else trace.at[x].add(1)


SINES = braintrace.InputFilter(
    init=lambda x, y: jnp.zeros(x.aval.shape, y.aval.dtype),
    add=lambda trace, x: trace + jnp.sin(x),
    pull_back=bias_too(lambda trace, f: trace.T @ f),
)
COUNTS = braintrace.InputFilter(
    init=lambda x, y: jnp.zeros((*x.aval.shape, INPUTS), y.aval.dtype),
    add=count,
    pull_back=bias_too(lambda trace, f: trace.T @ f),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    impl: object
    input_filter: braintrace.InputFilter
    xs: np.ndarray
    filtered: np.ndarray

    def operation(self, input_filter, batched=True):
        name = f"etp_test_{self.impl.__name__}"
        form = spec(name, self.impl, input_filter, True)
        if batched:
            return braintrace.register_primitive_spec(form).bind
        one = spec(f"{name}_one", self.impl, input_filter, False)
        both = braintrace.register_primitive_spec(form)
        return braintrace.register_primitive_spec(dataclasses.replace(one, batched_form=both)).bind


CASES = [
    Case(sine, SINES, NUMBERS, np.sin(NUMBERS)),
    Case(look_up, COUNTS, TOKENS, np.eye(INPUTS)[TOKENS]),
]
each_case = pytest.mark.parametrize("case", CASES, ids=["sine", "embedding"])


@pytest.fixture(autouse=True)
def registrations():
    with restored_registries():
        yield


class Leaky(brainstate.nn.Module):
    """The operation, and a marked product of another function of the same input."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.weight = brainstate.ParamState(jnp.asarray(WEIGHT, jnp.float32))
        self.bias = brainstate.ParamState(jnp.asarray(BIAS, jnp.float32))

    def init_state(self, batch_size=None, **kwargs):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, OUTPUTS)))

    def update(self, x):
        y = self.operation(x, self.weight.value, self.bias.value)
        self.h.value = DECAY * self.h.value + jnp.tanh(y)
        return self.h.value


def loss(h):
    return jnp.sum(h**2)


@functools.cache
def recursion(case, resets=()):
    """The gradient of every step's loss in float64, and that of a window of one step."""
    h = eps_f = np.zeros((BATCH, OUTPUTS))
    eps_x, seen = np.zeros((BATCH, INPUTS)), np.zeros((BATCH, 1))
    flags = np.zeros((LENGTH, BATCH, 1), bool)
    for step, sample in resets:
        flags[step, sample] = True
    steps, windows = [], []
    for phi, flag in zip(case.filtered, flags, strict=True):
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


def of_the_library(x, weight, bias):
    """It takes in the steps of a chunk at once."""
    return braintrace.embedding(x, weight) + braintrace.element_wise(bias)


def build(case, batched=True, operation=None, **options):
    operation = operation or case.operation(case.input_filter, batched)
    example = jnp.asarray(case.xs[0])
    return braintrace.compile(
        Leaky(operation),
        "es_d_rtrl",
        example,
        batch_size=BATCH,
        vmap=not batched,
        decay_or_rank=ALPHA,
        **options,
    )


def step_of(learner):
    return lambda x: loss(learner(x))


@pytest.mark.parametrize(
    "operation",
    [of_the_library],
)
def test_chunks_resets_and_streams_equal_the_recursion(operation):
    case = CASES[1]
    learner, xs = build(case, operation=operation), jnp.asarray(case.xs)
    expected, _ = recursion(case)

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
    assert_gradients_close(found, summed(recursion(case, resets)[0]), 1e-5, "resets")
    of_chunks = learner.algorithm.traces.value["x"]

    zeros = {"weight": jnp.zeros_like(WEIGHT), "bias": jnp.zeros(OUTPUTS)}
    total = brainstate.ShortTermState(zeros)

    def keep(gradients):
        total.value = {name: kept + gradients[(name,)] for name, kept in total.value.items()}

    learner.reset_state()
    learner.etrace_online(xs, step_fn=step_of(learner), update_fn=keep, reset=flags)
    assert_gradients_close(total.value, summed(recursion(case, resets)[0]), 1e-5, "stream")
    assert_gradients_close(learner.algorithm.traces.value["x"], of_chunks, 1e-5, "traces")


@pytest.mark.parametrize(
    ("case", "window"),
    [(CASES[0], None), (CASES[1], None), (CASES[1], 1)],
    ids=["sine", "embedding", "embedding in windows"],
)
def test_the_gradient_of_ones_own_loop_equals_the_recursion(case, window):
    model = Leaky(case.operation(case.input_filter))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    algorithm = braintrace.ES_D_RTRL(model, ALPHA, window=window)
    algorithm.compile_graph(jnp.asarray(case.xs[0]))
    weights = model.states(brainstate.ParamState)
    gradient = brainstate.transform.grad(lambda x: loss(algorithm(x)), weights)
    step = brainstate.transform.jit(gradient)
    steps, windows = recursion(case)
    expected = steps if window is None else windows
    for x, wanted in zip(jnp.asarray(case.xs), expected, strict=True):
        assert_gradients_close(by_name(step(x)), wanted, 1e-5, window)


BY_PATH = {"rules": {lambda path: True: ("ottt", {"decay": ALPHA})}}


@pytest.mark.parametrize("options", [{}, BY_PATH], ids=["of all weights", "of a weight"])
@each_case
def test_an_operation_without_a_filter_is_refused_by_name(case, options):
    bare = dataclasses.replace(case, input_filter=None)
    with pytest.raises(braintrace.PrimitiveError) as error:
        build(bare, **options)
    for part in ("weight", case.impl.__name__, "input_filter", "test_input_filter.py"):
        assert part in str(error.value)


def test_d_rtrl_takes_it_without_a_filter():
    """The oracle: an embedding is the product of a one-hot array."""
    xs = jnp.asarray(TOKENS[:3])

    def gradient(operation, xs):
        learner = braintrace.compile(Leaky(operation), "d_rtrl", xs[0], batch_size=BATCH)
        return learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), reduction="sum")

    found = gradient(CASES[1].operation(None), xs)
    expected = gradient(braintrace.matmul, jnp.eye(INPUTS)[xs])
    assert_gradients_close(found, expected, 1e-5, "embedding")


@each_case
def test_check_primitive_tells_whether_the_filter_is_right(case, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    wrong = braintrace.InputFilter(
        case.input_filter.init,
        lambda trace, x: 0.5 * case.input_filter.add(trace, x),
        case.input_filter.pull_back,
    )
    for rule, is_right in ((case.input_filter, True), (None, False), (wrong, False)):
        with restored_registries():
            primitive = braintrace.register_primitive_spec(spec("etp_test", case.impl, rule, True))
            report = braintrace.check_primitive(primitive, case.xs[0], WEIGHT, BIAS)
        assert report.ok is is_right, str(report)
        checks = {(check.rule, check.key): check.agrees for check in report.checks}
        assert checks.pop(("filter of x", "weight")) is is_right
        # A rule for integers fails for all operands where the filtered input is a number.
        assert checks.pop(("filter of x", "bias")) or rule is None
        assert all(checks.values()), str(report)
        assert ("needs an `input_filter`" in str(report)) is (rule is None)


WRONG_FILTERS = [
    ({"init": lambda x, y: jnp.zeros(x.aval.shape, int)}, "`input_filter.init` of `etp_test_sine`"),
    ({"init": lambda x, y: jnp.zeros(INPUTS)}, r"`input_filter.init`.*size 3, the batch"),
    ({"add": lambda trace, x: trace[0]}, r"`input_filter.add`.*expected \(3, 5\)"),
    ({"pull_back": lambda trace, f, w: {"weight": trace.T @ f}}, r"the keys \['weight'\]"),
    ({"add": lambda trace, x, scale: trace}, "`input_filter.add` of `etp_test_sine` fails"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_FILTERS)
def test_a_filter_that_does_not_fit_is_explained(changes, message):
    case = dataclasses.replace(CASES[0], input_filter=dataclasses.replace(SINES, **changes))
    with pytest.raises(braintrace.PrimitiveError, match=message):
        build(case)


def test_what_is_no_filter_is_refused():
    with pytest.raises(braintrace.PrimitiveError, match="`add` of an `InputFilter` is 1; expected"):
        braintrace.InputFilter(SINES.init, 1, SINES.pull_back)
    with pytest.raises(braintrace.PrimitiveError, match="must be an `InputFilter`"):
        CASES[0].operation(lambda trace, x: trace)
    primitive = braintrace.register_primitive("etp_test_class", sine, batched=True)
    own = spec("etp_test_class", sine, SINES, True)
    rules = {k: getattr(own, k) for k in ("yw_to_w", "xy_to_dw", "init_drtrl", "init_pp")}
    with pytest.raises(braintrace.PrimitiveError, match="must be an `InputFilter`"):
        primitive.register_etp_rules(**rules, input_filter=1)
    primitive.register_etp_rules(**rules, input_filter=SINES)
    assert braintrace.get_primitive_spec(primitive).input_filter is SINES
    with pytest.raises(braintrace.PrimitiveError, match="`batched_form` `etp_test_sine` has none"):
        form = braintrace.register_primitive_spec(spec("etp_test_sine", sine, None, True))
        one = spec("etp_test_one", sine, SINES, False)
        braintrace.register_primitive_spec(dataclasses.replace(one, batched_form=form))


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

    def with_bias(x, weight, bias):
        return impl(x, weight) + bias

    own = spec("etp_test", with_bias, None, True)
    model = Leaky(braintrace.register_primitive_spec(own).bind)
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

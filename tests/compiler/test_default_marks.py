"""Without an ETP operation on the way to a hidden state, a model is marked by default."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_same_bits

import braintrace

BATCH, INPUTS, UNITS, STEPS = 2, 3, 4, 6
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning"),
]


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2)


def inputs():
    return np.random.default_rng(1).normal(size=(STEPS, BATCH, INPUTS)) / 2


def fixed(shape, **_):
    return np.random.default_rng(6).normal(size=shape).astype(np.float32) / 2


class Network(brainstate.nn.Module):
    """A GRU of brainstate, whose readout is an ETP operation."""

    def __init__(self):
        super().__init__()
        self.cell = brainstate.nn.GRUCell(INPUTS, UNITS, w_init=fixed)
        self.readout = braintrace.nn.Linear(UNITS, 2, w_init=fixed, b_init=None)

    def update(self, x):
        return self.readout(self.cell(x))


class Recurrent(brainstate.nn.Module):
    """A step that is given as a function of parameters, old state and input."""

    def __init__(self, step, batch=BATCH):
        super().__init__()
        self.step, self.batch = step, batch
        self.w = brainstate.ParamState(draw(2, INPUTS, UNITS))
        self.r = brainstate.ParamState(draw(3, UNITS, UNITS))
        self.b = brainstate.ParamState(draw(4, UNITS))
        self.out = brainstate.ParamState(draw(5, UNITS, 2))

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, UNITS)))

    def update(self, x):
        self.h.value = self.step(self, self.h.value, x)
        return self.h.value @ self.out.value


def plain(self, h, x):
    return 0.5 * h + jnp.tanh(x @ self.w.value + h @ self.r.value + self.b.value)


def step_loss(learner, x):
    return ((learner(x) - 0.3) ** 2).sum()


def gradients_of(learner, xs=None, **options):
    xs = inputs() if xs is None else xs
    step_fn = functools.partial(step_loss, learner)
    return learner.etrace_grad(xs, step_fn=step_fn, **options)


def marked_paths(graph):
    return {path for r in graph.hidden_param_op_relations for path in r.parameter_paths}


# --- a model without marks


@pytest.mark.parametrize("rule", ["d_rtrl", "eprop"])
@pytest.mark.core
def test_compile_marks_a_model_without_marks(rule):
    options = {"decay_or_rank": 0.8} if rule == "es_d_rtrl" else {}
    x = inputs()[0]
    learner = braintrace.compile(Recurrent(plain), rule, x, batch_size=BATCH, **options)
    options |= {"mark": "auto"}
    asked = braintrace.compile(Recurrent(plain), rule, x, batch_size=BATCH, **options)
    assert marked_paths(learner.graph) >= {("w",)}
    assert learner.graph.diagnostics == asked.graph.diagnostics
    assert_same_bits(gradients_of(learner), gradients_of(asked))


def test_a_readout_that_is_marked_counts_for_nothing():
    xs = inputs().astype(np.float32)
    learner = braintrace.compile(Network(), "d_rtrl", xs[0], batch_size=BATCH)
    assert marked_paths(learner.graph) == {("cell", "Wrz", "weight"), ("cell", "Wh", "weight")}
    asked = braintrace.compile(Network(), "d_rtrl", xs[0], batch_size=BATCH, mark="auto")
    assert_same_bits(gradients_of(learner, xs), gradients_of(asked, xs))
    assert "cell/Wrz/weight" in str(learner.report())


def test_samples_that_the_compiler_maps():
    xs = inputs()
    mapped = braintrace.compile(Recurrent(plain), "d_rtrl", xs[0], vmap=True)
    batched = braintrace.compile(Recurrent(plain), "d_rtrl", xs[0], batch_size=BATCH)
    assert marked_paths(mapped.graph) == {("w",), ("r",), ("b",)}
    assert_gradients_close(gradients_of(mapped), gradients_of(batched), 1e-12)


def test_a_pure_function_is_marked_by_default():
    def step(params, h, x):
        h = 0.5 * h + jnp.tanh(x @ params["w"] + params["b"])
        return h, h

    params = {"w": draw(2, INPUTS, UNITS), "b": draw(4, UNITS)}
    start = jnp.zeros((BATCH, UNITS))
    model = braintrace.from_function(step, params, start)
    learner = braintrace.compile(model, "d_rtrl", inputs()[0], batch_size=BATCH)

    def by_scan(params):
        outputs = jax.lax.scan(functools.partial(step, params), start, inputs())[1]
        return ((outputs - 0.3) ** 2).sum()

    found = gradients_of(learner, reduction="sum")
    assert_gradients_close(found, jax.jit(jax.grad(by_scan))(params), 1e-12)


# --- rules that need no marks


@pytest.mark.parametrize("rule", ["rtrl", "immediate"])
def test_rules_that_follow_every_parameter_or_none_need_no_marks(rule):
    x = inputs()[0]

    def learner(**options):
        return braintrace.compile(Recurrent(plain), rule, x, batch_size=BATCH, **options)

    default, explicit = learner(), learner(mark="explicit")
    assert not default.graph.traced.has_found_marks
    found = gradients_of(default)
    assert_same_bits(found, gradients_of(explicit))
    if rule in ("rtrl", "immediate"):
        assert_gradients_close(found, gradients_of(learner(mark="auto")), 1e-12)


# --- a model with marks


def in_a_branch(self, h, x):
    drive = jax.lax.cond(
        x.sum() > 0, lambda: braintrace.matmul(x, self.w.value), lambda: x @ self.w.value
    )
    return 0.5 * h + drive + self.b.value


def in_a_loop(self, h, x):
    def inner(drive, _):
        return 0.5 * drive + braintrace.matmul(x, self.w.value), None

    return 0.5 * h + jax.lax.scan(inner, jnp.zeros_like(h), None, 2)[0] + self.b.value


OWN = {"a branch": in_a_branch, "a loop": in_a_loop}


@pytest.mark.parametrize("name", OWN)
def test_marks_of_the_model_are_all_that_there_are(name):
    x = inputs()[0]

    def learner(**options):
        return braintrace.compile(Recurrent(OWN[name]), "d_rtrl", x, batch_size=BATCH, **options)

    default = learner()
    assert marked_paths(default.graph) == {("w",)}
    assert marked_paths(learner(mark="auto").graph) == {("w",), ("b",)}
    (found,) = [d for d in default.graph.diagnostics if d.kind == "not-marked"]
    assert found.level == "info"
    assert found.paths == ("b", "h")
    assert_same_bits(gradients_of(default), gradients_of(learner(mark="explicit")))


def test_an_operation_by_a_constant_is_no_mark():
    def step(self, h, x):
        return 0.5 * h + braintrace.matmul(x, jnp.ones((INPUTS, UNITS))) * self.b.value

    learner = braintrace.compile(Recurrent(step), "d_rtrl", inputs()[0], batch_size=BATCH)
    assert marked_paths(learner.graph) == {("b",)}


def decayed(self, h, x):
    return jax.nn.sigmoid(self.b.value) * h + braintrace.matmul(x, self.w.value)


def multiplied(self, h, x):
    return jnp.tanh(h @ self.r.value + braintrace.matmul(x, self.w.value))


RECURRENT = {"b": (decayed, "element_wise"), "r": (multiplied, "matmul")}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_weight_without_a_mark_is_a_warning(name):
    step, operation = RECURRENT[name]
    arguments = (Recurrent(step), "d_rtrl", inputs()[0])
    words = rf"Weight '{name}' reaches 'h'.*`braintrace.{operation}`.*mark='auto'"
    with pytest.warns(braintrace.ApproximationWarning, match=words):
        learner = braintrace.compile(*arguments, batch_size=BATCH)
    (found,) = [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    assert found.level == "warning"
    assert "test_default_marks.py" in found.source
    with pytest.raises(braintrace.CompilationError, match=words):
        braintrace.compile(*arguments, batch_size=BATCH, strict=True)

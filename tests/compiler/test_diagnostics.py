"""The five kinds of diagnostics: each with its level, its paths and the line of the model."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import repository
from jax.experimental import io_callback
from random_models import BATCH, INPUTS, UNITS
from toys import XS, Toy, bptt, clipped, compiled, deviation, findings, gradient, line_of, warned

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
ROWS = []


def report(kind, level, *paths, line=None, weights="w out", states="h", **options):
    """Add a row: what the decorated step is told, and a piece of the line that is named."""

    def decorate(step):
        row = Toy(step, weights, states), (level, kind, paths), line, options
        ROWS.append(pytest.param(*row, id=step.__name__))
        return step

    return decorate


def with_output(new):
    return new, jnp.sin(new["h"]).sum(-1, keepdims=True)


def leak(ops, p, h, x, name="w"):
    return 0.5 * h["h"] + ops.matmul(x, p[name])


# --- truncated ------------------------------------------------------------------------------------


@report("truncated", "info", "h", "h", line='p["r"]', weights="w r")
def recurrent_operation(ops, p, h, x):
    drive = ops.matmul(x, p["w"])
    recurrent = ops.matmul(h["h"], p["r"])
    return with_output({"h": 0.5 * h["h"] + jnp.tanh(drive + recurrent)})


@report("truncated", "info", "h", "k", weights="w r", states="h k")
def memory_of_an_upper_layer(ops, p, h, x):
    lower = leak(ops, p, h, x)
    upper = 0.5 * jnp.tanh(h["k"]) + ops.matmul(lower, p["r"])
    return {"h": lower, "k": upper}, upper


@report("truncated", "info", "b", "o", line='p["b"]', weights="w b out", states="h o")
def parameter_in_what_a_readout_filters(ops, p, h, x):
    lower = leak(ops, p, h, x)
    bent = jnp.tanh(lower - p["b"])
    upper = 0.8 * h["o"] + bent @ p["out"]
    return {"h": lower, "o": upper}, upper


@report("truncated", "warning", "w", "h", line='p["w"]', weights="w r out", states="h k o")
def below_two_late_connections(ops, p, h, x):
    lower = 0.5 * h["h"] + ops.matmul(x, p["w"])
    middle = 0.5 * h["k"] + ops.matmul(h["h"], p["r"])
    upper = 0.5 * h["o"] + ops.matmul(h["k"], p["out"])
    return {"h": lower, "k": middle, "o": upper}, upper


@report("truncated", "warning", "h", "h", line="roll")
def ordinary_move(ops, p, h, x):
    moved = jnp.roll(h["h"], 1, -1)
    return with_output({"h": 0.5 * moved + ops.matmul(x, p["w"])})


@report("truncated", "warning", "h", "h", line="@", weights="w r")
def ordinary_recurrent_product(ops, p, h, x):
    recurrent = h["h"] @ p["r"]
    return with_output({"h": jnp.tanh(ops.matmul(x, p["w"]) + recurrent)})


@report("truncated", "warning", "w", "h", line="mean")
def coupling_behind_a_weight(ops, p, h, x):
    y = ops.matmul(x, p["w"])
    return with_output({"h": 0.5 * h["h"] + y - y.mean(-1, keepdims=True)})


@report("truncated", "warning", "d", "h", line="norm", weights="w d")
def normalised_gain(ops, p, h, x):
    gain = ops.element_wise(p["d"], jnp.tanh)
    share = gain / jnp.linalg.norm(gain)
    return with_output({"h": share * h["h"] + gain * ops.matmul(x, p["w"])})


@report("truncated", "warning", "w", "h", line="pure_callback")
def behind_a_callback(ops, p, h, x):
    y = ops.matmul(x, p["w"])
    rounded = jax.pure_callback(np.round, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    return with_output({"h": 0.5 * h["h"] + y + jax.lax.stop_gradient(y) * rounded})


@report("truncated", "warning", "h", "o", line="@", weights="w out", states="h o")
def nonlinear_readout(ops, p, h, x):
    lower = leak(ops, p, h, x)
    upper = 0.9 * jnp.tanh(h["o"]) + lower @ p["out"]
    return {"h": lower, "o": upper}, upper


@report("truncated", "warning", "h", "h", line="roll")
def coupling_in_small_steps(ops, p, h, x):
    drive = jnp.tanh(ops.matmul(x, p["w"]))

    def small_step(v, _):
        return 0.8 * v + drive + 0.1 * jnp.roll(v, 1, -1), None

    return with_output({"h": jax.lax.scan(small_step, h["h"], None, length=3)[0]})


# --- no-trace -------------------------------------------------------------------------------------


@report("no-trace", "info", "out", line="matmul(new")
def readout(ops, p, h, x):
    new = leak(ops, p, h, x)
    return {"h": new}, ops.matmul(new, p["out"])


@report("no-trace", "warning", "r", "h", line="inner, p", weights="w r s")
def nested_weights(ops, p, h, x):
    inner = jnp.tanh(ops.matmul(h["h"], p["r"]))
    return with_output({"h": leak(ops, p, h, x) + ops.matmul(inner, p["s"])})


@report("no-trace", "warning", "v", line="noisy", weights="w v")
def operand_of_data(ops, p, h, x):
    noisy = ops.matmul(x, p["v"] * x[0, 0])
    return with_output({"h": leak(ops, p, h, x) + noisy})


@report("no-trace", "warning", "v", "h", line="@", weights="w v")
def untagged_as_well(ops, p, h, x):
    again = x @ p["v"]
    return with_output({"h": leak(ops, p, h, x) + jnp.tanh(ops.matmul(x, p["v"]) + again)})


@jax.custom_jvp
def softened_product(x, w):
    return jnp.tanh(braintrace.matmul(x, w))


@softened_product.defjvp
def softened_product_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return softened_product(x, w), x @ dw + dx @ w


@report("no-trace", "warning", weights="w v")
def inside_a_function_with_its_own_rule(ops, p, h, x):
    return with_output({"h": leak(ops, p, h, x) + softened_product(x, p["v"])})


# --- not-marked -----------------------------------------------------------------------------------


@report("not-marked", "info", "b", "h", line='p["b"]', weights="w b")
def bias(ops, p, h, x):
    return with_output({"h": leak(ops, p, h, x) + p["b"]})


@report("not-marked", "warning", "d", "h", line='p["d"]', weights="w d")
def decay(ops, p, h, x):
    kept = jax.nn.sigmoid(p["d"]) * h["h"]
    return with_output({"h": kept + ops.matmul(x, p["w"])})


@report("not-marked", "warning", "r", "h", line='p["r"]', weights="w r")
def recurrent_weight(ops, p, h, x):
    recurrent = h["h"] @ p["r"]
    return with_output({"h": jnp.tanh(recurrent + ops.matmul(x, p["w"]))})


# --- nonlinear-gradient ---------------------------------------------------------------------------


@report("nonlinear-gradient", "warning", "h", "h", line="clipped")
def clipped_memory(ops, p, h, x):
    return with_output({"h": 0.5 * clipped(h["h"]) + ops.matmul(x, p["w"])})


@report("nonlinear-gradient", "warning", "w", line="clipped")
def clipped_weight(ops, p, h, x):
    return with_output({"h": 0.5 * h["h"] + ops.matmul(x, clipped(p["w"]))})


# --- what all of them have ------------------------------------------------------------------------


@pytest.mark.parametrize(("toy", "expected", "line", "options"), ROWS)
def test_a_step_is_reported(toy, expected, line, options):
    learner = compiled(toy, mark="explicit", **options)
    assert expected in findings(learner)
    if line:
        named = [d.source for d in learner.graph.diagnostics if (d.level, d.kind) == expected[:2]]
        assert any(line_of(toy.step, line) in source for source in named)
    if warned(learner):
        with pytest.raises(braintrace.CompilationError):
            compiled(toy, mark="explicit", strict=True, **options)
    else:
        compiled(toy, mark="explicit", strict=True, **options)


BETWEEN_STATES = [
    row for row in ROWS if row.values[1][1] == "truncated" and {*row.values[1][2]} <= {*"hko"}
]


@pytest.mark.parametrize(("toy", "expected", "line", "options"), BETWEEN_STATES)
def test_rtrl_truncates_no_path_between_states(toy, expected, line, options):
    learner = compiled(toy, "rtrl", **options)
    assert not [d for d in learner.graph.diagnostics if d.kind == "truncated"]


def test_a_warning_is_given_once_with_the_line():
    toy = Toy(ordinary_move)
    place = line_of(ordinary_move, "roll")
    with pytest.warns(braintrace.ApproximationWarning, match=re.escape(place)) as caught:
        model = compiled(toy).module
        braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
    assert len(caught) == 1


@pytest.mark.parametrize("step", [ordinary_move, coupling_behind_a_weight, nested_weights])
def test_what_is_reported_is_left_out(step):
    toy = Toy(step, "w r s" if step is nested_weights else "w")
    name = "r" if step is nested_weights else "w"
    assert deviation(gradient(compiled(toy)), bptt(toy), name) > 0.01


def test_a_weight_that_is_marked_and_held_elsewhere_is_not_reported():
    def held(ops, p, h, x):
        copy = jax.lax.stop_gradient(p["w"])
        return with_output({"h": leak(ops, p, h, x) + jnp.tanh(x @ copy)})

    assert not findings(compiled(Toy(held, "w")))


def to_an_output(ops, p, h, x):
    new = leak(ops, p, h, x)
    return {"h": new, "k": clipped(new @ p["r"])}, clipped(new)


def behind_a_parameter(ops, p, h, x):
    new = leak(ops, p, h, x)
    return {"h": new, "k": h["k"]}, new @ clipped(p["r"])


@pytest.mark.parametrize("step", [to_an_output, behind_a_parameter])
def test_a_nonlinear_rule_outside_of_memories_is_exact(step):
    """It bends the gradient of each step, and not their sum."""
    toy = Toy(step, "w r", "h k")
    learner = compiled(toy, strict=True)
    oracle.assert_close(gradient(learner), bptt(toy), 1e-10)


def test_the_page_explains_every_kind():
    page = (repository.DOCS / "compiler.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)
    kinds = {row.values[1][1] for row in ROWS} | {"untraced-state"}
    assert {*headings} == kinds


# --- other States ---------------------------------------------------------------------------------


class Averaging(brainstate.nn.Module):
    """A running mean that is no hidden state, and a parameter that nothing uses."""

    def __init__(self, keep=lambda h, drive: h):
        super().__init__()
        self.keep = keep
        self.w = brainstate.ParamState(jnp.ones((INPUTS, UNITS)) / 2)
        self.unused = brainstate.ParamState(jnp.ones(UNITS))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
        self.mean = brainstate.ShortTermState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.5 * self.h.value + drive + 0.1 * jnp.tanh(self.mean.value)
        self.mean.value = 0.9 * self.mean.value + self.keep(self.h.value, drive)
        return self.h.value


def compile_module(model, rule="d_rtrl", **options):
    return braintrace.compile(model, rule, XS[0], batch_size=BATCH, **options)


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("keep", [lambda h, drive: h, lambda h, drive: drive], ids=["h", "drive"])
def test_any_state_of_the_units_has_a_trace(keep, rule):
    learner = compile_module(Averaging(keep), rule, strict=True)
    assert ("info", "no-trace", ("unused",)) in findings(learner)

    def total(params):
        h, mean, value = (jnp.zeros((BATCH, UNITS)), jnp.zeros((BATCH, UNITS)), 0.0)
        for x in XS:
            drive = x @ params["w"]
            h = 0.5 * h + drive + 0.1 * jnp.tanh(mean)
            mean = 0.9 * mean + keep(h, drive)
            value += jnp.sum((h - 0.3) ** 2)
        return value

    weights = {"w": jnp.ones((INPUTS, UNITS)) / 2}
    found = {"w": gradient(learner)["w"]}
    oracle.assert_close(found, jax.grad(total)(weights), 1e-10)


def over_units(h, drive):
    return h.mean(-1, keepdims=True)


def test_a_state_without_a_trace_is_reported():
    with pytest.warns(braintrace.ApproximationWarning, match="'mean'"):
        learner = compile_module(Averaging(over_units))
    (found,) = warned(learner)
    assert (found.kind, found.paths[0]) == ("untraced-state", "mean")
    with pytest.raises(braintrace.CompilationError, match="'mean'"):
        compile_module(Averaging(over_units), strict=True)


def test_a_state_that_is_written_without_a_gradient_is_not():
    learner = compile_module(Averaging(lambda h, drive: jax.lax.stop_gradient(h)), strict=True)
    assert findings(learner) == {("info", "no-trace", ("unused",))}


# --- refused --------------------------------------------------------------------------------------


class Filled(Averaging):
    """A step that a test fills in."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def update(self, x):
        self.step(self, x)
        return self.h.value


def leaky(cell, x):
    cell.h.value = 0.9 * cell.h.value + jnp.tanh(braintrace.matmul(x, cell.w.value))


def write_in_a_scan_of_jax(cell, x):
    jax.lax.scan(lambda carry, _: (carry, leaky(cell, x)), 0, None, length=2)


def write_in_a_branch_of_jax(cell, x):
    jax.lax.cond(x.sum() > 0, lambda: leaky(cell, x), lambda: None)


def loop_of_unknown_length(cell, x):
    drive = braintrace.matmul(x, cell.w.value)
    start = (0, cell.h.value)
    advance = lambda c: (c[0] + 1, c[1] + 0.1 * drive)  # noqa: E731
    cell.h.value = jax.lax.while_loop(lambda c: c[0] < 4, advance, start)[1]


def answer_of_a_callback(cell, x):
    answer = io_callback(lambda: np.float64(0.5), jax.ShapeDtypeStruct((), float))
    cell.h.value = answer * cell.h.value + braintrace.matmul(x, cell.w.value)


def long_loop_with_a_weight(cell, x):
    brainstate.transform.for_loop(lambda _: leaky(cell, x), jnp.arange(40))


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (write_in_a_scan_of_jax, "brainstate"),
        (write_in_a_branch_of_jax, "brainstate"),
        (loop_of_unknown_length, "while"),
        (answer_of_a_callback, "io_callback"),
        (long_loop_with_a_weight, "inner steps"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_step_that_cannot_be_followed_is_refused(step, word):
    with pytest.raises(braintrace.CompilationError, match=word):
        compile_module(Filled(step), mark="explicit")

"""What a trace cannot carry is reported with its states, its operation and the user's line."""

import inspect

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import of_squares
from drivers import quietly_compiled
from marks import spike_reverse_only
from matrices import normal

import braintrace

BATCH, INPUTS, H = 2, 3, 4
XS = normal(0, 5, BATCH, INPUTS)


class Cell(brainstate.nn.Module):
    """Weights and states for a step that a test fills in."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.w = brainstate.ParamState(normal(1, INPUTS, H) / 2)
        self.gain = brainstate.ParamState(normal(2, H) / 2)
        self.plain = brainstate.ParamState(normal(3, H, H) / 2)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.full((batch_size, H), 0.1))
        self.total = brainstate.HiddenState(jnp.full((batch_size,), 0.2))
        self.o = brainstate.HiddenState(jnp.full((batch_size, 2), 0.2))
        self.count = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        self.step(self, x)
        return self.h.value + self.o.value.sum(-1, keepdims=True)

    def drive(self, x):
        return braintrace.matmul(x, self.w.value)


def compiled(step, model=Cell, **options):
    return quietly_compiled(model(step), "d_rtrl", XS[0], batch_size=BATCH, **options)


def line_of(step, fragment):
    lines, first = inspect.getsourcelines(step)
    return next(first + i for i, line in enumerate(lines) if fragment in line)


# --- reported -----------------------------------------------------------------------------


def plain_readout(cell, x):
    cell.h.value = 0.8 * cell.h.value + cell.drive(x)
    cell.o.value = 0.9 * jnp.tanh(cell.o.value) + cell.h.value @ cell.plain.value[:, :2]


def hidden_in_a_callback(cell, x):
    y = cell.drive(x)
    result = jax.ShapeDtypeStruct(y.shape, y.dtype)
    cell.h.value = y + jax.pure_callback(lambda v: np.round(np.asarray(v)), result, y)


def normalised_gain(cell, x):
    gain = braintrace.element_wise(cell.gain.value)
    relative = gain / jnp.linalg.norm(gain)
    cell.h.value = relative * cell.h.value + gain * cell.drive(x)


def gain_through_a_reverse_rule(cell, x):
    gain = braintrace.element_wise(cell.gain.value)
    cell.h.value = spike_reverse_only(gain) * cell.h.value + gain * cell.drive(x)


def read_at_an_unknown_place(cell, x):
    read = jax.lax.dynamic_slice_in_dim(cell.drive(x), cell.count.value % H, 1, axis=1)
    cell.h.value = 0.5 * cell.h.value + cell.drive(x) + read


@jax.custom_vjp
def clipped_backward(value):
    return value


clipped_backward.defvjp(
    lambda value: (value, None), lambda _, cotangent: (jnp.clip(cotangent, -0.1, 0.1),)
)


def clipped_on_the_way(cell, x):
    cell.h.value = 0.8 * clipped_backward(cell.h.value) + cell.drive(x)


def marked_and_plain(cell, x):
    again = x @ cell.w.value
    cell.h.value = 0.8 * cell.h.value + jnp.tanh(cell.drive(x) + again)


@pytest.mark.parametrize(
    ("step", "kind", "names", "fragment"),
    [
        (clipped_on_the_way, "nonlinear-gradient", ("h", "h"), "clipped_backward"),
        (marked_and_plain, "no-trace", ("w", "h"), "@ cell"),
        (plain_readout, "truncated", ("h", "o"), "@ cell"),
        (hidden_in_a_callback, "truncated", ("w", "h"), "jax.pure_callback"),
        (normalised_gain, "truncated", ("gain", "h"), "linalg"),
        (gain_through_a_reverse_rule, "truncated", ("gain", "h"), "element_wise"),
        (read_at_an_unknown_place, "truncated", ("w", "h"), "read ="),
    ],
)
def test_reported_with_names_and_line_and_refused_by_strict(step, kind, names, fragment):
    place = f"test_reported_paths.py:{line_of(step, fragment)}:"
    found = [
        (d.kind, d.paths)
        for d in compiled(step).graph.diagnostics
        if d.level == "warning" and place in d.source
    ]
    assert (kind, names) in found
    with pytest.raises(braintrace.CompilationError, match=place):
        compiled(step, strict=True)


def test_a_complex_hidden_state_is_refused():
    def rotate(cell, x):
        cell.h.value = cell.h.value * jnp.exp(0.5j).astype(jnp.complex64) + cell.drive(x)

    class Complex(Cell):
        def init_state(self, batch_size=None, **_):
            super().init_state(batch_size)
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, H), jnp.complex64))

    with pytest.raises(braintrace.CompilationError, match=r"'h'.*complex64.*two hidden states"):
        braintrace.compile(Complex(rotate), "d_rtrl", XS[0], batch_size=BATCH)


# --- loops in which elements are coupled ---------------------------------------------------------


def coupled_in_small_steps(cell, x):
    drive = cell.drive(x)

    def small_step(v, _):
        return 0.8 * v + 0.1 * jnp.tanh(drive) + 0.1 * jnp.roll(v, 1, -1), None

    cell.h.value, _ = jax.lax.scan(small_step, cell.h.value, None, length=3)
    cell.o.value = braintrace.matmul(x, cell.w.value[:, :2])


def in_small_steps(from_neighbours):
    """A state that changes by itself and by its neighbours."""

    def step(cell, x):
        drive = cell.drive(x)

        def small_step(v, _):
            return 0.8 * v + 0.1 * jnp.tanh(drive) + 0.1 * from_neighbours(v), None

        cell.h.value, _ = jax.lax.scan(small_step, cell.h.value, None, length=3)

    return step


ONE_ON = np.roll(np.arange(H), 1)
looked_up = in_small_steps(lambda v: v[:, ONE_ON])
written = in_small_steps(lambda v: jnp.zeros_like(v).at[:, ONE_ON].set(v))


def coupled_all_to_all(cell, x):
    def small_step(v, _):
        return jnp.tanh(v @ cell.plain.value), None

    mixed, _ = jax.lax.scan(small_step, cell.h.value, None, length=3)
    cell.h.value = 0.5 * mixed + cell.drive(x)


@pytest.mark.parametrize(
    ("step", "limit", "primitives", "carried"),
    [
        (coupled_in_small_steps, 3, {"slice"}, True),
        (looked_up, 3, {"gather"}, True),
        (written, 3, {"scatter"}, True),
        (coupled_in_small_steps, 2, {"scan"}, False),
        (coupled_all_to_all, 3, {"scan"}, False),
    ],
)
def test_only_the_coupling_in_a_short_loop_is_cut(step, limit, primitives, carried):
    graph = compiled(step, unroll_limit=limit).graph
    group = graph.hidden_groups[0]
    assert (group.transition == ((0, 0),)) == carried
    cuts = {graph.traced.program.equations[cut.equation] for cut in group.cuts[0]}
    assert {equation.primitive.name for equation in cuts} == primitives
    found = [d.paths for d in graph.diagnostics if d.kind == "truncated"]
    assert found and all(paths[0] == paths[-1] == "h" for paths in found)


def rolled(cell, x):
    """The neighbour's old value and an input meet within one function."""
    neighbours = jnp.roll(cell.h.value, 1, -1) * cell.gain.value
    cell.h.value = 0.9 * cell.h.value + jnp.tanh(neighbours + cell.drive(x))


def rolled_and_held(cell, x):
    """The same with its truncation written out."""
    neighbours = jax.lax.stop_gradient(jnp.roll(cell.h.value, 1, -1)) * cell.gain.value
    cell.h.value = 0.9 * cell.h.value + jnp.tanh(neighbours + cell.drive(x))


def test_only_the_move_of_an_old_state_is_cut():
    """An input that joins the moved values is carried as if nothing else were there."""
    learner = compiled(rolled)
    found = learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum")
    expected = of_squares(Cell(rolled_and_held), XS, batch_size=BATCH)
    assert_gradients_close({"w": found[("w",)]}, {"w": expected[("w",)]}, 1e-5)
    (group,) = (g for g in learner.graph.hidden_groups if g.states[0].name == "h")
    equations = learner.graph.traced.program.equations
    assert {equations[cut.equation].primitive.name for cut in group.cuts[0]} == {"slice"}


def test_an_old_state_that_only_moves_is_not_carried():
    def ring(cell, x):
        neighbours = cell.h.value[:, ONE_ON] * cell.gain.value
        cell.h.value = jnp.tanh(neighbours + cell.drive(x))

    (group,) = (g for g in compiled(ring).graph.hidden_groups if g.states[0].name == "h")
    assert group.transition == ()


# --- delay lines ----------------------------------------------------------------------------


class Line(Cell):
    """The state ``h`` as a delay line, which ``o`` reads; no output does."""

    def update(self, x):
        super().update(x)
        return self.o.value


def advanced_filters(cell, value):
    cell.h.value = jnp.concatenate([value[:, :1], cell.h.value[:, :-1]], -1)


def through_weights(cell, x, line):
    recurrent = braintrace.matmul(line, cell.plain.value[:, :2])
    cell.o.value = 0.9 * cell.o.value + jnp.tanh(cell.drive(x)[:, :2] + recurrent)


def line_for_a_marked_operation(cell, x):
    through_weights(cell, x, cell.h.value)
    advanced_filters(cell, cell.o.value)


def line_read_after_it_has_moved(cell, x):
    advanced_filters(cell, cell.o.value)
    through_weights(cell, x, cell.h.value)


def line_read_as_it_is(cell, x):
    late = cell.h.value[:, -1:]
    line_for_a_marked_operation(cell, x)
    cell.o.value = cell.o.value - late


def line_of_marked_outputs(cell, x):
    through_weights(cell, x, cell.h.value)
    advanced_filters(cell, cell.drive(x))


def line_that_fades(cell, x):
    line_for_a_marked_operation(cell, x)
    cell.h.value = 0.5 * cell.h.value


@pytest.mark.parametrize(
    ("model", "step", "options", "is_reported"),
    [
        (Line, line_for_a_marked_operation, {}, False),
        (Line, line_for_a_marked_operation, {"window": 2}, True),
        (Cell, line_for_a_marked_operation, {}, True),
        (Line, line_read_after_it_has_moved, {}, True),
        (Line, line_read_as_it_is, {}, True),
        (Line, line_of_marked_outputs, {}, True),
        (Line, line_that_fades, {}, True),
    ],
)
def test_a_delay_line_that_only_a_marked_operation_reads(model, step, options, is_reported):
    graph = compiled(step, model, **options).graph
    costs = [d for d in graph.diagnostics if d.level == "warning"]
    assert all(d.kind == "truncated" and "h" in d.paths for d in costs)
    assert bool(costs) == is_reported


# --- not reported, and right ----------------------------------------------------------------


def reset_at_an_unknown_place(cell, x):
    held = cell.h.value.at[:, cell.count.value % H].set(0.0)
    cell.count.value = cell.count.value + 1
    cell.h.value = 0.8 * held + cell.drive(x)


def complex_weight(cell, x):
    rotated = braintrace.matmul(x.astype(jnp.complex64), cell.w.value * jnp.exp(0.7j))
    cell.h.value = 0.8 * cell.h.value + rotated.real * rotated.imag


def marked_and_plain_without_memory(cell, x):
    marked = braintrace.matmul(x, jnp.tanh(cell.w.value))
    cell.h.value = 0.8 * cell.h.value + marked
    cell.o.value = jnp.tanh(x @ cell.w.value[:, :2])


def marked_and_held(cell, x):
    held = jax.lax.stop_gradient(cell.w.value)
    cell.h.value = 0.8 * cell.h.value + jnp.tanh(cell.drive(x) + x @ held)


@pytest.mark.parametrize(
    ("step", "tolerance"),
    [
        (marked_and_held, 2e-05),
        (marked_and_plain_without_memory, 2e-05),
    ],
)
def test_no_report_and_the_gradient_of_backpropagation(step, tolerance):
    learner = compiled(step)
    assert not [d for d in learner.graph.diagnostics if d.level == "warning"]
    found = learner.etrace_grad(
        XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum", chunk_size=2
    )
    expected = of_squares(Cell(step), XS, batch_size=BATCH)
    assert_gradients_close({"w": found[("w",)]}, {"w": expected[("w",)]}, tolerance)

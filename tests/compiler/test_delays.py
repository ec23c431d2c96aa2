"""Delays in every form that users write, each equal to its oracle.

A model says its new states (`advance`), and which of them its output reads. The oracle is
backpropagation through time, with the paths held constant that couple units.
"""

import dataclasses
import functools
from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from learners import quietly_compiled, squared_error
from paths import PATHS
from random_models import BATCH, INPUTS, UNITS, Marked, Module, named, spike
from toys import WEIGHTS, Toy, request_of, warned

import braintrace
from braintrace._jax import every_equation

pytestmark = pytest.mark.usefixtures("float64", "unit_steps")
SLOTS, STEPS = 3, 8
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS))
MASK = np.arange(STEPS) % 3 > 0
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2], RESET[5, 1] = True, True
H = (..., UNITS)  # the axis of samples is wherever the dots are
FRONT, BEHIND, LAST = (SLOTS, ..., UNITS), (..., SLOTS, UNITS), (..., UNITS, SLOTS)
INDEX = ()


@pytest.fixture
def unit_steps():
    with brainstate.environ.context(dt=1.0):
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """advance: ops, p, h, x, hold -> new states. read: old and new states -> what is read out."""

    advance: Callable
    weights: str | dict
    states: dict
    read: Callable

    def params(self, dtype=np.float64):
        return Toy(None, self.weights).params(dtype)

    def start(self, *batch, dtype=np.float64):
        def zeros(shape):
            at = shape.index(...) if ... in shape else None
            return jnp.zeros(
                shape if at is None else (*shape[:at], *batch, *shape[at + 1 :]), dtype
            )

        return {name: zeros(shape) for name, shape in self.states.items()}

    def step(self, ops, p, h, x):
        return self.by_layer(ops, p, h, x, "full")

    def by_layer(self, ops, p, h, x, mixing, seen=lambda name, value: value):
        hold = oracle.stop if mixing == "cut" else lambda value: value
        new = self.advance(ops, p, h, x, hold)
        return new, self.read(h, {k: seen(k, v) for k, v in new.items()}) @ p["out"]


class Model(Module):
    """A `Line` as a module: its buffers are States of brainstate that need not be hidden."""

    def init_state(self, batch_size=None, **_):
        start = self.random_model.start(*([] if batch_size is None else [batch_size]))
        for name, value in start.items():
            hidden = name in ("h", "a", "v")
            kind = brainstate.HiddenState if hidden else brainstate.ShortTermState
            setattr(self, name, kind(value.astype(int) if name == "i" else value))


class Table(Model):
    """The delays of the units are in a State that no step writes."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.delays = brainstate.ShortTermState(np.arange(UNITS) % SLOTS)

    def update(self, x):
        super().update(x)
        slots = (self.i.value + self.delays.value) % SLOTS
        return jnp.sin(self.ring.value[slots, ..., np.arange(UNITS)].T) @ self.out.value


LINES = {}


def line(weights="w out", read=lambda h, new: new["h"], **states):
    def register(advance):
        LINES[advance.__name__] = Line(advance, weights, states, read)
        return advance

    return register


def cell(h, drive):
    return jnp.tanh(0.7 * h["h"] + drive)


def pushed(line, value, axis=0):
    """A register after one more value."""
    kept = jax.lax.slice_in_dim(line, 0, line.shape[axis] - 1, axis=axis)
    return jnp.concatenate([jnp.expand_dims(value, axis), kept], axis)


def place(h, ahead=0):
    return (jnp.asarray(h["i"], int) + ahead) % SLOTS


def written(h, value):
    """A ring buffer after one more value, and its index."""
    return {"ring": h["ring"].at[place(h)].set(value), "i": (h["i"] + 1) % SLOTS}


def oldest(h):
    return jax.lax.dynamic_index_in_dim(h["ring"], place(h), keepdims=False)


# --- the forms of a delay -------------------------------------------------------------------------


@line(h=H, line=FRONT, read=lambda h, new: h["line"][-1])
def register_by_roll(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": jnp.roll(h["line"], 1, 0).at[0].set(new)}


@line(h=H, line=LAST, read=lambda h, new: new["line"][..., -1])
def register_along_the_last_axis(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new, new.ndim)}


@line(h=H, line=FRONT, read=lambda h, new: h["line"][-1])
def register_of_old_states(ops, p, h, x, hold):
    return {"h": cell(h, ops.matmul(x, p["w"])), "line": pushed(h["line"], h["h"])}


@line(h=H, line=FRONT, read=lambda h, new: h["line"][-1])
def register_whose_newest_value_its_unit_reads(ops, p, h, x, hold):
    new = cell(h, jnp.sin(h["line"][0]) + ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new)}


@line(h=H, a=H, b=H, c=H, read=lambda h, new: h["c"])
def separate_states(ops, p, h, x, hold):
    return {"h": cell(h, ops.matmul(x, p["w"])), "a": h["h"], "b": h["a"], "c": h["b"]}


@line(h=H, ring=FRONT, i=INDEX)
def ring_of_currents(ops, p, h, x, hold):
    return {"h": cell(h, oldest(h)), **written(h, ops.matmul(x, p["w"]))}


@line(h=H, ring=FRONT, i=INDEX)
def delivery_into_later_slots(ops, p, h, x, hold):
    """Event simulators: a slot is read and cleared when its time has come."""
    ring = h["ring"].at[place(h, 2)].add(ops.matmul(x, p["w"]))
    new = cell(h, ring[place(h)])
    return {"h": new, "ring": ring.at[place(h)].set(0.0), "i": (h["i"] + 1) % SLOTS}


def delayed_by_unit(h, new):
    slots = place(h, np.arange(UNITS) % SLOTS)
    return jnp.sin(h["ring"][slots, ..., np.arange(UNITS)].T)


@line(h=H, ring=FRONT, i=INDEX, read=delayed_by_unit)
def one_delay_for_each_unit(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, **written(h, new)}


@line(h=H, ring=FRONT, i=INDEX, read=lambda h, new: delayed_by_unit(new, new))
def delays_from_a_state(ops, p, h, x, hold):
    return one_delay_for_each_unit(ops, p, h, x, hold)


@line(h=H, ring=FRONT, line=FRONT, i=INDEX, read=lambda h, new: oldest(h) * new["line"][1])
def ring_beside_a_register(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new), **written(h, jnp.sin(new))}


def counted_down(h, new):
    return jnp.take(h["ring"], -jnp.asarray(h["i"], int) % SLOTS, -1) * new["ring"][..., 0]


@line(h=H, ring=LAST, i=INDEX, read=counted_down)
def ring_that_counts_down(ops, p, h, x, hold):
    """Its slots are along the last axis, and its counter is never zero again."""
    new = cell(h, ops.matmul(x, p["w"]))
    ring = h["ring"].at[..., -jnp.asarray(h["i"], int) % SLOTS].set(new**2)
    return {"h": new, "ring": ring, "i": h["i"] + 1}


@line(h=H, ring=FRONT, i=INDEX, read=lambda h, new: oldest(h))
def ring_that_skips_a_slot(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, **written(h, new), "i": jnp.where(h["i"] < 6, h["i"] + 1, 0)}


def constant_delays(h, new):
    delays = jnp.broadcast_to(np.arange(UNITS) % SLOTS, (1, *new["h"].shape))
    return jnp.take_along_axis(new["line"], delays, 0)[0]


@line(h=H, line=FRONT, read=constant_delays)
def one_delay_for_each_unit_of_a_register(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new)}


@line(h=H, line=FRONT, i=INDEX)
def ring_by_selection(ops, p, h, x, hold):
    """Without indices: a mask over the slots selects where to write and what to read."""

    def at(index):
        return (jnp.arange(SLOTS) == index).reshape(-1, *[1] * h["h"].ndim)

    read = jnp.sum(jnp.where(at(place(h)), h["line"], 0.0), 0)
    new = cell(h, ops.matmul(x, p["w"]) - 0.4 * read)
    line = jnp.where(at(place(h)), new, h["line"])
    return {"h": new, "line": line, "i": (h["i"] + 1) % SLOTS}


def every_value(h, new):
    return h["line"][-1] + jnp.sin(h["line"][0]) * new["line"][1] + new["h"]


@line(h=H, line=FRONT, read=every_value)
def register_of_which_every_value_is_read(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new)}


@line("w r out", h=H, line=FRONT, a=H, late=BEHIND, read=lambda h, new: new["a"])
def a_layer_behind_a_register(ops, p, h, x, hold):
    """A State between two layers moves its own values on."""
    new = cell(h, ops.matmul(x, p["w"]))
    a = jnp.tanh(ops.matmul(h["line"][-1], p["r"])) + jnp.sin(h["late"][..., -1, :])
    late = pushed(h["late"], h["line"][1], new.ndim - 1)
    return {"h": new, "line": pushed(h["line"], new), "a": a, "late": late}


# --- more than a delay ----------------------------------------------------------------------------


@line(h=H, line=BEHIND, read=lambda h, new: new["line"][..., -1, :] - new["line"][..., 0, :])
def gamma_memory(ops, p, h, x, hold):
    """A cascade of filters of one unit, which the unit reads again."""
    new = cell(h, ops.matmul(x, p["w"]) - 0.3 * h["line"][..., -1, :])
    before = pushed(h["line"], new, new.ndim - 1)
    return {"h": new, "line": 0.6 * h["line"] + 0.4 * before}


@line(line=LAST, read=lambda h, new: jnp.tanh(new["line"]).sum(-1))
def legendre_memory(ops, p, h, x, hold):
    """A linear memory of several orders for each unit, which its drive reads again."""
    orders = np.arange(1.0, SLOTS + 1)
    matrix = 0.3 * np.sin(np.outer(orders, orders) + 1)
    drive = ops.matmul(x, p["w"]) + h["line"] @ (0.2 / orders)
    return {"line": h["line"] @ matrix + drive[..., None] / orders}


@line(
    {"w": (INPUTS, 4 * UNITS), "out": WEIGHTS["out"]},
    both=(..., 2 * UNITS),
    read=lambda h, new: new["both"][..., UNITS:],
)
def packed_lstm(ops, p, h, x, hold):
    """Memory and output of a cell in one State, driven by the gates of one product."""
    i, f, g, o = jnp.split(ops.matmul(x, p["w"]), 4, -1)
    c, before = jnp.split(h["both"], 2, -1)
    c = jax.nn.sigmoid(f + 0.1 * before) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return {"both": jnp.concatenate([c, jax.nn.sigmoid(o) * jnp.tanh(c)], -1)}


@line("w v out", both=(..., 2 * UNITS), read=lambda h, new: jnp.sin(new["both"][..., :UNITS]))
def packed_neuron(ops, p, h, x, hold):
    """Potential and adaptation in one State, driven by two products."""
    v, a = jnp.split(h["both"], 2, -1)
    v = 0.8 * v - 0.3 * a + ops.matmul(x, p["w"])
    a = 0.6 * a + 0.2 * jnp.tanh(v) + ops.matmul(x**2, p["v"])
    return {"both": jnp.concatenate([v, a], -1)}


@line(h=H, line=FRONT, a=H, ring=FRONT, i=INDEX, read=lambda h, new: oldest(h))
def two_lines_in_a_row(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    a = 0.5 * h["a"] + jnp.tanh(h["line"][-1])
    return {"h": new, "line": pushed(h["line"], new), "a": a, **written(h, a)}


@line(h=H, ring=FRONT, i=INDEX)
def delayed_inhibition_of_itself(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]) - 0.4 * oldest(h))
    return {"h": new, **written(h, new)}


@line("w d out", h=H, line=FRONT, read=lambda h, new: h["line"][-1])
def learned_leak_and_delay(ops, p, h, x, hold):
    new = ops.element_wise(p["d"], jax.nn.sigmoid) * h["h"] + ops.matmul(x, p["w"])
    return {"h": new, "line": pushed(h["line"], new)}


# --- paths that are cut ---------------------------------------------------------------------------


@line(h=H)
def lateral(ops, p, h, x, hold):
    return {"h": cell(h, 0.3 * hold(jnp.roll(h["h"], 1, -1)) + ops.matmul(x, p["w"]))}


@line(h=H)
def lateral_shift(ops, p, h, x, hold):
    return {"h": jnp.tanh(0.9 * hold(jnp.roll(h["h"], 1, -1)) + ops.matmul(x, p["w"]))}


@line(h=H, ring=FRONT, i=INDEX)
def lateral_and_delayed(ops, p, h, x, hold):
    late = oldest(h)
    lateral = hold(jnp.roll(late, 1, -1))
    new = cell(h, 0.2 * late - 0.4 * lateral + ops.matmul(x, p["w"]))
    return {"h": new, **written(h, new)}


@line("w r out", h=H, ring=FRONT, i=INDEX)
def delayed_recurrence(ops, p, h, x, hold):
    new = cell(h, ops.matmul(hold(oldest(h)), p["r"]) + ops.matmul(x, p["w"]))
    return {"h": new, **written(h, new)}


# --- delays of brainstate -------------------------------------------------------------------------


class Delays(Module):
    """A module with a `brainstate.nn.Delay`; `options` are those of the delay."""

    options: dict = {}

    def init_state(self, batch_size=None, **_):
        shape = (UNITS,) if batch_size is None else (batch_size, UNITS)
        for name in self.random_model.states:
            if name not in ("line", "late", "held", "t"):
                setattr(self, name, brainstate.HiddenState(jnp.zeros(shape)))
        self.delay = brainstate.nn.Delay(jax.ShapeDtypeStruct(shape, float), **self.options)
        self.delay.init_state()

    def drive(self, x):
        return braintrace.matmul(x, self.w.value)

    def next(self, x):
        self.h.value = jnp.tanh(0.7 * self.h.value + self.drive(x))
        self.delay.update(self.h.value)


class Interpolated(Delays):
    """Two entries, of which one is between two steps."""

    options = {"time": 4.0, "entries": {"a": 1.0}}

    def update(self, x):
        with brainstate.environ.context(t=10.0):
            self.next(x)
            late = jnp.sin(self.delay.retrieve_at_time(10.0 - 2.3))
            return (self.delay.at("a") + late) @ self.out.value


class EverySecondStep(Delays):
    options = {"time": 4.0, "update_every": 2.0}

    def update(self, x):
        self.next(x)
        return self.delay.retrieve_at_step(1) @ self.out.value


class Spikes(Delays):
    """Spikes of an adapting neuron reach itself and a filter late."""

    options = {"entries": {"late": 3.0}}

    def update(self, x):
        late = self.delay.at("late")
        self.v.value = 0.8 * self.v.value - 0.3 * late + self.drive(x)
        z = spike(self.v.value - 0.2 - self.a.value)
        self.a.value = 0.9 * self.a.value + 0.1 * z
        self.h.value = 0.5 * self.h.value + late
        self.delay.update(z)
        return self.h.value @ self.out.value


FIVE = (5, ..., UNITS)


def interpolated(h, new):
    return new["line"][1] + jnp.sin(0.7 * new["line"][2] + 0.3 * new["line"][3])


@line(h=H, line=FIVE, read=interpolated)
def two_entries(ops, p, h, x, hold):
    new = cell(h, ops.matmul(x, p["w"]))
    return {"h": new, "line": pushed(h["line"], new)}


@line(h=H, line=FIVE, t=INDEX, read=lambda h, new: new["line"][1])
def every_second_step(ops, p, h, x, hold):
    new, is_even = cell(h, ops.matmul(x, p["w"])), h["t"] % 2 == 0
    stored = jnp.where(is_even, pushed(h["line"], new), h["line"])
    return {"h": new, "line": stored, "t": h["t"] + 1}


@line(h=H, v=H, a=H, line=FIVE)
def delayed_spikes(ops, p, h, x, hold):
    late = h["line"][3]
    v = 0.8 * h["v"] - 0.3 * late + ops.matmul(x, p["w"])
    z = spike(v - 0.2 - h["a"])
    a, filtered = 0.9 * h["a"] + 0.1 * z, 0.5 * h["h"] + late
    return {"h": filtered, "v": v, "a": a, "line": pushed(h["line"], z)}


MODULES = {
    "delays_from_a_state": Table,
    "two_entries": Interpolated,
    "every_second_step": EverySecondStep,
    "delayed_spikes": Spikes,
}


# --- every form, each on one of the paths ---------------------------------------------------------

CASES = {
    "register_by_roll": ("by_chunks", {"mask": MASK, "reset": RESET}),
    "register_along_the_last_axis": ("by_stream", {"reset": RESET}),
    "register_of_old_states": ("by_own_gradient", {"mask": MASK}),
    "register_whose_newest_value_its_unit_reads": ("by_stream", {"reset": RESET}),
    "separate_states": ("by_own_gradient", {"reset": RESET}),
    "ring_of_currents": ("by_pure_function", {"reset": RESET}),
    "delivery_into_later_slots": ("by_chunks", {"mask": MASK, "reset": RESET}),
    "one_delay_for_each_unit": ("by_stream", {"mask": MASK}),
    "delays_from_a_state": ("by_chunks", {"mask": MASK, "reset": RESET}),
    "ring_beside_a_register": ("by_own_gradient", {"mask": MASK, "reset": RESET}),
    "ring_that_counts_down": ("by_chunks", {"mask": MASK, "reset": RESET}),
    "ring_that_skips_a_slot": ("by_stream", {}),
    "one_delay_for_each_unit_of_a_register": ("by_mapped_learners", {"mask": MASK}),
    "ring_by_selection": ("by_stream", {"reset": RESET}),
    "legendre_memory": ("by_chunks", {"reset": RESET}),
    "a_layer_behind_a_register": ("by_chunks", {"reset": RESET}),
    "register_of_which_every_value_is_read": ("by_stream", {"mask": MASK, "reset": RESET}),
    "gamma_memory": ("by_another_start", {}),
    "packed_lstm": ("by_two_calls", {"reset": RESET}),
    "packed_neuron": ("by_stream", {}),
    "two_lines_in_a_row": ("by_chunks", {}),
    "delayed_inhibition_of_itself": ("by_own_gradient", {"mask": MASK}),
    "learned_leak_and_delay": ("by_checkpoints", {}),
    "lateral": ("by_chunks", {}),
    "lateral_shift": ("by_stream", {}),
    "lateral_and_delayed": ("by_chunks", {"reset": RESET}),
    "delayed_recurrence": ("by_two_calls", {"mask": MASK}),
    "two_entries": ("by_chunks", {"mask": MASK}),
    "every_second_step": ("by_stream", {}),
    "delayed_spikes": ("by_two_calls", {}),
}


def compiled(name, rule="d_rtrl", **options):
    model = MODULES.get(name, Model)(LINES[name], Marked(), np.float64)
    return quietly_compiled(model, rule, XS[0], batch_size=BATCH, **options)


def gradient(learner, path, **asked):
    asked.setdefault("chunk_size", 5 if path == "by_two_calls" else 4)
    return PATHS[path](learner, request_of(XS, **asked), squared_error)


def expected(name, rule="d_rtrl", **asked):
    asked = {key: asked[key] for key in asked.keys() & {"mask", "reset", "window"}}
    given = LINES[name], rule, LINES[name].params(), XS, lambda t, y: squared_error(y, 0.3)
    return oracle.gradient_by_rule(*given, **asked)


@pytest.mark.parametrize("name", LINES)
def test_every_form_of_a_delay_equals_its_oracle(name):
    path, asked = CASES[name]
    learner = compiled(name)
    assert bool(warned(learner)) == name.startswith("lateral")
    oracle.assert_close(gradient(learner, path, **asked), expected(name, **asked), 1e-10, name)


ALONE = (
    "register_by_roll",
    "register_along_the_last_axis",
    "one_delay_for_each_unit_of_a_register",
    "register_of_which_every_value_is_read",
    "a_layer_behind_a_register",
    "two_lines_in_a_row",
    "one_delay_for_each_unit",
    "ring_that_counts_down",
    "ring_beside_a_register",
    "ring_of_currents",
)


def without_resets(learner, **options):
    """The gradient of two calls; with `reset`, a register would not only move its values."""

    def step(x):
        return squared_error(learner(x), 0.3)

    def of_part(part):
        own = {"mask": MASK[part], "reduction": "sum", "step_fn": step, **options}
        return learner.etrace_grad(XS[part], **own)

    return named(jax.tree.map(jnp.add, of_part(slice(5)), of_part(slice(5, None))))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("chunk_size", [1, 3, STEPS])
def test_a_register_outside_of_the_loops_equals_its_oracle(name, chunk_size):
    found = without_resets(compiled(name), chunk_size=chunk_size)
    oracle.assert_close(found, expected(name, mask=MASK), 1e-10, name)


@pytest.mark.parametrize(("rule", "options"), [("rtrl", {}), ("d_rtrl", {"window": 4})])
def test_derivatives_pass_a_register_outside_of_the_loops(rule, options):
    name = "a_layer_behind_a_register"
    found = without_resets(compiled(name, rule), **options)
    literal = expected(name, "bptt" if rule == "rtrl" else rule, mask=MASK, **options)
    oracle.assert_close(found, literal, 1e-10)


MOVING = ["register_by_roll", "a_layer_behind_a_register", "one_delay_for_each_unit"]


@pytest.mark.parametrize("name", MOVING)
def test_no_loop_carries_or_records_a_register_or_a_ring(name):
    learner = compiled(name)
    pure = learner.functional()

    def gradient(state):
        return pure.grad(pure.reset(state), XS, step_fn=lambda x: squared_error(learner(x), 0.3))

    found = every_equation(jax.make_jaxpr(gradient)(pure.state()))
    loops = [equation for equation in found if equation.primitive.name == "scan"]
    shapes = {var.aval.shape[-3:] for loop in loops for var in loop.outvars}
    assert loops and shapes.isdisjoint({(SLOTS, BATCH, UNITS), (BATCH, SLOTS, UNITS)})


@pytest.mark.parametrize("name", ["ring_that_counts_down", "ring_beside_a_register"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_ring_buffer_has_its_values_in_the_slots_of_the_model(name, streams):
    learner, alone = compiled(name), Model(LINES[name], Marked(), np.float64)
    brainstate.nn.init_all_states(alone, batch_size=BATCH)
    if streams:
        gradient(learner, "by_stream")
    else:
        without_resets(learner)
    for x in XS:
        alone.update(x)
    expected = alone.states(brainstate.ShortTermState)
    for path, state in learner.module.states(brainstate.ShortTermState).items():
        np.testing.assert_allclose(state.value, expected[path].value, rtol=1e-12)


def test_behind_a_register_is_one_trace_of_some_steps_ago():
    """Its size does not depend on the length of the register."""
    register, ring = (compiled(name) for name in ("register_by_roll", "ring_of_currents"))
    found = {(state, name) for row in register.report().relations for state, name, _ in row.traces}
    assert found == {("h, 3 steps ago", "weight")}
    assert list(register.eligibility("w")) == ["h, 3 steps ago"]
    assert {state for row in ring.report().relations for state, *_ in row.traces} == {
        "h", "ring[0]", "ring[1]", "ring[2]"
    }  # fmt: skip


AGES = [
    ("ring_that_counts_down", "by_stream"),
    ("ring_that_counts_down", "by_checkpoints"),
    ("ring_beside_a_register", "by_two_calls"),
    ("one_delay_for_each_unit", "by_mapped_learners"),
]


@pytest.mark.parametrize(("name", "path"), AGES)
def test_a_ring_whose_ages_are_known_has_one_late_trace(name, path):
    learner = compiled(name)
    (row,) = learner.report().delays
    assert "ring" in row.states and row.form.startswith("one late trace")
    oracle.assert_close(gradient(learner, path, mask=MASK), expected(name, mask=MASK), 1e-10, name)


def test_the_late_trace_of_a_ring_takes_the_bytes_that_the_report_says():
    late, skips = (compiled(f"ring_that_{what}") for what in ("counts_down", "skips_a_slot"))
    (late,), (slots,) = late.report().delays, skips.report().delays
    of_trace, steps = BATCH * INPUTS * UNITS * 8, SLOTS + 1
    of_factors = 4 * BATCH * UNITS + BATCH * INPUTS  # D and Df of both states, and x
    assert late.stored_bytes == of_trace + steps * 8 * of_factors + 4
    assert (slots.form, slots.stored_bytes) == ("a trace for each of 3 values", SLOTS * of_trace)


def test_the_report_has_the_form_and_the_bytes_of_a_delay():
    rows = {
        name: compiled(name).report().delays for name in ("separate_states", "ring_of_currents")
    }
    (late,), (slots,) = rows.values()
    assert (late.states, late.form.split()[:3]) == ("a, b, c", ["one", "late", "trace,"])
    of_trace = BATCH * INPUTS * UNITS * 8
    of_factors = 4 * BATCH * (2 * UNITS + INPUTS) * 8  # of D, Df and x, and where the oldest is
    assert late.stored_bytes == of_trace + of_factors + 4
    assert (slots.states, slots.form) == ("ring", "a trace for each of 3 values")
    assert slots.stored_bytes == SLOTS * of_trace
    assert "a trace for each of 3 values" in str(compiled("ring_of_currents").report())


def test_a_state_whose_traces_take_too_much_memory_is_named(monkeypatch):
    monkeypatch.setattr("braintrace._compiler.compile.MOST_BYTES", 100)
    with pytest.raises(braintrace.CompilationError, match="'ring' has 3 values"):
        compiled("ring_of_currents")


def test_a_nan_before_a_reset_has_no_influence_behind_a_register():
    """It is in the factors of the last steps."""
    xs, reset = XS.copy(), np.zeros((STEPS, BATCH), bool)
    xs[:3, 0], reset[3, 0] = np.nan, True
    asked = {"mask": np.arange(STEPS) >= 3, "reset": reset, "chunk_size": 2}
    for path in ("by_stream", "by_chunks"):
        given = request_of(xs, **asked), squared_error
        found = PATHS[path](compiled("register_by_roll"), *given)
        oracle.assert_close(
            found, expected("register_by_roll", mask=asked["mask"], reset=reset), 1e-10
        )


FULL = [
    ("ring_of_currents", "rtrl", {}),
    ("delayed_recurrence", "rtrl", {}),
    ("delayed_recurrence", "snap", {"n": 4 * SLOTS}),
]


@pytest.mark.parametrize(("name", "rule", "options"), FULL)
def test_full_jacobian_rules_pass_every_path(name, rule, options):
    found = gradient(compiled(name, rule, **options), "by_chunks", reset=RESET)
    oracle.assert_close(found, expected(name, "bptt", reset=RESET), 1e-10, name)


def test_a_window_passes_the_delayed_recurrence():
    asked = {"window": 4, "reset": RESET}
    found = gradient(compiled("delayed_recurrence"), "by_chunks", **asked)
    oracle.assert_close(found, expected("delayed_recurrence", **asked), 1e-10)


FILTERED = {
    "register_along_the_last_axis": "by_stream",
    "ring_of_currents": "by_chunks",
    "delayed_recurrence": "by_own_gradient",
}


@pytest.mark.parametrize("name", FILTERED)
def test_es_d_rtrl_through_a_delay_is_its_recursion(name):
    def loss(t, y, sample):
        return squared_error(y, 0.3)

    learner = compiled(name, "es_d_rtrl", decay_or_rank=0.7)
    literal = oracle.es_d_rtrl(LINES[name], LINES[name].params(), XS, loss, 0.7, MASK)
    oracle.assert_close(gradient(learner, FILTERED[name], mask=MASK), literal, 1e-9, name)


def test_a_driven_number_that_reaches_all_units_counts_within_the_step():
    """No unit swallows it, nor does it join the layer."""

    class Global(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in params.items():
                setattr(self, name, brainstate.ParamState(value))

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
            self.g = brainstate.HiddenState(jnp.zeros((batch_size, 1)))

        def update(self, x):
            self.g.value = 0.8 * self.g.value + braintrace.matmul(x, self.v.value)
            drive = braintrace.matmul(x, self.w.value) - 0.3 * self.g.value
            self.h.value = jnp.tanh(0.7 * self.h.value + drive)
            return self.h.value @ self.out.value

    params = Toy(None, {"w": WEIGHTS["w"], "v": (INPUTS, 1), "out": WEIGHTS["out"]}).params()

    def total(p):
        h, g, value = jnp.zeros((BATCH, UNITS)), jnp.zeros((BATCH, 1)), 0.0
        for x in XS:
            g = 0.8 * g + x @ p["v"]
            new = functools.partial(lambda h, x, g: jnp.tanh(0.7 * h - 0.3 * g + x @ p["w"]), h, x)
            h = new(oracle.stop(g))
            value += squared_error(new(g) @ p["out"], 0.3)  # a loss sees the step whole
        return value

    learner = quietly_compiled(Global(), "d_rtrl", XS[0], batch_size=BATCH)
    assert [d.kind for d in warned(learner)] == ["truncated"]
    oracle.assert_close(gradient(learner, "by_chunks"), jax.grad(total)(params), 1e-10)


def test_a_weight_behind_two_registers_in_a_row_is_reported():
    """Each is written and then read, so that a loss reads what depends on it as a variable."""

    def advance(ops, p, h, x, hold):
        new = cell(h, ops.matmul(x, p["w"]))
        line = jnp.concatenate([new[None], h["line"]])
        a = 0.5 * h["a"] + jnp.tanh(ops.matmul(line[-1], p["v"]))
        late = jnp.concatenate([a[None], h["late"]])
        return {"h": new, "line": line[:-1], "a": a, "late": late[:-1], "o": late[-1]}

    weights = {"w": (INPUTS, UNITS), "v": (UNITS, UNITS), "out": WEIGHTS["out"]}
    states = {"h": H, "line": FRONT, "a": H, "late": FRONT, "o": H}
    two = Line(advance, weights, states, lambda h, new: new["o"])
    learner = quietly_compiled(Model(two, Marked(), np.float64), "d_rtrl", XS[0], batch_size=BATCH)
    (found,) = warned(learner)
    assert "gets no gradient" in found.message and found.paths[0] == "w"


class Rings(Delays):
    """Delays of brainstate, which are ring buffers, behind each of two layers or behind one."""

    options = {"entries": {"late": 2.0}}

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.second = brainstate.nn.Delay(self.delay.target_info, **self.options)
        self.second.init_state()

    def update(self, x):
        self.next(x)
        self.a.value = jnp.tanh(braintrace.matmul(self.delay.at("late"), self.r.value))
        self.second.update(self.a.value)
        late = self.second.at("late") if self.has_two else self.a.value
        return late @ self.out.value


@pytest.mark.filterwarnings("ignore:Weight .w. gets no gradient")  # again, for a window
@pytest.mark.parametrize("has_two", [False, True])
def test_a_weight_behind_two_rings_in_a_row_is_reported(has_two):
    """A ring is read where it has not just been written."""

    def advance(ops, p, h, x, hold):
        new = cell(h, ops.matmul(x, p["w"]))
        line = pushed(h["line"], new)
        a = jnp.tanh(ops.matmul(line[2], p["r"]))
        return {"h": new, "line": line, "a": a, "late": pushed(h["late"], a)}

    def read(h, new):
        return new["late"][2] if has_two else new["a"]

    weights = {"w": WEIGHTS["w"], "r": WEIGHTS["r"], "out": WEIGHTS["out"]}
    two = Line(advance, weights, {"h": H, "line": FRONT, "a": H, "late": FRONT}, read)
    model = Rings(two, Marked(), np.float64)
    model.has_two = has_two
    learner = quietly_compiled(model, "d_rtrl", XS[0], batch_size=BATCH)
    silent = [d.paths[0] for d in warned(learner) if "gets no gradient" in d.message]
    assert silent == ["w"] * has_two
    found = without_resets(learner)
    assert np.any(np.asarray(found["w"])) != has_two
    if has_two:  # a window longer than both is exact
        learner.reset_state()
        step = {"step_fn": lambda x: squared_error(learner(x), 0.3), "reduction": "sum"}
        found = named(learner.etrace_grad(XS, mask=MASK, window=STEPS, **step))
    given = two, "bptt", two.params(), XS, lambda t, y: squared_error(y, 0.3)
    oracle.assert_close(found, oracle.gradient_by_rule(*given, mask=MASK), 1e-10)

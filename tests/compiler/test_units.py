"""States that hold parts, copies and earlier values of each other, and what of them is exact.

Slices of one vector, groups, shift registers, ring buffers, States that a step only reads, and
operations whose output feeds several elements.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from catalogue_models import spike
from paths import PATHS, named
from random_models import BATCH, INPUTS, STEPS, UNITS, Marked
from toys import XS, Toy, assert_exact, bptt, compiled, deviation, findings, gradient, warned

import braintrace

pytestmark = pytest.mark.usefixtures("float64")
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = RESET[4, 1] = True


# --- slices ---------------------------------------------------------------------------------------


def populations(ops, p, h, x):
    """Two populations of neurons, each fed by its part of one vector of synapses."""
    syn = 0.7 * h["syn"] + ops.matmul(x, p["w"])
    e = 0.8 * h["e"] + jnp.tanh(syn[..., :3])
    i = 0.6 * h["i"] + syn[..., :2:-1] - 0.2 * h["i"] ** 2
    syn = syn - 0.3 * jnp.concatenate([jnp.sin(h["e"]), jnp.flip(i, -1)], -1)
    return {"syn": syn, "e": e, "i": i}, e[..., :2] * i


def joined(ops, p, h, x):
    """A state that puts two others side by side."""
    y = ops.matmul(x, p["w"])
    e = 0.7 * h["e"] + y[..., :3]
    i = 0.6 * h["i"] + jnp.tanh(y[..., 3:])
    syn = 0.8 * h["syn"] + jnp.sin(jnp.concatenate([e, i], -1))
    return {"syn": syn, "e": e, "i": i}, syn


def reset_in_parts(ops, p, h, x):
    """A part of the units start again at each step."""
    kept = h["syn"].at[..., 1:3].set(0.0)
    syn = 0.7 * kept + ops.matmul(x, p["w"])
    return {**h, "syn": syn}, jnp.tanh(syn)


PARTS = {"weights": {"w": (INPUTS, 5)}, "states": {"syn": (5,), "e": (3,), "i": (2,)}}


@pytest.mark.parametrize("step", [populations, joined, reset_in_parts])
def test_states_that_are_parts_of_one_vector_are_exact(step):
    assert_exact(Toy(step, **PARTS))


def test_a_sample_of_a_state_in_parts_starts_anew():
    toy = Toy(populations, **PARTS)
    found = gradient(compiled(toy), PATHS["by_stream"], reset=RESET)
    oracle.assert_close(found, bptt(toy, reset=RESET), 1e-10)


def test_elements_in_order_meet_before_all_others():
    def lateral(hold, ops, p, h, x):
        new = jnp.tanh(0.3 * hold(jnp.roll(h["k"], 1, -1)) + 0.5 * h["h"] + ops.matmul(x, p["w"]))
        after = 0.6 * h["k"] + 0.2 * new
        return {"h": new, "k": after}, after

    held, whole = (functools.partial(lateral, hold) for hold in (oracle.stop, lambda k: k))
    found = gradient(compiled(Toy(whole, "w", "h k")))
    oracle.assert_close(found, bptt(Toy(held, "w", "h k")), 1e-10)


# --- several elements of one output ---------------------------------------------------------------


def broadcast(function, ops, p, h, x):
    y = function(ops.matmul(x, p["w"]))[..., None]
    new = jnp.array([0.5, 0.8]) * h["h"] + jnp.tanh(y * jnp.array([1.0, 2.0]))
    return {"h": new}, new[..., 0] * new[..., 1]


BEFORE = {
    "loop": lambda y: jax.lax.scan(lambda c, _: (1.1 * jnp.tanh(c), None), y, None, length=3)[0],
    "branch": lambda y: jax.lax.cond(y.sum() > 0, jnp.tanh, lambda y: 0.5 * y, y),
    "samples": lambda y: jax.lax.map(jnp.tanh, y),
}


@pytest.mark.parametrize("name", BEFORE)
def test_an_output_that_feeds_several_elements_is_exact(name):
    step = functools.partial(broadcast, BEFORE[name])
    assert_exact(Toy(step, "w", {"h": (UNITS, 2)}))


def test_an_output_that_feeds_two_states_of_different_units_is_exact():
    def step(ops, p, h, x):
        y = ops.matmul(x, p["w"])
        new = jnp.tanh(0.5 * h["h"] + 0.3 * h["k"] + y)
        after = jnp.tanh(0.6 * h["k"] + 0.2 * h["h"] + jnp.roll(y, 1, -1))
        return {"h": new, "k": after}, new

    toy = Toy(step, "w", "h k")
    oracle.assert_close(gradient(compiled(toy), chunk_size=2), bptt(toy), 1e-10)


@pytest.mark.parametrize("shape", [(), (UNITS,)])
def test_small_steps_with_one_time_constant_for_several_units_are_exact(shape):
    def step(ops, p, h, x):
        drive, rate = jnp.tanh(ops.matmul(x, p["w"])), ops.element_wise(p["k"], jax.nn.sigmoid)

        def small_step(v, _):
            return v + 0.2 * rate * (drive - v), None

        new = jax.lax.scan(small_step, h["h"], None, length=3)[0]
        return {"h": new}, new

    assert_exact(Toy(step, {"w": (INPUTS, UNITS), "k": shape}))


def test_the_largest_of_each_pair_of_outputs_is_exact():
    def step(ops, p, h, x):
        y = ops.matmul(x, p["w"])
        pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")
        new = 0.5 * h["h"] + jnp.tanh(pooled)
        return {"h": new}, new

    assert_exact(Toy(step, "w", {"h": (UNITS // 2,)}))


def test_one_unit_and_a_state_without_axes_are_exact():
    class OneNumber(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.array([[0.5], [-0.3], [0.8]]))

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros(()))

        def update(self, x):
            y = braintrace.matmul(x, self.w.value).reshape(())
            self.h.value = 0.8 * self.h.value + jnp.tanh(y)
            return self.h.value

    def total(w):
        h = value = 0.0
        for x in XS[:, 0]:
            h = 0.8 * h + jnp.tanh((x @ w)[0])
            value += h**2
        return value

    model = OneNumber()
    expected = {"w": jax.grad(total)(model.w.value)}
    learner = braintrace.compile(model, "d_rtrl", XS[0, 0])
    square = lambda x: learner(x) ** 2  # noqa: E731
    found = learner.etrace_grad(XS[:, 0], step_fn=square, reduction="sum", chunk_size=4)
    oracle.assert_close(named(found), expected, 1e-10)


# --- states that the next step does not read ------------------------------------------------------


def normalised_output(ops, p, h, x):
    """A gated cell whose output couples the units of a sample, on the way to no later step."""
    forget, enter, out = jnp.split(ops.matmul(x, p["gates"]), 3, axis=-1)
    c = jax.nn.sigmoid(forget) * h["c"] + jnp.tanh(enter)
    centred = c - c.mean(-1, keepdims=True)
    new = jax.nn.sigmoid(out) * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    return {"c": c, "h": new}, new


def test_coupling_on_the_way_to_an_output_is_exact():
    toy = Toy(normalised_output, {"gates": (INPUTS, 3 * UNITS)}, {"c": (UNITS,), "h": (UNITS,)})
    learner = compiled(toy, strict=True)
    oracle.assert_close(gradient(learner), bptt(toy), 1e-10)


# --- HiddenGroupState -----------------------------------------------------------------------------


class Grouped(brainstate.nn.Module):
    """A neuron whose potential and adaptation are one array, as braincell has them."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(NEURON.params()["w"])

    def init_state(self, batch_size=None, **_):
        start = NEURON.start(*([] if batch_size is None else [batch_size]))
        self.both = brainstate.HiddenGroupState(jnp.stack([start["v"], start["a"]], -1))

    def update(self, x):
        v, a = self.both.value[..., 0], self.both.value[..., 1]
        v = 0.8 * v - a + braintrace.matmul(x, self.w.value)
        z = spike(v - 0.5)
        self.both.value = jnp.stack([v, 0.9 * a + 0.1 * z], -1)
        return v * a


def neuron(ops, p, h, x):
    v = 0.8 * h["v"] - h["a"] + ops.matmul(x, p["w"])
    return {"v": v, "a": 0.9 * h["a"] + 0.1 * spike(v - 0.5)}, v * h["a"]


NEURON = Toy(neuron, "w", {"v": (UNITS,), "a": (UNITS,)})


@pytest.mark.parametrize("vmap", [False, True])
def test_states_in_one_array_are_exact(vmap):
    options = {"vmap": vmap, "strict": True}
    learner = braintrace.compile(Grouped(), "d_rtrl", XS[0], batch_size=BATCH, **options)
    (group,) = learner.graph.hidden_groups
    assert group.names == ("both[0]", "both[1]")
    oracle.assert_close(gradient(learner), bptt(NEURON), 1e-10)


# --- compartments ---------------------------------------------------------------------------------

CURRENT = 0.4


@jax.custom_jvp
def solve(diagonal, drive):
    """Potentials of three compartments in a row after an implicit step, by elimination."""
    for child, parent in ((2, 1), (1, 0)):
        factor = CURRENT / diagonal[..., child]
        diagonal = diagonal.at[..., parent].add(-CURRENT * factor)
        drive = drive.at[..., parent].add(factor * drive[..., child])
    v = drive / diagonal
    for child, parent in ((1, 0), (2, 1)):
        v = v.at[..., child].add(CURRENT * v[..., parent] / diagonal[..., child])
    return v


@solve.defjvp
def solve_jvp(primals, tangents):
    """Not the derivative of the body."""
    value, tangent = jax.jvp(solve.__wrapped__, primals, tangents)
    return value, 0.9 * tangent


def cable(ops, p, h, x):
    """The solver of a neuron couples all its compartments, as that of braincell does."""
    leak = ops.element_wise(p["leak"], jnp.tanh)
    drive = 0.7 * h["v"] + leak * jnp.sin(h["v"])
    drive = drive.at[..., 0].add(ops.matmul(x, p["w"]))
    v = solve(jnp.broadcast_to(1.2 + leak**2, drive.shape), drive)
    return {"v": v}, v[..., 2]


CABLE = Toy(cable, {"w": (INPUTS, UNITS), "leak": (UNITS, 3)}, {"v": (UNITS, 3)})


class Cable(brainstate.nn.Module):
    """The compartments are the components of one State, one group for each neuron."""

    def __init__(self):
        super().__init__()
        self.params = CABLE.params()
        self.w, self.leak = (brainstate.ParamState(self.params[name]) for name in ("w", "leak"))

    def init_state(self, batch_size=None, **_):
        self.v = brainstate.HiddenGroupState(CABLE.start(batch_size)["v"])

    def update(self, x):
        params = {"w": self.w.value, "leak": self.leak.value}
        new, output = cable(braintrace, params, {"v": self.v.value}, x)
        self.v.value = new["v"]
        return output


def test_compartments_that_a_custom_derivative_couples_are_exact():
    learner = braintrace.compile(Cable(), "d_rtrl", XS[0], batch_size=BATCH, strict=True)
    (group,) = learner.graph.hidden_groups
    assert group.names == ("v[0]", "v[1]", "v[2]")
    oracle.assert_close(gradient(learner), bptt(CABLE), 1e-10)


def cable_with_ends(ops, p, h, x):
    """A cell whose weights are all elementwise, and whose branch ends are read one step late."""
    leak = ops.element_wise(p["leak"], jnp.tanh)
    drive = 0.7 * h["v"] + leak * jnp.sin(h["v"]) + 0.3 * h["ends"] + x[..., :1, None]
    v = solve(jnp.broadcast_to(1.2 + leak**2, drive.shape), drive)
    return {"v": v, "ends": 0.5 * (v + jnp.roll(v, 1, -1))}, v[..., 2]


ENDS = Toy(cable_with_ends, {"leak": (UNITS, 3)}, {"v": (UNITS, 3), "ends": (UNITS, 3)})


class CableWithEnds(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.leak = brainstate.ParamState(ENDS.params()["leak"])

    def init_state(self, batch_size=None, **_):
        start = ENDS.start(batch_size)
        self.v = brainstate.HiddenGroupState(start["v"])
        self.ends = brainstate.ShortTermState(start["ends"])

    def update(self, x):
        h = {"v": self.v.value, "ends": self.ends.value}
        new, output = cable_with_ends(braintrace, {"leak": self.leak.value}, h, x)
        self.v.value, self.ends.value = new["v"], new["ends"]
        return output


@pytest.mark.parametrize("path", ["by_chunks", "by_stream"])
def test_a_state_that_elementwise_weights_reach_belongs_to_the_unit(path):
    learner = braintrace.compile(CableWithEnds(), "d_rtrl", XS[0], batch_size=BATCH, strict=True)
    (group,) = learner.graph.hidden_groups
    assert len(group.transition) == 6 * 6
    oracle.assert_close(gradient(learner, PATHS[path]), bptt(ENDS), 1e-10)


# --- shift registers and ring buffers -------------------------------------------------------------

STOP = jax.lax.stop_gradient
LINE = {"h": (UNITS,), "line": (3, UNITS)}


def shift_register(keep, ops, p, h, x):
    """The weight of the recurrence sees what the units did three steps ago."""
    late = keep(h["line"][..., -1, :])
    new = 0.8 * h["h"] + jnp.tanh(ops.matmul(x, p["w"]) + ops.matmul(late, p["r"]))
    line = jnp.concatenate([new[..., None, :], h["line"][..., :-1, :]], -2)
    return {"h": new, "line": line}, new


def line_toy(step, keep=lambda value: value):
    return Toy(functools.partial(step, keep), "w r", LINE)


def test_a_register_that_an_operation_reads_loses_the_path_of_the_operation_only():
    """As everywhere, what passes a recurrent weight is truncated; the report is no warning."""
    learner = compiled(line_toy(shift_register))
    assert not warned(learner)
    oracle.assert_close(gradient(learner), bptt(line_toy(shift_register, STOP)), 1e-10)


def by_where(buffer, place, value):
    here = jnp.arange(buffer.shape[-2]) == place
    return jnp.where(here[:, None], value[..., None, :], buffer)


def by_at(buffer, place, value):
    return buffer.at[..., place, :].set(value)


def by_slice(buffer, place, value):
    starts = (0,) * (buffer.ndim - 2) + (place, 0)
    return jax.lax.dynamic_update_slice(buffer, value[..., None, :], starts)


WRITES = {"where": by_where, "slice": by_slice}


class Ring(brainstate.nn.Module):
    """A readout of the last values, which are written to one place after the other."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        params = RING.params()
        self.w = brainstate.ParamState(params["w"])
        self.out = brainstate.ParamState(params["out"])

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.ring = brainstate.HiddenState(RING.start(*lead)["ring"])
        self.at = brainstate.ShortTermState(jnp.asarray(0))

    def update(self, x):
        value = jnp.tanh(braintrace.matmul(x, self.w.value))
        self.ring.value = self.write(self.ring.value, self.at.value, value)
        self.at.value = (self.at.value + 1) % 3
        return read_ring(self.ring.value, self.out.value)


def read_ring(ring, out):
    return jnp.tensordot(ring, jnp.array([0.5, 1.0, 1.5]), ((-2,), (0,))) @ out


RING = Toy(None, "w out", {"ring": (3, UNITS)})  # for its numbers


@functools.cache
def bptt_of_ring(decay=0.0):
    params, start = RING.params(), RING.start(BATCH)["ring"]

    def total(params):
        ring, value = start, 0.0
        for t, x in enumerate(XS):
            late = decay * ring[..., t % 3, :]
            ring = by_where(ring, t % 3, late + jnp.tanh(x @ params["w"]))
            value += jnp.sum((read_ring(ring, params["out"]) - 0.3) ** 2)
        return value

    return jax.grad(total)(params)


@pytest.mark.parametrize("name", WRITES)
def test_a_ring_buffer_is_exact_however_it_is_written(name):
    learner = braintrace.compile(Ring(WRITES[name]), "d_rtrl", XS[0], batch_size=BATCH)
    assert not warned(learner)
    oracle.assert_close(gradient(learner), bptt_of_ring(), 1e-10, name)


def test_a_slot_that_is_read_at_a_place_of_data_is_exact():
    def decayed(buffer, place, value):
        return by_at(buffer, place, 0.9 * jnp.take(buffer, place, axis=-2) + value)

    learner = braintrace.compile(Ring(decayed), "d_rtrl", XS[0], batch_size=BATCH)
    assert not warned(learner)
    oracle.assert_close(gradient(learner), bptt_of_ring(0.9), 1e-10)


# --- States that a step only reads ----------------------------------------------------------------


class Statistics(Toy):
    """Statistics without an axis for samples."""

    def start(self, *batch, dtype=np.float64):
        return {**super().start(*batch), "mean": jnp.linspace(-0.2, 0.3, UNITS)}


WAYS = {"as it is": lambda mean: mean, "in a call": jax.jit(lambda mean: mean)}


def normalised(pass_on, ops, p, h, x):
    new = ops.element_wise(p["d"], jax.nn.sigmoid) * h["h"]
    new = new + jnp.tanh(ops.matmul(x, p["w"]) - h["mean"])
    return {"h": new, "mean": pass_on(h["mean"])}, new


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_is_returned_as_it_was_is_a_constant(way):
    states = {"h": (UNITS,), "mean": (UNITS,)}
    toy = Statistics(functools.partial(normalised, WAYS[way]), "w d", states)
    learner = compiled(toy)
    assert not findings(learner)
    assert [[s.name for s in g.hidden_states] for g in learner.graph.hidden_groups] == [["h"]]
    if way == "as it is":
        oracle.assert_close(gradient(learner), bptt(toy), 1e-10)


def test_a_state_that_is_turned_in_every_step_is_no_constant():
    def step(ops, p, h, x):
        turned = jnp.swapaxes(h["k"], -1, -2)
        new = 0.5 * h["h"] + ops.matmul(x, p["w"]) * turned.reshape(h["h"].shape)
        return {"h": new, "k": turned}, new

    toy = Toy(step, "w", {"h": (UNITS,), "k": (2, 2)})
    oracle.assert_close(gradient(compiled(toy)), bptt(toy), 1e-10)


class Masked(brainstate.nn.Module):
    """A weight times a mask that is a State; `writes` changes it in the step."""

    def __init__(self, writes=False):
        super().__init__()
        self.writes = writes
        self.w = brainstate.ParamState(Toy(None, "w").params()["w"])
        self.mask = brainstate.LongTermState(MASKS[0])

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(Toy(None).start(*lead)["h"])

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value * self.mask.value)
        if self.writes:
            self.mask.value = 1 - self.mask.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value


MASKS = [jnp.asarray(np.indices((INPUTS, UNITS)).sum(0) % n > 0, float) for n in (2, 3)]


def masked_by(mask):
    def step(ops, p, h, x):
        new = 0.8 * h["h"] + jnp.tanh(x @ (p["w"] * mask))
        return {"h": new}, new

    return Toy(step, "w")


@pytest.mark.parametrize("vmap", [False, True])
def test_every_call_uses_a_mask_as_it_is(vmap):
    learner = braintrace.compile(Masked(), "d_rtrl", XS[0], batch_size=BATCH, vmap=vmap)
    for mask in MASKS:
        learner.reset_state()
        learner.module.mask.value = mask
        oracle.assert_close(gradient(learner), bptt(masked_by(mask)), 1e-10)


def test_a_mask_that_changes_within_a_sequence_is_refused():
    learner = braintrace.compile(Masked(), "d_rtrl", XS[0], batch_size=BATCH)

    def prune(x):
        learner.module.mask.value = 0 * MASKS[0]
        return learner(x).sum()

    with pytest.raises(braintrace.OptionError, match="'mask'"):
        learner.etrace_grad(XS, step_fn=prune)
    with pytest.raises(braintrace.CompilationError, match="mask"):
        braintrace.compile(Masked(writes=True), "d_rtrl", XS[0], batch_size=BATCH)


# --- rows of a table ------------------------------------------------------------------------------


def test_a_row_that_a_table_does_not_have_is_that_of_jax():
    """An index counts from the end; one outside gives NaN, and no gradient."""
    indices = np.array([[0, 2], [1, -1], [7, 2], [-3, -6], [3, 1], [-20, 100]])

    def step(ops, p, h, index):
        if isinstance(ops, Marked):
            row = ops.embedding(index, p["w"])
        else:
            row = jnp.take(p["w"], index, axis=0)
        new = 0.8 * h["h"] + jnp.sin(jnp.where(jnp.isnan(row), 0.5, row))
        return {"h": new}, new

    toy = Toy(step, "w")
    found = gradient(compiled(toy, xs=indices), xs=indices)
    oracle.assert_close(found, bptt(toy, xs=indices), 1e-10)


# --- loops and operations along units -------------------------------------------------------------


def test_a_sweep_over_units_keeps_the_path_of_each_to_itself():
    def step(ops, p, h, x):
        def of_unit(left, h):
            left = 0.3 * left + h
            return left, left

        _, swept = jax.lax.scan(of_unit, jnp.zeros(len(x)), jnp.tanh(h["h"]).T)
        new = 0.5 * swept.T + ops.matmul(x, p["w"])
        return {"h": new}, new

    toy = Toy(step, "w")
    learner = compiled(toy)
    assert {d.kind for d in warned(learner)} == {"truncated"}
    assert learner.report().groups[0].transition == (("h", "h"),)
    assert deviation(gradient(learner), bptt(toy), "w") < 0.2


@pytest.mark.parametrize("along", [jnp.cumsum, lambda v, axis: jnp.fft.rfft(v, axis=axis).real])
def test_an_operation_along_units_keeps_samples_apart(along):
    def step(ops, p, h, x):
        new = ops.matmul(x, p["w"]) + 0.5 * h["h"] @ p["r"]
        joined = along(new, axis=1)
        return {"h": jnp.tanh(joined @ jnp.eye(joined.shape[1], UNITS))}, new

    assert_exact(Toy(step, "w r"), rule="rtrl")


def test_a_loop_without_steps_changes_nothing():
    def step(ops, p, h, x):
        def small_step(h, _):
            return h + ops.matmul(x, p["w"]), h.sum()

        h, _ = jax.lax.scan(small_step, 0.5 * h["h"], None, length=0)
        return {"h": h + ops.matmul(x, p["w"])}, h

    assert_exact(Toy(step, "w"))


@pytest.mark.parametrize("vmap", [False, True])
def test_a_weight_of_small_steps_is_exact(vmap):
    """Also if samples are added to its shape afterwards."""

    def step(ops, p, h, x):
        drive, leak = ops.matmul(x, p["w"]), ops.element_wise(p["u"], jax.nn.sigmoid)

        def small_step(h, _):
            return h + 0.1 * (drive - leak * h), None

        new, _ = jax.lax.scan(small_step, h["h"], None, length=3)
        return {"h": new}, new

    weights = {"w": (INPUTS, UNITS), "u": (UNITS,)}
    assert_exact(Toy(step, weights), vmap=vmap)


def spread_over_units(x):
    def small_step(v, _):
        return 0.9 * v + 0.05 * jnp.roll(v, 1, -1), None

    return jax.lax.scan(small_step, x, None, length=3)[0]


smooth = jax.custom_jvp(spread_over_units)
smooth.defjvp(lambda primals, tangents: tuple(map(spread_over_units, (*primals, *tangents))))


def test_a_loop_in_a_custom_derivative_keeps_the_path_of_each_unit_to_itself():
    def step(ops, p, h, x):
        new = 0.8 * smooth(h["h"]) + ops.matmul(x, p["w"])
        return {"h": new}, new

    learner = compiled(Toy(step, "w"))
    assert {d.kind for d in warned(learner)} == {"truncated"}
    assert learner.report().groups[0].transition == (("h", "h"),)


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_a_callback_without_a_result_changes_nothing(rule):
    def step(ops, p, h, x):
        new = 0.5 * h["h"] + ops.matmul(x, p["w"])
        jax.debug.callback(lambda total: None, new.sum())
        return {"h": new}, new

    assert_exact(Toy(step, "w"), rule=rule)

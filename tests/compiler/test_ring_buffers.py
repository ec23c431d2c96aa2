"""A write of some slots at a place that data choose is a selection, however it is spelled."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from every_path import Paths

import braintrace
from braintrace._compiler.frontend.slot_writes import writes_as_selections
from braintrace._jax import equations_inside
from braintrace._jaxpr import carries_derivative, evaluate_all, inlined, program_of

BATCH, INPUTS, SLOTS, UNITS, STEPS = 3, 2, 4, 2, 6
pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


# --- attention over a ring buffer


def by_where(buffer, place, value):
    here = jnp.arange(SLOTS) == place % SLOTS
    return jnp.where(here[:, None], jnp.expand_dims(value, -2), buffer)


def by_at(buffer, place, value):
    return buffer.at[..., place % SLOTS, :].set(value)


def by_slice(buffer, place, value):
    starts = (0,) * (buffer.ndim - 2) + (place % SLOTS, 0)
    return jax.lax.dynamic_update_slice(buffer, jnp.expand_dims(value, -2), starts)


def per_sample(buffer, place, value):
    """The place of each sample is its own, as it is for indices of a batch."""
    if buffer.ndim == 2:
        return buffer.at[place % SLOTS].set(value)
    places = jnp.broadcast_to(place, buffer.shape[:1])
    return buffer.at[jnp.arange(buffer.shape[0]), places % SLOTS].set(value)


def mapped(buffer, place, value):
    if buffer.ndim == 2:
        return by_at(buffer, place, value)
    return jax.vmap(by_at, in_axes=(0, None, 0))(buffer, place, value)


def two_slots(buffer, place, value):
    """A value in one slot and its half in the next one."""
    both = jnp.stack([place, place + 1]) % SLOTS
    return buffer.at[..., both, :].set(jnp.stack([value, value / 2], axis=-2))


def two_slots_by_where(buffer, place, value):
    return by_where(by_where(buffer, place, value), place + 1, value / 2)


def in_a_branch(buffer, place, value):
    """Write by the branch that is taken, on every step."""
    is_even = place % 2 == 0
    return jax.lax.cond(is_even, by_at, lambda b, p, v: by_slice(b, p, v), buffer, place, value)


def in_a_scan(buffer, place, value):
    def write(buffer, step):
        return by_at(buffer, place + step, value / (1 + step)), None

    return jax.lax.scan(write, buffer, jnp.arange(2))[0]


def by_sum(buffer, place, value):
    """Empty a slot and add the value in two parts."""
    emptied = by_at(buffer, place, jnp.zeros_like(value))
    half = emptied.at[..., place % SLOTS, :].add(0.3 * value)
    return half.at[..., place % SLOTS - SLOTS, :].add(0.7 * value)


SPELLINGS = {
    "at": (by_at, by_where),
    "dynamic_update_slice": (by_slice, by_where),
    "a place for each sample": (per_sample, by_where),
    "mapped": (mapped, by_where),
    "two slots": (two_slots, two_slots_by_where),
    "in a branch": (in_a_branch, by_where),
    "in a scan": (in_a_scan, two_slots_by_where),
    "a sum": (by_sum, by_where),
}


class Attention(brainstate.nn.Module):
    """Attention over the last keys and values."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        for i, name in enumerate(("key", "value", "query")):
            setattr(self, name, brainstate.ParamState(draw(i, INPUTS, UNITS)))

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.keys = brainstate.HiddenState(draw(5, SLOTS, UNITS) + jnp.zeros((*lead, 1, 1)))
        self.values = brainstate.HiddenState(draw(6, SLOTS, UNITS) + jnp.zeros((*lead, 1, 1)))
        self.count = brainstate.ShortTermState(jnp.asarray(2))

    def update(self, x):
        count, self.count.value = self.count.value, self.count.value + 1
        drive = [braintrace.matmul(x, w.value) for w in (self.key, self.value)]
        self.keys.value = self.write(self.keys.value, count, jnp.tanh(drive[0]))
        self.values.value = self.write(self.values.value, count, drive[1])
        scores = jnp.einsum("...nu,...u->...n", self.keys.value, x @ self.query.value)
        return jnp.einsum("...n,...nu->...u", jax.nn.softmax(scores), self.values.value)


class PerSampleCount(Attention):
    """One buffer with a counter for each sample, of which one is ahead."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        if batch_size is not None:
            self.count = brainstate.ShortTermState(jnp.arange(batch_size) + 2)

    def update(self, x):
        count, self.count.value = self.count.value, self.count.value + 1
        drive = jnp.tanh(braintrace.matmul(x, self.key.value))
        self.keys.value = self.write(self.keys.value, count, drive)
        of_slots = jnp.tensordot(self.keys.value, jnp.linspace(0.5, 1.5, SLOTS), ((-2,), (0,)))
        return of_slots @ self.value.value + x @ self.query.value


def inputs():
    return np.random.default_rng(7).normal(size=(STEPS, BATCH, INPUTS))


@functools.cache
def paths_of(name):
    return Paths(functools.partial(Attention, SPELLINGS[name][0]), inputs())


@functools.cache
def spelled_out(write):
    """What several spellings are held against."""
    return Paths(functools.partial(Attention, write), inputs())


@functools.cache
def exact_of(write):
    return spelled_out(write).bptt()


def exact(name):
    return exact_of(SPELLINGS[name][1])


@functools.cache
def sequence_of(write):
    return spelled_out(write).sequence()


# Samples at places of their own are below, and slices are mapped by the compiler.
@pytest.mark.parametrize("name", ["at"])
@pytest.mark.core
def test_it_learns_as_by_backpropagation(name):
    found = paths_of(name).sequence()
    assert paths_of(name).learner.graph.diagnostics == ()
    assert_gradients_close(found, exact(name), 1e-12, name)
    assert_gradients_close(found, sequence_of(SPELLINGS[name][1]), 1e-12, name)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("at", Paths.own_gradient),
        ("at", Paths.foreign_vmap),
        ("dynamic_update_slice", Paths.mapped_by_the_compiler),
    ],
)
def test_every_path(name, path):
    assert_gradients_close(path(paths_of(name)), exact(name), 1e-12)


def test_samples_that_are_at_places_of_their_own():
    paths = Paths(functools.partial(PerSampleCount, per_sample), inputs())
    found = paths.sequence()
    assert paths.learner.graph.diagnostics == ()
    assert_gradients_close(found, paths.bptt(), 1e-12)


def test_a_buffer_is_marked_alike_in_both_spellings():
    class Plain(Attention):
        def update(self, x):
            count, self.count.value = self.count.value, self.count.value + 1
            self.keys.value = self.write(self.keys.value, count, jnp.tanh(x @ self.key.value))
            return self.keys.value.sum(-2) @ self.value.value + x @ self.query.value

    by_spelling = [Paths(functools.partial(Plain, write), inputs()) for write in (by_at, by_where)]
    expected = by_spelling[1].bptt()
    for paths in by_spelling:
        assert_gradients_close(paths.sequence(), expected, 1e-12)


def test_a_write_of_more_slots_than_the_limit_stays():
    class Wide(Attention):
        def update(self, x):
            count, self.count.value = self.count.value, self.count.value + 1
            drive = jnp.stack([braintrace.matmul(x, self.key.value)] * 3, axis=-2)
            place = jnp.clip(count, 0, 1)
            kept = jax.lax.dynamic_update_slice(self.keys.value, drive, (0, place, 0))
            self.keys.value = kept + 0.1 * drive[:, :1]
            return self.keys.value.sum(-2) @ self.value.value + x @ self.query.value

    options = {"batch_size": BATCH}
    make = functools.partial(braintrace.compile, Wide(None), "d_rtrl", inputs()[0], **options)
    assert make().graph.diagnostics == ()
    with pytest.warns(braintrace.ApproximationWarning, match="dynamic_update_slice"):
        make(unroll_limit=2)


def test_a_slot_that_is_read_and_written_back_is_reported():
    def decayed(buffer, place, value):
        kept = jnp.take(buffer, place % SLOTS, axis=-2)
        return by_at(buffer, place, 0.9 * kept + value)

    with pytest.warns(braintrace.ApproximationWarning, match="through `gather`, which couples"):
        braintrace.compile(Attention(decayed), "d_rtrl", inputs()[0], batch_size=BATCH)


# --- every mode of indexing


BUFFER = (BATCH, 5, UNITS)
ROWS = np.arange(BATCH)
MODES = ("drop", "fill", "clip", "promise_in_bounds", None)
WRITES = {
    "one for all": ((BATCH, UNITS), lambda at, i: at[:, i[0]]),
    "one of each": ((BATCH, UNITS), lambda at, i: at[ROWS, i]),
    "an element": ((BATCH,), lambda at, i: at[:, i[0], 1]),
    "two places of one": ((), lambda at, i: at[1, i[0], i[0] // 2]),
    "several": ((BATCH, 2, UNITS), lambda at, i: at[:, jnp.stack([i[0], i[0] + 1])]),
    "several of each": (
        (BATCH, 2, UNITS),
        lambda at, i: at[ROWS[:, None], jnp.stack([i, i + 1], -1)],
    ),
    "backward rows": ((BATCH, UNITS), lambda at, i: at[ROWS[::-1], i]),
}
INSIDE, OUTSIDE = (0, 3, -2), (7, -1, -9)


def names_with_derivatives(equations):
    passing = (e for e in equations if any(map(carries_derivative, e.outvars)))
    return {equation.primitive.name for equation in passing}


def selection_of(write, place, value):
    """A write as a selection; there is no scatter left in it that a derivative passes."""
    program = program_of(inlined(jax.make_jaxpr(write)(draw(1, *BUFFER), value, place)))
    rewritten = writes_as_selections(program, program.out_atoms, 32)
    names = names_with_derivatives(rewritten.equations)
    assert names.isdisjoint({"scatter", "scatter-add", "dynamic_update_slice"})
    return lambda *arguments: evaluate_all(rewritten.jaxpr, [*arguments], {})[0]


def found_of(writes, places, value):
    """Of each place, of each write: itself and its derivatives, rewritten and by JAX alone.

    All are one program.
    """
    buffer, cotangent = draw(1, *BUFFER), draw(2, *BUFFER)
    pairs = [(selection_of(write, places[0], value), write) for write in writes]

    def results(way, place):
        after, pull = jax.vjp(lambda b, v: way(b, v, place), buffer, value)
        return after, pull(cotangent)

    all_ways = jax.jit(lambda place: [[results(way, place) for way in pair] for pair in pairs])
    return [all_ways(place) for place in places]


def assert_same(*found):
    """What is rewritten gives what JAX gives."""
    for selected, expected in found:
        jax.tree.map(np.testing.assert_array_equal, selected, expected)


def places_of(mode):
    return [np.asarray(place) for place in (INSIDE, OUTSIDE)[: 1 + (mode != "promise_in_bounds")]]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("one of each", "promise_in_bounds"),
        ("an element", "clip"),
        ("two places of one", "drop"),
        ("several", None),
        ("several of each", "promise_in_bounds"),
        ("backward rows", None),
    ],
)
def test_a_write_is_what_it_is_in_jax(name, mode):
    shape, at = WRITES[name]

    def write(buffer, value, i):
        return at(buffer.at, i).set(value, mode=mode)

    for (found,) in found_of([write], places_of(mode), draw(3, *shape)):
        assert_same(found)


@functools.cache
def sums(name):
    """What `found_of` says of the sums of every mode."""
    shape, at = WRITES[name]

    def of_mode(mode):
        return lambda buffer, value, i: at(buffer.at, i).add(value, mode=mode)

    return found_of([*map(of_mode, MODES)], places_of(None), draw(3, *shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["one for all", "one of each", "an element", "two places of one"])
def test_a_sum_is_what_it_is_in_jax(name, mode):
    assert_same(*(sums(name)[k][MODES.index(mode)] for k, _ in enumerate(places_of(mode))))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64])
def test_indices_of_any_dtype(dtype):
    places = [np.full(BATCH, place, dtype) for place in (0, 3, 120)]
    writes = [lambda b, v, i, m=mode: b.at[ROWS, i].set(v, mode=m) for mode in ("drop", "clip")]
    for found in found_of(writes, places, draw(3, 3, 2)):
        assert_same(*found)


SLICES = {
    "a slot": ((BATCH, 1, UNITS), lambda i: (0, i, 0)),
    "a window": ((BATCH, 3, UNITS), lambda i: (0, i, 0)),
    "a part of it": ((2, 3, 1), lambda i: (1, i, 1)),
    "two places": ((1, 2, UNITS), lambda i: (i, i - 1, 0)),
}
STARTS = [np.asarray(place) for place in (0, 2, 4, 9, -1, -20)]


@pytest.mark.parametrize("name", ["a slot", "two places"])
def test_a_slice_is_what_it_is_in_jax(name):
    shape, starts = SLICES[name]

    def write(buffer, value, i):
        return jax.lax.dynamic_update_slice(buffer, value, starts(i))

    for (found,) in found_of([write], STARTS, draw(3, *shape)):
        assert_same(found)


def test_slices_of_all_samples_are_what_they_are_in_jax():
    def write(buffer, value, i):
        one = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(one)(buffer, value, i + ROWS)

    for (found,) in found_of([write], STARTS, draw(3, BATCH, 2, UNITS)):
        assert_same(found)


def test_a_branch_with_an_infinite_derivative_stays_a_branch():
    """All branches of a selection are differentiated, also those that are not taken."""

    def step(buffer, place, value):
        def write(buffer):
            return buffer.at[:, place].set(jnp.sqrt(value))

        return jax.lax.cond(jnp.any(value > 0), write, lambda b: b, buffer)

    program = program_of(inlined(jax.make_jaxpr(step)(draw(1, *BUFFER), 1, draw(2, BATCH, UNITS))))
    rewritten = writes_as_selections(program, program.out_atoms, 32)
    (branch,) = (e for e in rewritten.equations if e.primitive.name == "cond")
    inside = names_with_derivatives(equations_inside(branch))
    assert "select_n" in inside
    assert "scatter" not in inside


def test_writes_at_constant_places_and_of_other_results_stay():
    def step(buffer, place):
        kept = buffer.at[:, 2].set(1.0)
        return kept, buffer.at[:, place].set(1.0)

    program = program_of(inlined(jax.make_jaxpr(step)(draw(1, *BUFFER), 1)))
    assert writes_as_selections(program, program.out_atoms[:1], 32) is program

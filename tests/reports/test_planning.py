"""What `braintrace.plan` says of a learner, beside what XLA says of the program that it runs."""

import dataclasses
import functools
import gc

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from matrices import csr
from models import small

import braintrace
from braintrace._learner.calls.options import Options
from braintrace._learner.calls.request import Request
from braintrace._learner.driver import prepared
from braintrace._planning.program import PlannedProgram

STEPS, BATCH = 8, 16


class Cell(brainstate.nn.Module):
    """A leaky state of some shape; what drives it is the subclass's."""

    shape: tuple = (64,)

    def __init__(self, **weights):
        super().__init__()
        self.params = {
            name: brainstate.ParamState(jax.device_put(np.full(shape, 0.1, np.float32)))
            for name, shape in weights.items()
        }

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))

    def update(self, x):
        weights = {name: state.value for name, state in self.params.items()}
        self.h.value = jnp.tanh(0.5 * self.h.value + self.drive(x, **weights))
        return self.h.value


class Convolution(Cell):
    shape = (16, 8)

    def drive(self, x, kernel):
        numbers = ("NWC", "WIO", "NWC")
        return braintrace.conv(x, kernel, strides=(1,), padding="SAME", dimension_numbers=numbers)


class Embedding(Cell):
    def drive(self, index, table, w):
        return braintrace.embedding(index, table) + braintrace.matmul(self.h.value, w)


class Lora(Cell):
    def drive(self, x, left, right):
        return braintrace.lora_matmul(x, left, right)


CONNECTED = np.random.default_rng(0).random((64, 64)) < 0.1
MATRIX = csr(CONNECTED.astype(np.float32))


class Sparse(Cell):
    def drive(self, x, entries, w):
        recurrent = braintrace.sparse_matmul(self.h.value, entries, sparse_mat=MATRIX)
        return recurrent + braintrace.matmul(x, w)


class Adaptive(Cell):
    """Two coupled states, and a readout."""

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))

    def update(self, x):
        w, r, out = (self.params[name].value for name in ("w", "r", "out"))
        spikes = jax.nn.sigmoid(self.h.value - self.a.value - 1.0)
        drive = braintrace.matmul(x, w) + braintrace.matmul(spikes, r)
        self.h.value = 0.9 * self.h.value * (1 - spikes) + drive
        self.a.value = 0.95 * self.a.value + 0.1 * spikes
        return self.h.value @ out


FLOATS, INDICES = np.zeros((BATCH, 32), np.float32), np.zeros(BATCH, np.int32)
MODELS = {
    "leaky": (lambda: braintrace.nn.LeakyRNN(32, 128), FLOATS),
    "gru": (lambda: braintrace.nn.GRUCell(32, 64), FLOATS),
    "lstm": (lambda: braintrace.nn.LSTMCell(32, 64), FLOATS),
    "indrnn": (lambda: braintrace.nn.IndRNN(32, 128), FLOATS),
    "lru": (lambda: braintrace.nn.LRUCell(32, 64, 32), FLOATS),
    "adaptive": (lambda: Adaptive(w=(32, 64), r=(64, 64), out=(64, 8)), FLOATS),
    "conv": (lambda: Convolution(kernel=(3, 4, 8)), np.zeros((BATCH, 16, 4), np.float32)),
    "embedding": (lambda: Embedding(table=(100, 64), w=(64, 64)), INDICES),
    "sparse": (lambda: Sparse(entries=MATRIX.data.shape, w=(32, 64)), FLOATS),
    "lora": (lambda: Lora(left=(32, 4), right=(4, 64)), FLOATS),
}
WAYS = {
    "from zero": {"method": "etrace_grad"},
    "chunks": {"method": "etrace_grad", "chunk_size": 4, "from_zero": False},
    "stream": {"method": "etrace_online"},
}
ROWS = [
    ("leaky", "stream", "d_rtrl"),
    ("adaptive", "stream", "d_rtrl"),
    ("lora", "from zero", "d_rtrl"),
]


def memory_of(learner, x, method, chunk_size="auto", from_zero=True):
    """What XLA says of the program of a learner that is there."""
    algorithm, xs = learner.algorithm, np.zeros((STEPS, *x.shape), x.dtype)

    def step_fn(x):
        return jnp.sum(jnp.abs(learner(x)) ** 2)

    def update_fn(gradients):
        for path, state in algorithm.param_states.items():
            state.value = jax.tree.map(jnp.subtract, state.value, gradients[path])

    options = Options(step_fn=step_fn, chunk_size=chunk_size)
    if method == "etrace_online":
        options = dataclasses.replace(options, update_fn=update_fn)
    request = Request(method, (xs,), options)
    states = algorithm.states_of_model
    driver, arguments = prepared(learner.parts, request, states, list)
    is_zero = method == "etrace_grad" and from_zero
    traces = None if is_zero else algorithm.traces.carried.read()
    values = [state.value for state in driver.body.states(states)]
    return driver.trace(values, traces, arguments, owned=True).lower().compile().memory_analysis()


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize(("name", "way", "rule"), ROWS)
def test_a_plan_is_what_the_compiler_says(name, way, rule):
    make, x = MODELS[name]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = braintrace.plan(make, rule, shape, batch_size=BATCH, steps=STEPS, **WAYS[way])
    learner = braintrace.compile(make(), rule, x, batch_size=BATCH)
    found = memory_of(learner, x, **WAYS[way])
    assert plan.traces == learner.report().carried_bytes
    # XLA adds a few pointers to the results of each tuple.
    np.testing.assert_allclose(plan.arguments, found.argument_size_in_bytes, rtol=0.01)
    np.testing.assert_allclose(plan.results, found.output_size_in_bytes, rtol=0.01)
    assert plan.aliased == found.alias_size_in_bytes
    assert plan.temp == found.temp_size_in_bytes
    once = plan.arguments + plan.results - plan.aliased
    assert plan.total == once + plan.temp


def planned():
    example = jax.ShapeDtypeStruct((64, 100), jnp.float32)
    return braintrace.plan(
        lambda: braintrace.nn.GRUCell(100, 4000),
        "d_rtrl",
        example,
        batch_size=64,
        steps=8,
        memory=80 * 10**9,
    )


def test_nothing_is_allocated_or_drawn():
    key = np.asarray(jax.random.key_data(random_key()))
    before = sum(array.nbytes for array in jax.live_arrays())
    plan = planned()
    traces = 64 * (4100 * 8000 + 8000 + 4000 * 4000 + 100 * 4000 + 4000)
    assert plan.traces == 4 * traces
    assert plan.fits
    assert not plan.changes
    gc.collect()  # the planned learner, whose States refer to each other
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
    np.testing.assert_array_equal(jax.random.key_data(random_key()), key)


def random_key():
    return brainstate.random.DEFAULT.value


class Product(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jax.device_put(np.ones((3, 5), np.float32)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 5) if batch_size else 5))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


class Read(Product):
    """Its readout stays whole on each device, and has an axis as long as one that is divided."""

    def __init__(self):
        super().__init__()
        self.readout = brainstate.ParamState(jnp.ones((5, 2)))

    def update(self, x):
        return super().update(x) @ self.readout.value


def plan_of_product(network=None, steps=4, batch_size=8, **options):
    example = np.ones((batch_size, 3) if batch_size else 3, np.float32)
    network = Product() if network is None else network
    sizes = {"batch_size": batch_size, "steps": steps}
    return braintrace.plan(network, "d_rtrl", example, **sizes, **options)


@functools.cache
def whole_plan():
    """What several tests compare others with."""
    return plan_of_product()


def test_operations_are_counted():
    plan = plan_of_product(method="predict")
    assert plan.flops == 8 * (2 * 3 * 5 + 2 * 5)  # the product; the decay and the sum
    assert plan.traces == 4 * 8 * 3 * 5
    assert plan.parameters == 4 * 3 * 5
    assert plan.states == 4 * 8 * 5
    unmarked = plan_of_product(Read(), method="predict")
    assert unmarked.flops == plan.flops + 8 * 2 * 5 * 2


def test_a_model_that_is_there_stays_as_it_is():
    model = Product()
    plan = plan_of_product(model)
    assert list(model.states()) == [("w",)]
    assert dataclasses.astuple(plan) == dataclasses.astuple(plan_of_product(Product))


def test_samples_and_outputs_are_divided():
    whole = plan_of_product(method="etrace_online", batch_size=8)
    mesh = AbstractMesh((4, 5), ("data", "units"))
    by_sample = plan_of_product(method="etrace_online", mesh=mesh)
    assert by_sample.traces == whole.traces // 4
    assert by_sample.states == whole.states // 4
    assert by_sample.parameters == whole.parameters
    assert by_sample.devices == 4
    both = plan_of_product(method="etrace_online", mesh=mesh, model="units")
    assert both.traces == whole.traces // 20
    assert both.parameters == whole.parameters // 5
    assert both.devices == 20
    chunk = {"method": "etrace_grad", "steps": 4, "chunk_size": 4, "mesh": mesh}
    of_samples, of_both = (plan_of_product(model=m, **chunk) for m in (None, "units"))
    assert of_both.records == of_samples.records // 5 > 0


def test_a_replicated_weight_of_the_length_of_the_units_stays_replicated_when_written():
    """An update of a readout writes all of it on every device."""

    @small({"h": (8,)}, w=np.ones((3, 8)), readout=np.ones((8, 2)))
    def layer(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + braintrace.matmul(x, self.w.value))
        return self.h.value @ self.readout.value

    def results(**options):
        options |= {"steps": 5, "method": "etrace_online"}
        return braintrace.plan(layer, "d_rtrl", np.ones((4, 3)), batch_size=4, **options).results

    bytes_of_w, bytes_of_h, bytes_of_trace = 4 * 3 * 8, 4 * 4 * 8, 4 * 4 * 3 * 8
    saved = results() - results(mesh={"data": 1, "model": 2}, model="model")
    assert saved == (bytes_of_w + bytes_of_h + bytes_of_trace) // 2


def test_concatenated_gates_are_divided_in_their_traces_alone():
    """Their weight is replicated, as `shard` has it: a device has all gates of its units."""

    def plan(**options):
        make, x = MODELS["gru"]
        options |= {"steps": STEPS, "method": "etrace_online"}
        return braintrace.plan(make, "d_rtrl", x, batch_size=BATCH, **options)

    whole = plan()
    both = plan(mesh={"data": 8, "model": 2}, model="model")
    assert both.traces == whole.traces // 16
    candidate = 4 * (32 + 64 + 1) * 64
    assert both.parameters == whole.parameters - candidate // 2


def test_what_does_not_fit_is_told_with_what_would():
    options = {"method": "etrace_grad", "from_zero": False, "steps": 64, "chunk_size": 64}
    whole = plan_of_product(**options)
    assert whole.fits is None
    plan = plan_of_product(**options, memory=whole.total // 2)
    assert plan.fits is False
    changes = {change.what: change for change in plan.changes}
    devices = changes["4 devices, the batch divided by 4"]
    assert devices.fits
    assert devices.total == plan_of_product(**options, mesh={"data": 4}).total
    (chunk,) = (change for change in plan.changes if change.what.startswith("chunk_size="))
    shorter = options | {"chunk_size": int(chunk.what.removeprefix("chunk_size="))}
    assert chunk.total == plan_of_product(**shorter).total
    assert "It does not fit: a device has" in str(plan)
    assert "4 devices, the batch divided by 4" in plan._repr_html_()


def test_smaller_traces_are_tried(monkeypatch):
    """On a CPU, XLA converts traces of half precision in temporary buffers."""
    monkeypatch.setattr(PlannedProgram, "temp_bytes", lambda program: 20_000)
    plan = braintrace.plan(
        lambda: braintrace.nn.IndRNN(60, 70),
        "d_rtrl",
        FLOATS[:, :1].repeat(60, axis=1),
        batch_size=BATCH,
        method="etrace_online",
        memory=200_000,
    )
    changes = {change.what: change for change in plan.changes}
    assert not changes["trace_dtype=jnp.bfloat16"].fits
    assert changes["'es_d_rtrl'"].fits


def test_each_device_has_the_indices_of_sparse_entries(monkeypatch):
    monkeypatch.setattr(PlannedProgram, "temp_bytes", lambda program: 0)
    build, x = MODELS["sparse"]
    whole = braintrace.plan(build, "d_rtrl", x, batch_size=BATCH)
    mesh = {"mesh": {"model": 2}, "data": None, "model": "model"}
    divided = braintrace.plan(build, "d_rtrl", x, batch_size=BATCH, **mesh)
    assert (whole.temp, divided.temp) == (0, 4 * MATRIX.data.size)


def test_an_optimizer_is_counted():
    optax = pytest.importorskip("optax", reason="the extra `optimizers` is not installed")
    adam = optax.adam(1e-3)
    plain, with_adam = whole_plan(), plan_of_product(optimizer=adam)
    assert with_adam.optimizer == 2 * plain.parameters + 4
    assert with_adam.total == plain.total + with_adam.optimizer
    stream = plan_of_product(method="etrace_online", optimizer=adam)
    assert stream.arguments >= stream.optimizer + stream.parameters
    over_units = {"mesh": {"data": 1, "model": 5}, "model": "model", "method": "etrace_online"}
    divided = plan_of_product(optimizer=adam, **over_units)
    assert divided.optimizer == 2 * divided.parameters + 4
    per_unit = plan_of_product(**over_units)
    assert divided.arguments - per_unit.arguments == divided.optimizer
    beside_a_whole_one = plan_of_product(Read, optimizer=adam, **over_units)
    assert beside_a_whole_one.optimizer == 2 * beside_a_whole_one.parameters + 4


def test_a_program_with_an_axis_that_xla_cannot_count_is_not_compiled():
    """It would end the process."""
    too_long = jax.ShapeDtypeStruct((2**31,), jnp.int8)
    of_arrays = {f.name: [] for f in dataclasses.fields(PlannedProgram) if "Array" in str(f.type)}
    program = PlannedProgram(
        traced=jax.jit(jnp.negative).trace(too_long),
        **of_arrays,
        sharded=frozenset(),
        chunk_size=4,
        records=123,
    )
    assert program.temp_bytes() == 123


def test_what_is_not_divided_is_computed_as_a_whole():
    whole, mesh = whole_plan(), {"data": 1, "model": 3}
    assert plan_of_product(mesh=mesh, model="model").flops == whole.flops


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "grad"}, braintrace.OptionError, "`method` is 'grad'"),
        ({"mesh": 8}, braintrace.OptionError, "`mesh` has no axes with names"),
        ({"mesh": {"data": 0}}, braintrace.OptionError, r"`mesh\['data'\]` is 0; expected"),
        ({"mesh": {"data": 2, "x": 2.5}}, braintrace.OptionError, r"`mesh\['x'\]` is 2.5"),
        ({"mesh": {"x": 2}}, braintrace.OptionError, "'data', and the mesh has the axes 'x'"),
        ({"model": "data"}, braintrace.OptionError, "`data` and `model` are both 'data'"),
        ({"mesh": {"data": 3}}, braintrace.ShapeError, "not a multiple of 3 devices"),
        ({"optimizer": object()}, braintrace.OptionError, "not an `optax.GradientTransformation`"),
        ({"network": 3}, braintrace.OptionError, "`network` is 3"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        plan_of_product(**{"mesh": {"data": 2}} | options)


def test_examples_are_arrays_or_their_shapes():
    with pytest.raises(braintrace.BraintraceError, match=r"`example_arguments\[0\]`"):
        braintrace.plan(Product, "d_rtrl", "shape", batch_size=8)


def test_a_model_that_depends_on_numbers_is_refused():
    def make():
        model = Product()
        model.size = int(brainstate.random.rand(1)[0])
        return model

    with pytest.raises(braintrace.OptionError, match="planned from shapes alone"):
        braintrace.plan(make, "d_rtrl", jnp.ones((8, 3)), batch_size=8)

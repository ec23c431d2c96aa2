"""Traces of two coupled states are kept as the parts of one complex array, and in place."""

import copy
import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_same_bits
from backpropagation import through_time
from operation_cases import BATCH, CASES, STEPS, by_name, loss, normal
from ops_catalogue import restored_registries

import braintrace
from braintrace._brainstate import trace_stateful
from braintrace._core.products import complex_packing, in_place
from braintrace._learner.calls.options import Options
from braintrace._learner.calls.request import Request
from braintrace._learner.methods.gradient import differentiating

BY_NAME = {case.name: case for case in CASES}
MATMUL = BY_NAME["matmul"]
EVERY_OPERATION = (
    "matmul with bias",
    "element_wise",
    "grouped 1-D conv",
    "sparse_matmul with bias",
    "lora_matmul with bias",
    "feedback_matmul with bias",
    "grouped_matmul with bias",
    "embedding",
)
ALONE = ((0.8,),)
EACH_OTHER = ((0.8, -0.3), (0.4, 0.6))
CHAIN = ((0.8, 0.0), (0.4, 0.6))
APART = ((0.8, 0.0), (0.0, 0.6))
FILTERED = ((0.8, -0.3, 0.0), (0.4, 0.6, 0.0), (0.5, 0.2, 0.9))
CIRCLE = ((0.8, 0.0, -0.3), (0.4, 0.6, 0.0), (0.0, 0.5, 0.7))
STAR = ((0.8, 0.2, -0.3, 0.1), (0.4, 0.6, 0, 0), (0.3, 0, 0.5, 0), (-0.2, 0, 0, 0.7))


def next_states(mixing, states, drive):
    """New states; every one reads the old ones that its row of ``mixing`` names."""
    drive = jnp.tanh(drive)
    return [
        sum(factor * jnp.sin(h) for factor, h in zip(row, states, strict=True) if factor) + drive
        for row in mixing
    ]


def output(new, old, late):
    """What a model returns; it may also read the last state as it was before the step."""
    return sum((a + 1) * h for a, h in enumerate(new)) + (0.5 * old[-1] if late else 0.0)


class Coupled(brainstate.nn.Module):
    """Coupled states, fed by one operation."""

    def __init__(self, case, mixing, dtype=jnp.float32, late=False):
        super().__init__()
        self.case, self.mixing, self.dtype, self.late = case, mixing, dtype, late
        self.parameters_of = {
            name: brainstate.ParamState(jnp.asarray(np.asarray(value).astype(dtype)))
            for name, value in case.parameters.items()
        }

    def init_state(self, batch_size=None, **kwargs):
        shape = (batch_size, *self.case.hidden)
        self.hidden = {
            f"h{a}": brainstate.HiddenState(jnp.zeros(shape, self.dtype))
            for a in range(len(self.mixing))
        }

    def update(self, x):
        values = {name: state.value for name, state in self.parameters_of.items()}
        old = [state.value for state in self.hidden.values()]
        new = next_states(self.mixing, old, self.case.marked(x.astype(self.dtype), values))
        for state, value in zip(self.hidden.values(), new, strict=True):
            state.value = value
        return output(new, old, self.late)


@functools.cache
def bptt(name, mixing, dtype="float32", late=False, times=1):
    """The gradient of the losses of a sequence, run for the last of some times."""
    case = BY_NAME[name]

    def step(parameters, old, x, is_last):
        states = next_states(mixing, old, case.plain(x, parameters))
        return states, jnp.where(is_last, loss(output(states, old, late)), 0.0)

    start = [jnp.zeros((BATCH, *case.hidden), dtype)] * len(mixing)
    parameters = {k: np.asarray(leaf).astype(dtype) for k, leaf in case.parameters.items()}
    xs = np.concatenate([inputs_of(case).astype(dtype)] * times)
    is_last = np.arange(len(xs)) >= len(xs) - STEPS
    return through_time(step, parameters, start, xs, is_last)


def compiled(case, mixing=EACH_OTHER, dtype=jnp.float32, late=False, **options):
    model = Coupled(case, mixing, dtype, late)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    algorithm = braintrace.D_RTRL(model, **options)
    algorithm.compile_graph(inputs_of(case)[0])
    return algorithm


def inputs_of(case):
    """As an array of NumPy: to take a step of another one is a program."""
    return np.asarray(case.inputs)


def of_stream(algorithm):
    """The gradient of the summed loss, one call of the algorithm after the other."""
    parameters = algorithm.model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(lambda x: loss(algorithm(x)), parameters)(x)

    steps = [step(x) for x in inputs_of(algorithm.model.case)]
    return by_name(jax.tree.map(lambda *found: np.sum(found, axis=0), *steps))


def of_sequence(algorithm, chunk_size):
    """The gradient of a sequence."""
    learner = braintrace.Learner(algorithm)
    learner.reset_state(BATCH)
    return of_call(learner, chunk_size)


def of_call(learner, chunk_size):
    """The gradient of a sequence that goes on from where the learner is."""
    found = learner.etrace_grad(
        inputs_of(learner.algorithm.model.case),
        step_fn=lambda x: loss(learner(x)),
        reduction="sum",
        chunk_size=chunk_size,
    )
    return by_name(found)


def dtypes_of_traces(algorithm):
    """Of the arrays that a program carries; a user finds one array per state."""
    kept = jax.tree.leaves(algorithm.traces.value)
    assert not any(jnp.iscomplexobj(leaf) for leaf in kept)
    return sorted(str(leaf.dtype) for leaf in jax.tree.leaves(algorithm.traces.carried.value))


@pytest.mark.parametrize(
    "case", [BY_NAME["lora_matmul with bias"], BY_NAME["feedback_matmul with bias"]]
)
@pytest.mark.core
def test_the_gradient_equals_bptt_for_every_operation(case):
    expected = bptt(case.name, EACH_OTHER)
    algorithm = compiled(case)
    assert set(dtypes_of_traces(algorithm)) == {"complex64"}
    found = of_stream(algorithm)
    assert_gradients_close(found, expected, 1e-5, f"{case.name}, stream")
    found = of_sequence(algorithm, 3)
    assert_gradients_close(found, expected, 1e-5, f"{case.name}, chunks of 3")


@pytest.mark.parametrize(
    ("mixing", "dtypes"),
    [
        (((0.8, 0.0), (0.4, 0.6)), ["complex64"]),
        (((0.8, 0.0, -0.3), (0.4, 0.6, 0.0), (0.0, 0.5, 0.7)), ["complex64", "float32"]),
    ],
)
def test_other_couplings_equal_bptt(mixing, dtypes):
    expected = bptt("matmul", mixing)
    algorithm = compiled(MATMUL, mixing)
    assert dtypes_of_traces(algorithm) == dtypes
    assert_gradients_close(of_stream(algorithm), expected, 1e-5, "stream")
    assert_gradients_close(of_sequence(algorithm, 1), expected, 1e-5, "chunks of 1")


def test_a_sequence_goes_on_from_packed_traces():
    algorithm = compiled(MATMUL)
    learner = braintrace.Learner(algorithm)
    for chunk_size in (1, 3, STEPS):
        learner.reset_state(BATCH)
        of_call(learner, STEPS)
        found = of_call(learner, chunk_size)
        assert_gradients_close(found, bptt("matmul", EACH_OTHER, times=2), 1e-5)
    zero = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), algorithm.zero_traces())
    kept = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), algorithm.traces.value)
    assert kept == zero


@pytest.mark.usefixtures("optimised")
def test_an_output_that_reads_one_of_two_old_states():
    algorithm = compiled(MATMUL, late=True)
    assert dtypes_of_traces(algorithm) == ["complex64"]
    assert_gradients_close(of_stream(algorithm), bptt("matmul", EACH_OTHER, late=True), 1e-5)


@pytest.mark.usefixtures("optimised")
def test_traces_of_coupled_states_in_double_precision_are_exact(float64):
    algorithm = compiled(MATMUL, dtype=jnp.float64)
    assert dtypes_of_traces(algorithm) == ["complex128"]
    expected = bptt("matmul", EACH_OTHER, dtype="float64")
    assert_gradients_close(of_stream(algorithm), expected, 1e-12)


def test_separate_on_other_backends(monkeypatch):
    monkeypatch.setattr(complex_packing, "BACKENDS", ())
    algorithm = compiled(MATMUL)
    assert dtypes_of_traces(algorithm) == ["float32"] * 2
    assert_gradients_close(of_stream(algorithm), bptt("matmul", EACH_OTHER), 1e-5)


@pytest.mark.usefixtures("optimised")
def test_traces_wider_than_the_model():
    algorithm = compiled(MATMUL, dtype=jnp.bfloat16, trace_dtype=jnp.float32)
    assert dtypes_of_traces(algorithm) == ["complex64"]
    assert_gradients_close(of_stream(algorithm), bptt("matmul", EACH_OTHER), 0.05)


WIDE = dataclasses.replace(MATMUL, sample=(48,), hidden=(64,), parameters={"w": normal(0, 48, 64)})
BYTES_OF_A_TRACE = BATCH * 48 * 64 * np.dtype("float32").itemsize


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("mixing", "dtypes"),
    [
        pytest.param(EACH_OTHER, ["complex64"], id="each other"),
        pytest.param(FILTERED, ["complex64", "float32"], id="a filter of both"),
    ],
)
def test_a_step_copies_no_trace(mixing, dtypes):
    """XLA copies separate traces of coupled states, and those that are read after they change."""
    algorithm = compiled(WIDE, mixing)

    def step(values, traces):
        def total(values):
            outputs, _, after = algorithm.compiled.single_step(values, traces)
            return loss(outputs[0]), after

        return jax.grad(total, has_aux=True)(values)

    states = algorithm.states_of_step
    now = [state.value for state in states.values()]
    values = algorithm.compiled.inputs(states, now, (WIDE.inputs[0],))
    donating = jax.jit(step, donate_argnums=1)
    program = donating.lower(values, algorithm.traces.carried.value).compile()
    assert dtypes_of_traces(algorithm) == dtypes
    assert program.memory_analysis().temp_size_in_bytes < BYTES_OF_A_TRACE


@pytest.mark.parametrize(("mixing", "chunk", "arrays"), [(((0.8, -0.3), (0.4, 0.6)), 2, 2)])
@pytest.mark.usefixtures("optimised")
def test_a_loop_over_chunks_copies_no_trace(mixing, chunk, arrays, monkeypatch):
    """It would where XLA cannot tell that a chunk's gradient has read the traces before it."""
    monkeypatch.setattr(in_place, "BLOCK_BYTES", 1)
    inputs = np.tile(inputs_of(WIDE), (1, 4, 1))
    model = Coupled(WIDE, mixing)
    learner = braintrace.compile(model, "d_rtrl", inputs[0], batch_size=4 * BATCH)
    arguments = (inputs,), None, (None, [])
    options = Options(step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=chunk)
    request = Request("etrace_grad", arguments[0], options)
    body = differentiating(learner, request, arguments)
    values = [state.value for state in body.states({})]
    donating = jax.jit(body.run, donate_argnums=1)
    traces = learner.algorithm.traces.carried.value
    memory = donating.lower(values, traces, *arguments).compile().memory_analysis()
    of_traces = sum(leaf.nbytes for leaf in jax.tree.leaves(traces))
    assert memory.temp_size_in_bytes < arrays * of_traces


def product(x, w):
    return x @ w


def conjugated(hidden_dim, trace):
    return {"weight": trace["weight"] * jnp.conj(hidden_dim)[..., None, :]}


def of_real_parts(hidden_dim, trace):
    return {"weight": jnp.real(trace["weight"]) * jnp.real(hidden_dim)[..., None, :]}


def rounded(hidden_dim, trace):
    return {"weight": (trace["weight"] * hidden_dim[..., None, :]).astype(jnp.float32)}


def operation_with(rule):
    spec = braintrace.get_primitive_spec(braintrace.etp_mm_p)
    return braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(
            name="etp_test_conjugated",
            impl=product,
            yw_to_w=rule,
            xy_to_dw=spec.xy_to_dw,
            init_drtrl=spec.init_drtrl,
            init_pp=spec.init_pp,
            trainable_invars_fn=lambda params: {"weight": 1},
            batched=True,
        )
    )


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("rule", [conjugated, of_real_parts, rounded])
def test_only_rules_that_compute_with_complex_numbers_see_them(rule):
    """They change no real number: such a rule is right as long as it sees no other."""
    with restored_registries():
        primitive = operation_with(rule)
        case = dataclasses.replace(MATMUL, marked=lambda x, p: primitive.bind(x, p["w"]))
        algorithm = compiled(case)
        found, expected = of_stream(algorithm), bptt("matmul", EACH_OTHER)
        report = braintrace.check_primitive(primitive, MATMUL.inputs[0], case.parameters["w"])
    assert report.ok
    assert dtypes_of_traces(algorithm) == ["float32"] * 2
    assert_gradients_close(found, expected, 1e-5)


def after_steps(algorithm, steps=2):
    for x in inputs_of(algorithm.model.case)[:steps]:
        algorithm(x)
    return algorithm


@pytest.mark.core
def test_saved_traces_are_the_same_on_every_backend(monkeypatch):
    packed = after_steps(compiled(MATMUL))
    (state,) = packed.states(braintrace.EligibilityTraces).values()
    saved = jax.tree.map(np.asarray, state.value)
    assert list(saved) == ["parameters_of/w@mm0>hidden/h0", "parameters_of/w@mm0>hidden/h1"]
    monkeypatch.setattr(complex_packing, "BACKENDS", ())
    apart = after_steps(compiled(MATMUL))
    assert_gradients_close(apart.traces.value, saved, 1e-6)
    for algorithm, dtypes in ((packed, ["complex64"]), (apart, ["float32"] * 2)):
        algorithm.reset_state()
        algorithm.traces.value = saved
        assert dtypes_of_traces(algorithm) == dtypes
        assert_same_bits(jax.tree.map(np.asarray, algorithm.traces.value), saved)
    with pytest.raises(braintrace.ShapeError, match="hidden/h1/weight' is missing"):
        packed.traces.value = {key: saved[key] for key in list(saved)[:1]}


def merged_again(algorithm):
    return brainstate.graph.treefy_merge(*brainstate.graph.treefy_split(algorithm))


def with_copied_state(algorithm):
    twin = brainstate.graph.clone(algorithm)
    twin.traces = algorithm.traces.copy()
    return twin


def taking_over(algorithm):
    twin = brainstate.graph.clone(algorithm)
    twin.reset_state()
    twin.traces.value = algorithm.traces.value
    return twin


def test_copies_carry_packed_traces_of_their_own():
    algorithm = after_steps(compiled(MATMUL))
    ways = [copy.deepcopy, brainstate.graph.clone, merged_again, with_copied_state]
    twins = {way.__name__: way(algorithm) for way in ways}
    before = jax.tree.map(np.asarray, algorithm.traces.value)
    last = taking_over(algorithm)
    after_steps(algorithm)
    for name, twin in twins.items():
        assert_same_bits(twin.traces.value, before, name)
        after_steps(twin)
        assert dtypes_of_traces(twin) == ["complex64"], name
        assert_gradients_close(twin.traces.value, algorithm.traces.value, 1e-6, name)
    assert_same_bits(last.traces.value, before)
    assert dtypes_of_traces(last) == ["complex64"]


def test_a_loop_of_a_users_own_copies_no_trace():
    algorithm = compiled(WIDE)
    parameters = algorithm.model.states(brainstate.ParamState)

    def step(x):
        return brainstate.transform.grad(lambda x: loss(algorithm(x)), parameters)(x)

    def loop(xs):
        return jax.tree.map(lambda leaf: leaf[-1], brainstate.transform.for_loop(step, xs))

    traced = trace_stateful(loop, WIDE.inputs)
    values = [state.value for state in traced.states]
    donating = jax.jit(lambda values: traced.call(values, WIDE.inputs), donate_argnums=0)
    whole = WIDE.parameters["w"].nbytes * STEPS  # for_loop stacks the gradients of the steps
    program = donating.lower(values).compile()
    assert program.memory_analysis().temp_size_in_bytes < whole + BYTES_OF_A_TRACE

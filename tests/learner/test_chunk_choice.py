"""How long the chunks are that ``chunk_size='auto'`` chooses, and what they take."""

import dataclasses

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import named, sequence_gradient, shared_learner

import braintrace
from braintrace._core.traces import size_in_bytes
from braintrace._jax import every_equation
from braintrace._jax_devices import current_device
from braintrace._learner.calls import chunks
from braintrace._learner.calls.chunk_costs import PROCESSOR, Work
from braintrace._learner.calls.chunks import (
    Chunks,
    chunks_of,
    default_budget,
    fastest_length,
    windows_of,
)
from braintrace._learner.calls.options import Options
from braintrace._learner.calls.request import Request
from braintrace._learner.methods.gradient import differentiating
from braintrace._runtime.environment import memory

MIB = 2**20
# A leaky layer of 256 units with 64 samples, a linear one of 64 with 4, and one without traces.
LEAKY = Work(5e6 * 2, 10, 3, 20 * MIB, 5 * MIB, 256 * 1024)
SMALL = Work(3e4, 20, 3, MIB // 8, MIB // 32, 6 * 1024)
FILTERS = Work(5e6 * 2, 10, 3, 128 * 1024, 32 * 1024, 128 * 1024)
WORKS = pytest.mark.parametrize("work", [LEAKY, SMALL, FILTERS], ids=["leaky", "small", "filters"])


def leaky_learner(algorithm="d_rtrl", batch=2, hidden=8, **options):
    brainstate.random.seed(0)
    model = braintrace.nn.LeakyRNN(3, hidden)
    return braintrace.compile(model, algorithm, jnp.ones((batch, 3)), batch_size=batch, **options)


def gradient(learner, xs, step, **options):
    return named(learner.etrace_grad(xs, step_fn=step, reduction="sum", **options))


def sequence(steps, batch=2):
    return jax.random.normal(jax.random.key(0), (steps, batch, 3))


@pytest.mark.parametrize(
    ("work", "steps", "from_zero", "budget", "fewest", "most"),
    [
        # From zero, one chunk needs no trace.
        (LEAKY, 128, True, 1024 * MIB, 128, 128),
        (LEAKY, 4096, True, 1024 * MIB, 4096, 4096),
        # Traces that are carried on are changed in any case.
        (LEAKY, 4096, False, 1024 * MIB, 16, 512),
        # The memory of traces as small as filters costs less than that of records.
        (FILTERS, 4096, True, 1024 * MIB, 2, 512),
        (LEAKY, 1, True, 1024 * MIB, 1, 1),
        # Where not all fits, or the budget is less than the traces.
        (LEAKY, 4096, True, 64 * MIB, 16, 256),
        (LEAKY, 4096, True, 1, 16, 80),
        (FILTERS, 4096, True, 1, 1, 1),
    ],
)
def test_what_is_chosen(work, steps, from_zero, budget, fewest, most):
    assert fewest <= fastest_length(work, steps, from_zero, budget) <= most


@WORKS
@pytest.mark.parametrize("from_zero", [True, False])
def test_records_stay_below_the_budget_or_the_traces(work, from_zero):
    for steps in (1, 7, 100, 1000, 10_000):
        lengths = []
        for budget in (1, MIB, 16 * MIB, 256 * MIB, 4096 * MIB):
            length = fastest_length(work, steps, from_zero, budget)
            parts = -(-steps // length)
            assert length == -(-steps // parts), "parts are equal"
            assert length * work.record_bytes <= max(budget, work.trace_bytes, work.record_bytes)
            lengths.append(length)
        assert lengths == sorted(lengths), "more memory, longer chunks"


@WORKS
def test_memory_is_flat_in_time_beyond_the_budget(work):
    taken = [
        chunks_of(work, Options(memory_budget=2 * MIB), steps, True).record_bytes
        for steps in (20_000, 460_000, 820_000)  # which the same lengths divide
    ]
    assert max(taken) <= max(2 * MIB, work.trace_bytes)
    assert max(taken) < 1.1 * min(taken)


@pytest.mark.parametrize("from_zero", [True, False])
@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"flops": 4, "passes": 1}),
        ({}, {"operations": 4}),
        ({}, {"trace_bytes": 4}),
        ({}, {"trace_entries": 4}),
        ({}, {"record_bytes": 4}),
        ({"record_bytes": 4}, {"update_bytes": 4}),
        ({}, {"gathered": 4}),
        ({"flops": 4}, {"state_size": 4}),
        ({"trace_entries": 4}, {"state_size": 4}),
    ],
    ids=lambda work: " and ".join(work) or "nothing",
)
def test_all_work_takes_time(less, more, from_zero):
    nothing = Work(0, 0, 0, 0, 0, 0)
    for length in (1, 10, 64):
        base, found = (
            dataclasses.replace(nothing, **work).seconds(128, length, from_zero, PROCESSOR)
            for work in (less, less | more)
        )
        assert found > base >= 0


def test_a_given_length_is_taken_as_it_is():
    assert chunks_of(LEAKY, Options(chunk_size=16), 100, True) == Chunks(100, 16, 4 * MIB)
    assert chunks_of(LEAKY, Options(chunk_size=160), 100, True) == Chunks(100, 100, 25 * MIB)


def test_windows_do_not_depend_on_the_device(monkeypatch):
    """Their length is a part of the estimate."""
    learner = leaky_learner(window=1)
    monkeypatch.setattr(chunks, "memory_of", lambda device: 1)
    lengths = (5, 64, 65, 1000, 100_000)
    found = [windows_of(learner.graph, "chunk", Options(), steps) for steps in lengths]
    assert [cut.length for cut in found] == [5, 64, 33, 63, 64]
    assert all(cut.budget is None for cut in found)


def test_windows_from_zero_traces_are_one_chunk_if_it_takes_less_memory_than_traces():
    graph = leaky_learner(hidden=64, window=4).graph
    fitting = size_in_bytes(graph.trace_specs) // graph.record_bytes
    assert fitting > 8

    def length(steps, from_zero=True, graph=graph, **options):
        return windows_of(graph, 4, Options(**options), steps, from_zero).length

    assert length(fitting) == fitting  # the last window is shorter
    assert length(fitting + 1) == 4
    assert length(fitting, from_zero=False) == 4
    assert length(7, chunk_size=7) == length(7, chunk_size=100) == 7
    assert length(7, chunk_size=6) == 4
    assert length(fitting, memory_budget=9 * graph.record_bytes) == 8
    without_traces = leaky_learner("immediate", window=4)
    assert length(8, graph=without_traces.graph) == 4


@pytest.mark.parametrize(
    ("bytes_of_device", "expected"),
    [(None, 2**30), (80 * 2**30, 2**30), (2**30, 2**30 // 10)],
)
def test_the_budget_is_a_share_of_the_device(monkeypatch, bytes_of_device, expected):
    monkeypatch.setattr(chunks, "memory_of", lambda device: bytes_of_device)
    assert default_budget() == expected


def test_the_memory_of_the_device(tmp_path):
    device = current_device()
    for given in (device, device.platform):
        with jax.default_device(given):
            assert current_device() is device
    found = memory.memory_of(device)
    assert found is None or found > 2**26
    own = tmp_path / "own"
    own.write_text("4:memory:/outer/inner\n3:cpu:/\n0::/service\n")
    for name, limit in {
        "memory/outer/inner/memory.limit_in_bytes": "300\n",
        "memory/outer/memory.limit_in_bytes": "200\n",
        "service/memory.max": "100\n",
        "memory.max": "max\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    assert list(memory.limits_of_cgroups(tmp_path, own)) == [300, 200, 100]
    assert list(memory.limits_of_cgroups(tmp_path, tmp_path / "none")) == []


class FakeDevice:
    platform = "gpu"

    def memory_stats(self):
        return {"bytes_limit": 1234, "bytes_in_use": 5}


def test_a_device_may_tell_its_memory():
    assert memory.memory_of(FakeDevice()) == 1234


@pytest.mark.parametrize(
    "algorithm", ["d_rtrl", pytest.param("es_d_rtrl", marks=pytest.mark.nightly)]
)
def test_every_budget_gives_the_same_and_the_report_says_how(algorithm):
    options = {} if algorithm == "d_rtrl" else {"decay_or_rank": 0.7}
    xs, steps = sequence(12), 12
    learner = leaky_learner(algorithm, **options)

    def step(x):
        return jnp.sum(learner(x) ** 2)

    whole = gradient(learner, xs, step)
    (row,) = learner.report().sequences
    assert (row.method, row.steps, row.from_zero) == ("etrace_grad", steps, True)
    assert (row.chunk_size, row.chunks, row.budget) == (steps, 1, default_budget())
    gradient(learner, xs, step)
    *_, row = learner.report().sequences
    assert (row.steps, row.from_zero) == (steps, False)
    traces = learner.report().carried_bytes
    of_step = row.record_bytes // row.chunk_size
    lengths = set()
    for budget in (1, traces + 2 * of_step, traces + 5 * of_step):
        learner.reset_state()
        found = gradient(learner, xs, step, memory_budget=budget)
        assert_gradients_close(found, whole, 1e-5, f"{budget} bytes")
        *_, row = learner.report().sequences
        assert row.budget == budget
        assert row.record_bytes == row.chunk_size * of_step <= max(budget, traces, of_step)
        lengths.add(row.chunk_size)
    assert len(lengths) > 1
    learner.reset_state()
    expected = learner.etrace_evolve(xs)
    learner.reset_state()
    found = learner.etrace_evolve(xs, memory_budget=1)
    assert_gradients_close({"outputs": found}, {"outputs": expected}, 1e-5)
    report = learner.report()
    assert {row.method for row in report.sequences} == {"etrace_grad", "etrace_evolve"}
    printed = f"{row.chunks} of {row.chunk_size}", f"{row.record_bytes:,}", f"{row.budget:,}"
    assert all(text in str(report) and text in report._repr_html_() for text in printed)


def test_what_only_an_update_keeps_takes_no_memory_where_nothing_is_updated():
    """RTRL from zero traces needs one chunk, whose traces are computed in parts if ever."""
    budget, steps, xs = 5_000, 24, np.asarray(sequence(48))

    learner = leaky_learner("rtrl")

    def step(x):
        return jnp.sum(learner(x) ** 2)

    parts = (xs[:steps], xs[steps:])
    first, second = (gradient(learner, part, step, memory_budget=budget) for part in parts)
    found = jax.tree.map(np.add, first, second)
    first, second = learner.report().sequences
    assert first.from_zero and first.chunks == 1
    assert second.chunks > 2 and second.record_bytes <= budget
    assert second.record_bytes / second.chunk_size > first.record_bytes / first.chunk_size
    learner.reset_state()
    assert_gradients_close(found, gradient(learner, xs, step, chunk_size=2 * steps), 1e-5)


def test_a_step_records_what_loss_and_traces_read_and_nothing_else():
    """Of a leaky cell: its drive, the input of its recurrent product, and its new state."""
    case = catalogue.BY_NAME["LeakyRNN"]
    learner = shared_learner(case)
    learner.reset_state()
    sequence_gradient(learner, case, *map(np.asarray, case.sequences(2, 6)), chunk_size=3)
    *_, row = learner.report().sequences
    assert row.record_bytes == row.chunk_size * 3 * case.initial_states(2)["h"].nbytes


def test_traces_of_a_chunk_are_computed_in_parts_that_fit_the_budget():
    """No array of their program has the Jacobians of all steps, each 8 x 8 for two samples."""
    learner, xs = leaky_learner("rtrl"), sequence(24)
    options = Options(step_fn=lambda x: jnp.sum(learner(x) ** 2), memory_budget=5_000)
    arguments = (xs,), None, (None, [])
    body = differentiating(learner, Request("etrace_grad", (xs,), options), arguments)
    values = [state.value for state in body.states({})]
    *_, deferred = jax.eval_shape(body.run, values, None, *arguments)
    program = jax.make_jaxpr(body.finish)(deferred.sources, learner.algorithm.traces.carried.value)
    made = [var.aval for equation in every_equation(program) for var in equation.outvars]
    largest = max(aval.size * aval.dtype.itemsize for aval in made)
    assert largest <= learner.report().carried_bytes < len(xs) * 2 * 8 * 8 * 4


@pytest.mark.nightly
@pytest.mark.optimised
def test_working_memory_is_flat_in_time_beyond_the_budget():
    """What the compiled program takes, from zero traces and on, is about what is said."""
    learner = leaky_learner(batch=8, hidden=32)
    options = Options(step_fn=lambda x: jnp.sum(learner(x) ** 2), memory_budget=2**18)

    def taken(steps, from_zero):
        arguments = (sequence(steps, 8),), None, (None, [])
        request = Request("etrace_grad", arguments[0], options)
        body = differentiating(learner, request, arguments)
        values = [state.value for state in body.states({})]
        traces = None if from_zero else learner.algorithm.traces.carried.value
        compiled = jax.jit(body.run, donate_argnums=1).lower(values, traces, *arguments).compile()
        (cut,) = body.chunks_by_length.values()
        assert cut.record_bytes <= max(2**18, learner.report().carried_bytes)
        found = compiled.memory_analysis()
        return found.temp_size_in_bytes, cut.record_bytes + learner.report().carried_bytes

    short, _ = taken(1000, True)
    long, said = taken(4000, True)
    assert long - short < 3000 * 32, "a loss and its scale for every step"
    assert short < 2.5 * said
    carrying_on, said = taken(4000, False)
    assert carrying_on < 2.5 * said

"""Every operation learns online: exactly on a diagonal recurrence, and as ES-D-RTRL defines."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from operation_cases import BATCH, CASES, STEPS, Diagonal, bptt, by_name, es_d_rtrl, loss

import braintrace
from braintrace._core.products import in_place
from braintrace._graph import Records
from braintrace._jax import open_jaxpr, sub_jaxprs
from braintrace._learner.calls.options import Options
from braintrace._learner.calls.request import Request
from braintrace._learner.methods.gradient import differentiating
from braintrace._rules import ParameterTraces

each_operation = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def gradients(case, algorithm, chunks=(), **options):
    xs = np.asarray(case.inputs)
    learner = braintrace.compile(Diagonal(case), algorithm, xs[0], batch_size=BATCH, **options)

    def step(x):
        return loss(learner(x))

    found = {}
    for chunk in chunks:
        learner.reset_state(BATCH)
        found[chunk] = by_name(
            learner.etrace_grad(xs, step_fn=step, reduction="sum", chunk_size=chunk)
        )
    return learner, found


def chunk_sizes(some):
    return pytest.mark.parametrize("chunks", [pytest.param(some, id="some")])


# An operation is tested by chunks or step by step.
@pytest.mark.rows(
    "some-matmul on more axes",
    "some-element_wise",
    "some-grouped 1-D conv",
    "some-einsum in another order, over positions",
)
@pytest.mark.core
@each_operation
@chunk_sizes([1, 2])
def test_d_rtrl_equals_bptt_for_chunks(case, chunks, monkeypatch):
    """Traces of several steps are updated sample by sample, as large ones are."""
    monkeypatch.setattr(in_place, "BLOCK_BYTES", 1)
    expected = bptt(case)
    _, found = gradients(case, "d_rtrl", chunks)
    for chunk, gradient in found.items():
        assert_gradients_close(gradient, expected, 1e-5, f"{case.name}, chunks of {chunk}")


@pytest.mark.rows(
    "element_wise scalar",
    "lora_matmul with bias",
    "embedding",
)
@each_operation
def test_d_rtrl_equals_bptt_step_by_step(case):
    model, xs = Diagonal(case), np.asarray(case.inputs)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    algorithm = braintrace.D_RTRL(model)
    algorithm.compile_graph(xs[0])
    parameters = model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def step(x):
        return brainstate.transform.grad(lambda x: loss(algorithm(x)), parameters)(x)

    total = step(xs[0])
    for x in xs[1:]:
        total = jax.tree.map(np.add, total, step(x))
    assert_gradients_close(by_name(total), bptt(case), 1e-5, case.name)


@pytest.mark.rows(
    "some-matmul",
    "some-grouped 1-D conv",
    "some-einsum in another order, over positions",
)
@each_operation
@chunk_sizes([2])
def test_es_d_rtrl_equals_its_definition(case, chunks):
    expected = es_d_rtrl(case, alpha=0.7)
    _, found = gradients(case, "es_d_rtrl", chunks, decay_or_rank=0.7)
    for chunk, gradient in found.items():
        assert_gradients_close(gradient, expected, 1e-5, f"{case.name}, chunks of {chunk}")


def sizes(jaxpr):
    """Elements of every array that a jaxpr computes, and whether it does so in a body of it."""
    for equation in jaxpr.eqns:
        yield from ((var.aval.size, False) for var in equation.outvars)
        for body in sub_jaxprs(equation):
            yield from ((size, True) for size, _ in sizes(open_jaxpr(body)[0]))


def largest_array(function, *arguments):
    """Elements of the largest array that a function's jaxpr computes."""
    return max(size for size, _ in sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


@pytest.mark.parametrize("name", ["strided 1-D conv with bias", "lora_matmul with bias"])
def test_a_chunk_builds_no_trace_per_position(name):
    case = next(case for case in CASES if case.name == name)
    learner, _ = gradients(case, "d_rtrl")
    graph = learner.graph
    (relation,) = graph.hidden_param_op_relations
    weights = {
        relation.key: {k: jnp.ones(v.aval.shape) for k, v in relation.trainable_vars.items()}
    }
    steps = 7
    x = jnp.ones((steps, *relation.x_var.aval.shape))
    y = jnp.ones((steps, *relation.y_var.aval.shape))
    group = graph.hidden_groups[0]
    records = Records(
        x={relation.key: x},
        D={"h<h": jnp.ones((steps, *group.shape))},
        Df={f"{relation.key}>h": y},
    )

    def gradient(records, signal):
        return ParameterTraces().gradient(graph, weights, records, signal, {})

    trace = sum(leaf.size for leaf in jax.tree.leaves(learner.algorithm.zero_traces()))
    largest = largest_array(gradient, records, {"h": y})
    assert largest <= max(x.size, y.size)
    assert largest < steps * trace


@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_a_chunk_from_zero_traces_builds_nothing_of_the_size_of_a_table(algorithm):
    """But for the gradient, and no trace of a sample at all."""
    words, units = 101, 4
    case = dataclasses.replace(
        next(case for case in CASES if case.name == "embedding"),
        marked=lambda x, p: braintrace.embedding(x, p["w"]),
        parameters={"w": jnp.ones((words, units))},
        sample=(),
        draw=lambda seed, *shape: jnp.zeros(shape, int),
    )
    xs = case.inputs
    learner = braintrace.compile(Diagonal(case), algorithm, xs[0], batch_size=BATCH)
    arguments = ((xs,), None, (None, []))
    options = Options(step_fn=lambda x: loss(learner(x)), chunk_size=STEPS)
    request = Request("etrace_grad", (xs,), options)
    body = differentiating(learner, request, arguments)
    values = [state.value for state in body.states({})]
    found = [*sizes(jax.make_jaxpr(body.run)(values, None, *arguments).jaxpr)]
    assert max(size for size, _ in found) <= words * units
    assert max(size for size, inside in found if inside) <= words
    report = learner.report()
    traces = {"d_rtrl": 4 * BATCH * words * units, "es_d_rtrl": 4 * BATCH * (words + units + 1)}
    assert report.carried_bytes == traces[algorithm]

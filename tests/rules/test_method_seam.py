"""A learning rule from outside the package; `test_immediate.py` tests its gradients."""

import dataclasses

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ, assert_same_bits
from drivers import (
    build_algorithm,
    build_learner,
    sequence_gradient,
)
from no_past import NoPast, OfRecords
from operation_cases import CASES, Diagonal
from single_steps import BATCH, LENGTH

import braintrace
from braintrace._core.traces import reset_traces, starting_traces, stored_specs
from braintrace._graph import TraceSpec, specs_of


def test_a_chunk_records_what_the_rule_needs_and_is_as_long_as_pays():
    """By the size of the traces, or of the gradient where that is larger."""
    case = catalogue.BY_NAME["ALIF"]
    carried, none = (build_learner(case, name, batch=8).graph for name in ("d_rtrl", "no_past"))
    assert carried.bytes_per_chunk == carried_bytes(carried) == 8 * 2 * none.bytes_per_chunk
    assert none.bytes_per_chunk == case.params()["w_in"].nbytes
    (group,) = none.hidden_groups
    transition = 4 * group.num_positions * len(group.transition)
    assert carried.record_bytes - none.record_bytes == transition > 0


def carried_bytes(graph):
    return sum(spec.nbytes for spec in specs_of(graph.trace_specs))


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no_past", "No_Past", "OF_RECORDS", NoPast])
def test_an_algorithm_announces_its_names(name):
    learner = build_learner(catalogue.BY_NAME["Leaky"], name)
    assert type(learner.algorithm) is NoPast


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("D_RTRL", "D_RTRL"),
        ("Es_D_Rtrl", "ES_D_RTRL"),
        ("ESD_RTRL", "ES_D_RTRL"),
        ("PP_prop", "ES_D_RTRL"),
    ],
)
def test_case_does_not_matter(name, algorithm):
    learner = build_learner(catalogue.BY_NAME["Leaky"], name)
    assert type(learner.algorithm) is getattr(braintrace, algorithm)


def test_unknown_names_are_answered_with_those_there_are():
    with pytest.raises(braintrace.OptionError, match=r"'d_rtrl'.*'pp_prop'.*'no_past'"):
        build_learner(catalogue.BY_NAME["Leaky"], "no_pas")


def test_a_name_belongs_to_one_algorithm():
    """A class defined anew, as in a notebook, takes the place of the one before."""
    named_same = {"names": ("twice",), "method": NoPast.method, "__module__": __name__}
    type("First", (braintrace.ETraceAlgorithm,), named_same)
    last = type("First", (braintrace.ETraceAlgorithm,), named_same)
    case = catalogue.BY_NAME["Leaky"]
    assert type(build_learner(case, "twice").algorithm) is last
    other = type("Other", (braintrace.ETraceAlgorithm,), named_same)
    try:
        with pytest.raises(braintrace.OptionError, match=r"First.*Other.*'twice'"):
            build_learner(case, "twice")
        assert type(build_learner(case, other).algorithm) is other
    finally:
        del other.names


@pytest.mark.parametrize("names", ["twice", (3,), None])
def test_names_are_a_tuple_of_strings(names):
    wrong = type("Wrong", (NoPast,), {"names": names})
    try:
        with pytest.raises(braintrace.OptionError, match=r"Wrong` is .*expected a tuple"):
            build_learner(catalogue.BY_NAME["Leaky"], "no_past")
    finally:
        del wrong.names


def test_a_subclass_has_names_of_its_own():
    class Slower(braintrace.D_RTRL):
        """The same, by no name."""

    assert type(build_learner(catalogue.BY_NAME["Leaky"], "D_RTRL").algorithm) is braintrace.D_RTRL
    assert type(build_learner(catalogue.BY_NAME["Leaky"], Slower).algorithm) is Slower


# --- what a rule may ask for --------------------------------------------------------------------


def algorithm_of(method):
    return type("Asking", (braintrace.ETraceAlgorithm,), {"method": property(lambda self: method)})


def test_what_drivers_cannot_give_a_rule_is_said():
    asking = type("Asking", (OfRecords,), {"needs": frozenset({"x", "H"})})
    with pytest.raises(braintrace.OptionError, match="`Asking` needs 'H' of every step"):
        build_learner(catalogue.BY_NAME["Leaky"], algorithm_of(asking()))


class Clipping(OfRecords):
    """A rule that limits the learning signals."""

    def gradient(self, graph, weights, records, signal, *traces):
        signal = {name: jnp.clip(value, -0.01, 0.01) for name, value in signal.items()}
        return super().gradient(graph, weights, records, signal, *traces)


def test_a_rule_may_limit_the_learning_signals():
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, algorithm_of(Clipping()))
    xs, targets = case.sequences(BATCH, LENGTH)
    found = sequence_gradient(learner, case, xs, targets)
    assert np.all(np.abs(found["w_in"]) <= 0.01 * np.abs(xs).sum((0, 1))[:, None] + 1e-6)
    unlimited = sequence_gradient(build_learner(case, "no_past"), case, xs, targets)
    assert_gradients_close({"w_out": found["w_out"]}, {"w_out": unlimited["w_out"]}, 1e-6)
    assert_gradients_differ({"w_in": found["w_in"]}, {"w_in": unlimited["w_in"]}, 0.1)


# --- what specifications say --------------------------------------------------------------------

SPECS = {
    "key": TraceSpec((BATCH, 2), jnp.dtype("uint32"), ("batch", "entry"), initial=7),
    "sums": {
        "rows": TraceSpec((3, BATCH), jnp.dtype("float32"), ("input", "batch")),
        "left": TraceSpec((4,), jnp.dtype("float32"), ("entry",), is_stored=False),
    },
    "shared": TraceSpec((3,), jnp.dtype("float32"), ("input",), operand="mean"),
    "none": {},
}


def test_traces_start_as_their_specifications_say():
    kept = stored_specs(SPECS, jnp.bfloat16)
    traces = starting_traces(kept)
    np.testing.assert_array_equal(traces["key"], np.full((BATCH, 2), 7))
    assert isinstance(traces["sums"]["rows"], jax.ShapeDtypeStruct)
    assert traces["sums"].keys() == {"rows"}
    assert traces["none"] == {}
    dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(traces)]
    assert dtypes == ["uint32", "bfloat16", "bfloat16"]
    assert sum(spec.nbytes for spec in jax.tree.leaves(kept)) == 4 * 4 + 6 * 2 + 3 * 2
    exact = dataclasses.replace(SPECS["shared"], takes_trace_dtype=False)
    assert stored_specs({"shared": exact}, jnp.bfloat16)["shared"].dtype == jnp.float32


def test_samples_start_anew_along_the_axis_of_the_batch():
    kept = {key: spec for key, spec in stored_specs(SPECS, None).items() if key != "shared"}
    traces = jax.tree.map(lambda spec: jnp.full(spec.shape, np.nan, jnp.float32), kept)
    traces["key"] = jnp.ones((BATCH, 2), jnp.uint32)
    found = reset_traces(kept, traces, jnp.asarray([False, True]))
    np.testing.assert_array_equal(found["key"], [[1, 1], [7, 7]])
    np.testing.assert_array_equal(found["sums"]["rows"], [[np.nan, 0]] * 3)


def test_samples_that_share_a_trace_start_anew_together():
    traces = {"shared": jnp.ones(3)}
    specs = {"shared": SPECS["shared"]}
    np.testing.assert_array_equal(reset_traces(specs, traces, jnp.asarray(True))["shared"], 0)
    with pytest.raises(
        braintrace.OptionError, match=r"All samples share the trace 'mean' of shape \(3,\)"
    ):
        reset_traces(specs, traces, jnp.asarray([False, True]))


@pytest.mark.parametrize(("batch", "gates"), [(1, 4), (2, 3)])
def test_traces_have_the_outputs_that_pay(batch, gates):
    """One sample has the traces of all four gates, several those of the gates that are read."""
    learner = build_learner(catalogue.BY_NAME["LSTMFused"], batch=batch)
    for spec in specs_of(learner.graph.trace_specs):
        if spec.is_stored:
            assert 4 * spec.shape[-1] == gates * spec.full_shape[-1]


OF_BIAS = {"bias": ("batch", "output")}
AXES = {
    "matmul with bias": {"weight": ("batch", "input", "output"), **OF_BIAS},
    "element_wise": {"weight": ("fan_out", "output")},
    "grouped 1-D conv": {"weight": ("batch", "spatial", "group", "input", "output")},
    "sparse_matmul with bias": {"weight": ("batch", "entry"), **OF_BIAS},
    "lora_matmul with bias": {"effective": ("batch", "input", "output"), **OF_BIAS},
    "feedback_matmul with bias": {"weight": ("batch", "input", "output"), **OF_BIAS},
    "grouped_matmul with bias": {
        "weight": ("batch", "group", "input", "output"),
        "bias": ("batch", "group", "output"),
    },
    "embedding": {"weight": ("batch", "entry", "output")},
}


@pytest.mark.parametrize("name", AXES)
def test_every_operation_says_what_the_axes_of_its_traces_are(name):
    (case,) = (case for case in CASES if case.name == name)
    learner = braintrace.compile(Diagonal(case), "d_rtrl", case.inputs[0], batch_size=BATCH)
    specs = specs_of(learner.graph.trace_specs)
    assert {spec.operand: spec.axes for spec in specs} == AXES[name]
    outputs = {spec.shape[-1] for spec in specs if spec.axes[-1] == "output"}
    assert outputs <= {case.hidden[-1], case.hidden[-1] // 2}


def test_axes_have_names_that_are_known():
    spec = braintrace.get_primitive_spec(braintrace.etp_mm_p)
    spec = dataclasses.replace(spec, name="other", trace_axes={"weight": ("in", "output")})
    with pytest.raises(braintrace.PrimitiveError, match=r"\('in', 'output'\) of 'weight'"):
        braintrace.register_primitive_spec(spec)


def test_a_learner_of_an_algorithm_that_somebody_has_compiled():
    case = catalogue.BY_NAME["Leaky"]
    model, algorithm = build_algorithm(case)
    learners = braintrace.Learner(algorithm), build_learner(case)
    sequences = case.sequences(2, 3)
    found, expected = (sequence_gradient(learner, case, *sequences) for learner in learners)
    assert_same_bits(found, expected)
    assert learners[0].is_compiled and not braintrace.Learner(braintrace.D_RTRL(model)).is_compiled
    assert algorithm.param_states == dict(model.states(brainstate.ParamState))
    assert algorithm.hidden_states == dict(model.states(brainstate.HiddenState))
    assert {*algorithm.graph.hidden_paths} == {*algorithm.hidden_states}

"""What holds for the traces of every learning rule: dtypes, bytes, saving and restoring."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drivers import build_learner, catalogue_gradient, sequence_gradient, snapshot
from rules import RULES

import braintrace
from braintrace._graph import specs_of

CASE = cases.BY_NAME["alif_late_threshold"]
DATA = CASE.sequences(2, 6)
each_rule = pytest.mark.parametrize("rule", RULES)


@each_rule
def test_traces_have_the_dtype_that_is_given_and_the_bytes_that_are_told(rule):
    learner = build_learner(CASE, rule, trace_dtype=jnp.bfloat16)
    found = sequence_gradient(learner, CASE, *DATA, chunk_size=2)
    assert_gradients_close(found, catalogue_gradient(CASE, rule), 3e-2, rule)
    traces = jax.tree.leaves(learner.algorithm.traces.value)
    specs = specs_of(learner.algorithm.compiled.trace_specs)
    for trace, spec in zip(traces, specs, strict=True):
        is_half = spec.takes_trace_dtype and jnp.issubdtype(trace.dtype, jnp.floating)
        assert (trace.shape, trace.dtype) == (spec.shape, spec.dtype)
        assert is_half == (trace.dtype == jnp.bfloat16)
    report = learner.report()
    assert report.carried_bytes == sum(trace.nbytes for trace in traces)
    whole = sum(spec.nbytes for spec in specs_of(learner.graph.trace_specs) if spec.is_stored)
    assert report.stored_bytes == whole >= report.carried_bytes


@each_rule
def test_a_saved_learner_goes_on(rule):
    xs, targets = DATA
    first, second = (build_learner(CASE, rule) for _ in range(2))
    sequence_gradient(first, CASE, xs[:3], targets[:3])
    states, traces = jax.tree.map(np.asarray, snapshot(first))
    for path, state in second.algorithm.model.states().items():
        state.value = states[path]
    second.algorithm.traces.value = traces
    found = [sequence_gradient(learner, CASE, xs[3:], targets[3:]) for learner in (first, second)]
    assert_gradients_close(found[1], found[0], 1e-6, rule)
    with pytest.raises(braintrace.ShapeError):
        second.algorithm.traces.value = {**traces, "other": np.zeros(3)}

"""The report of a compiled model: what it says, printed and as data."""

import html
import json

import jax.numpy as jnp
import pytest
from catalogue import BATCH, BY_NAME, INPUTS, H
from drivers import shared_learner

import braintrace

FLOAT = 4


def test_relation_of_a_fused_lstm():
    report = shared_learner(BY_NAME["LSTMFused"]).report()
    (row,) = report.relations
    assert row.operation == "etp_mm"
    assert row.parameters == ("gates",)
    assert (row.x_shape, row.y_shape) == ((BATCH, INPUTS + H), (BATCH, 4 * H))
    assert [set(states) for states in row.states] == [{"c", "h"}]
    assert "catalogue/basic.py" in row.source
    # only the cell state is read position by position in the next step
    assert {state for state, _, _ in row.traces} == {"c"}
    # and the output gate never enters it
    per_gate = BATCH * ((INPUTS + H) * H + H) * FLOAT
    assert row.stored_bytes == report.stored_bytes == 3 * per_gate
    assert row.possible_bytes == report.possible_bytes == 2 * 4 * per_gate


def test_a_model_without_memory_stores_nothing():
    report = shared_learner(BY_NAME["TanhRNN"]).report()
    assert report.stored_bytes == 0 < report.possible_bytes
    assert "none needed" in str(report)
    assert report.groups[0].transition == ()


def test_groups_and_their_transition():
    (group,) = shared_learner(BY_NAME["LSTMFused"]).report().groups
    assert set(group.states) == {"c", "h"}
    assert group.shape == (BATCH, H)
    assert group.transition == (("c", "c"),)
    assert group.downstream == ("h",)
    assert "c→c; downstream: h" in str(shared_learner(BY_NAME["LSTMFused"]).report())


def test_parameters_without_a_trace_and_why():
    report = shared_learner(BY_NAME["GRU"]).report()
    rows = {row.parameter: row.reason for row in report.without_trace}
    assert rows["w_out"] == "used by ordinary operations only"
    assert "no-trace" in rows["w_r"]
    assert set(rows) == {"w_r", "w_out"}


@pytest.mark.parametrize("name", ["LSTMFused", "GRU", "OneWeightTwoGroups", "IndRNN"])
def test_text_and_data_and_notebook_show_the_rows(name):
    report = shared_learner(BY_NAME[name]).report()
    data, text = report.to_dict(), str(report)
    assert json.loads(json.dumps(data)) == data
    for row in data["relations"]:
        for word in (row["key"], str(tuple(row["y_shape"])), f"{row['stored_bytes']:,}"):
            assert word in text
    for row in data["without_trace"]:
        assert row["parameter"] in text and row["reason"] in text
    assert report._repr_html_() == f"<pre>{html.escape(text)}</pre>"
    for diagnostic in report.diagnostics:
        assert diagnostic.message in text


def test_a_learner_prints_as_one_line():
    learner = shared_learner(BY_NAME["TwoLayers"])
    size = learner.report().carried_bytes
    algorithm = f"D_RTRL({type(learner.module).__name__})"
    assert repr(learner.algorithm) == algorithm
    assert repr(learner) == f"Learner({algorithm}, {size:,} bytes of traces)"
    fresh = braintrace.D_RTRL(BY_NAME["TwoLayers"].build())
    assert repr(braintrace.Learner(fresh)) == f"Learner({algorithm}, not compiled)"


def test_bytes_of_traces_are_known_before_any_trace_exists():
    """40 GB do not fit in the memory of the machine that runs this."""
    batch, units = 10_000, 1000
    x = jnp.zeros((batch, units))
    learner = braintrace.compile(braintrace.nn.IndRNN(units, units), "d_rtrl", x, batch_size=batch)
    assert learner.report().carried_bytes >= FLOAT * batch * units**2

"""The report of a compiled model: what it says, printed, as data and as HTML."""

import html
import json

import brainstate
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
    assert "nested-weights" in rows["w_r"]
    assert set(rows) == {"w_r", "w_out"}


def test_diagnostics_are_those_of_the_graph():
    learner = shared_learner(BY_NAME["LayerNormRNN"])
    found = [(row.kind, row.message) for row in learner.report().diagnostics]
    assert found == [(d.kind, d.message) for d in learner.graph.diagnostics]
    assert found


@pytest.mark.parametrize("name", ["LSTMFused", "GRU", "OneWeightTwoGroups", "IndRNN"])
def test_plain_data_and_text_and_html_say_the_same(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no word continues on the next line
    learner = shared_learner(BY_NAME[name])
    report = learner.report()
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert str(report).startswith(str(learner.graph))
    text, page = str(report), report._repr_html_()
    assert page.count("<table>") == page.count("</table>") >= 2
    for row in data["relations"]:
        for word in (row["key"], str(tuple(row["y_shape"])), f"{row['stored_bytes']:,}"):
            assert word in text
            assert html.escape(word) in page
    for row in data["without_trace"]:
        assert row["parameter"] in text
        assert row["reason"] in text


def test_html_is_escaped():
    page = shared_learner(BY_NAME["LSTMFused"]).report()._repr_html_()
    assert "<lambda>" not in page
    assert "<locals>" not in page


def test_long_names_are_short_in_tables_and_stay_apart(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")

    class Cell(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((2, 3)))

        def init_state(self, **_):
            states = ["synapse(tau=5 ms, size=3)", "synapse(tau=8 ms, size=3)", "other(tau=5\n ms)"]
            self.syn = {name: {"g": brainstate.HiddenState(jnp.zeros(3))} for name in states}

        def update(self, x):
            for state in self.syn.values():
                state["g"].value = 0.5 * state["g"].value + braintrace.matmul(x, self.w.value)

    class Network(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.a_layer_with_a_name_that_says_much = Cell()

        def update(self, x):
            return self.a_layer_with_a_name_that_says_much(x)

    report = braintrace.compile(Network(), "d_rtrl", jnp.ones(2)).report()
    assert len({state for row in report.groups for state in row.states}) == 3
    printed, layer = str(report), "a_layer_with_a_name_that_says_much"
    for number in (1, 2):
        assert f"{layer}/syn/synapse(…)/g [{number}]" in printed
    assert f"{layer}/…/other(…)/g" in printed and "tau" not in printed + report._repr_html_()


def test_bytes_of_traces_are_known_before_any_trace_exists():
    """40 GB do not fit in the memory of the machine that runs this."""
    batch, units = 10_000, 1000
    x = jnp.zeros((batch, units))
    learner = braintrace.compile(braintrace.nn.IndRNN(units, units), "d_rtrl", x, batch_size=batch)
    assert learner.report().carried_bytes >= FLOAT * batch * units**2

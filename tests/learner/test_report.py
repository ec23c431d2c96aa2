"""`report`, `plot` and `eligibility`: what a user reads of a compiled model.

What they say of each model of the catalogue is in ``tests/verdicts.txt``.
"""

import html
import itertools
import json

import brainstate
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest
from learners import ADAPTING, LEAKY, LSTM, XS, learner_of
from oracle import Plain, stop
from random_models import BATCH, INPUTS, STEPS, UNITS, Layer, RandomModel

import braintrace

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("float64")
STACK = RandomModel((Layer("joined", "matmul", "lstm"), Layer("function", "matmul", "adapting")))
FLOAT = 8
MODELS = {"leaky": LEAKY, "lstm": LSTM, "adapting": ADAPTING, "stack": STACK}


# --- the report


def test_a_relation_has_its_shapes_states_and_bytes():
    report = learner_of(LSTM).report()
    (row,) = report.relations
    assert row.operation == "etp_mm"
    assert row.parameters == ("w0",)
    assert (row.x_shape, row.y_shape) == ((BATCH, INPUTS + UNITS), (BATCH, 4 * UNITS))
    assert [{*states} for states in row.states] == [{"c0", "h0"}]
    assert "random_models.py" in row.source
    # Only the cell state is read in the next step, and the output gate never enters it.
    assert {state for state, _, _ in row.traces} == {"c0"}
    per_gate = BATCH * (INPUTS + UNITS) * UNITS * FLOAT
    assert row.stored_bytes == report.stored_bytes == 3 * per_gate


def test_a_group_has_its_states_and_transition():
    (group,) = learner_of(LSTM).report().groups
    assert {*group.states} == {"c0", "h0"}
    assert group.shape == (BATCH, UNITS)
    assert group.transition == (("c0", "c0"),)
    assert group.downstream == ("h0",)


def test_parameters_without_a_trace_have_a_reason():
    (row,) = learner_of(LSTM).report().without_trace
    assert row.parameter == "out"
    assert row.reason


@pytest.mark.parametrize("name", MODELS)
def test_text_data_and_notebook_show_all_rows(name):
    report = learner_of(MODELS[name]).report()
    data, text = report.to_dict(), str(report)
    assert json.loads(json.dumps(data)) == data
    for row in data["relations"]:
        for word in (row["key"], str(tuple(row["y_shape"])), f"{row['stored_bytes']:,}"):
            assert word in text
    for row in data["without_trace"]:
        assert row["parameter"] in text and row["reason"] in text
    for diagnostic in report.diagnostics:
        assert diagnostic.message in text
    assert report._repr_html_() == f"<pre>{html.escape(text)}</pre>"


def test_bytes_are_those_of_the_traces():
    for rule in ("d_rtrl", "rtrl", "snap"):
        learner = learner_of(STACK, rule)
        traces = jax.tree.leaves(learner.functional().state().traces)
        assert learner.report().carried_bytes == sum(leaf.nbytes for leaf in traces), rule


def test_a_sequence_is_beside_backpropagation_in_checkpoints():
    """It has 3 checkpoints of h and 3 steps, whose transposes read x, h and tanh or more."""
    x = np.zeros((BATCH, INPUTS), np.float32)
    model = braintrace.nn.IndRNN(INPUTS, UNITS, activation="tanh")
    learner = braintrace.compile(model, "d_rtrl", x, batch_size=BATCH)
    learner.etrace_grad(np.stack([x] * 9), step_fn=lambda x: learner(x).mean())
    (row,) = learner.report().sequences
    states = BATCH * UNITS
    least = (3 * states + 3 * (BATCH * INPUTS + 2 * states)) * 4
    assert least <= row.checkpointed_bytes <= 2 * least
    assert f"{row.checkpointed_bytes:,}" in str(learner.report())


def test_bytes_are_known_before_any_trace_exists():
    """40 GB do not fit in the memory of the machine that runs this."""
    batch, inputs, units = 2_000, 20_000, 250
    x = jnp.zeros((batch, inputs), jnp.float32)
    learner = braintrace.compile(braintrace.nn.IndRNN(inputs, units), "d_rtrl", x, batch_size=batch)
    assert learner.report().carried_bytes >= 4 * batch * inputs * units


def test_a_learner_prints_as_one_line():
    learner = learner_of(LSTM)
    size = learner.report().carried_bytes
    assert repr(learner) == f"D_RTRL(Module, {size:,} bytes of traces)"
    assert "not compiled" in repr(braintrace.D_RTRL(learner.module))


# --- the picture


@pytest.fixture(autouse=True)
def figures():
    yield
    matplotlib.pyplot.close("all")


def parts_of(ax):
    """Boxes and arrows by the names that they have in the picture, and all text."""
    boxes, arrows = {}, {}
    for patch in ax.patches:
        name = patch.get_gid()
        if " -> " in name:
            red, green, blue = matplotlib.colors.to_rgb(patch.get_edgecolor())
            arrows[name] = red > max(green, blue)
        elif name.startswith("node "):
            boxes[name] = patch.get_bbox()
    return boxes, arrows, " ".join(text.get_text() for text in ax.texts)


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_shows_all_weights_and_states_apart(name):
    learner = learner_of(MODELS[name])
    ax, report = learner.plot(), learner.report()
    boxes, _, text = parts_of(ax)
    words = [p for row in report.relations for p in row.parameters]
    words += [state for group in report.groups for state in group.states]
    assert all(word in text for word in words)
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not (one.overlaps(other) and not is_touching(one, other))
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for box in boxes.values():
        assert left <= box.x0 and box.x1 <= right and bottom <= box.y0 and box.y1 <= top


def is_touching(one, other):
    return one.x1 == other.x0 or other.x1 == one.x0 or one.y1 == other.y0 or other.y1 == one.y0


def test_what_is_truncated_is_red():
    """The recurrence of a layer, and what an upper layer remembers of the one below."""
    cut, exact = (parts_of(learner_of(STACK, rule).plot()) for rule in ("d_rtrl", "rtrl"))
    assert any(cut[1].values())
    assert not all(cut[1].values())
    assert not any(exact[1].values())
    title = learner_of(STACK).plot().get_title()
    assert "D_RTRL" in title and "traces" in title


def test_a_picture_is_drawn_in_axes_of_the_user():
    ax = matplotlib.figure.Figure(figsize=(4, 2)).subplots()
    assert learner_of(STACK).plot(ax=ax) is ax
    assert ax.patches


# --- the eligibility of one weight


def recursion(model, w):
    """eps' = D eps + F of one weight, in plain JAX: the derivative by it of what is carried."""
    params, eps = model.params(), None

    def states_of(value):
        p, h = {**params, w: value}, model.start(BATCH)
        for x in XS:
            h, _ = model.by_layer(Plain(), p, h, stop(x), "cut")
        return h

    eps = jax.jacobian(states_of)(params[w])
    # (batch, units, *weight): of one sample and unit the entries of that unit alone
    return {name: np.asarray(leaf) for name, leaf in eps.items()}


@pytest.mark.core
@pytest.mark.parametrize("form", ["module", "function"])
def test_the_eligibility_of_a_weight_is_the_derivative_of_the_state(form):
    learner = learner_of(LEAKY, form=form)
    for x in XS:
        learner(x)
    path = "params/w0" if form == "function" else ("w0",)
    (trace,) = learner.eligibility(path).values()
    expected = np.einsum("buiu->biu", recursion(LEAKY, "w0")["h0"])
    np.testing.assert_allclose(trace, expected, rtol=1e-9)
    learner.reset_state()
    (trace,) = learner.eligibility(path).values()
    assert not np.any(trace)


def test_coupled_states_have_one_each():
    learner = learner_of(ADAPTING)
    for x in XS:
        learner(x)
    found, expected = learner.eligibility("w0"), recursion(ADAPTING, "w0")
    assert {*found} == {"v0", "a0"}
    sign = np.sign(ADAPTING.params()["w0"])  # the trace is of the operand, the absolute value
    for name, trace in found.items():
        wanted = np.einsum("buiu->biu", expected[name])
        np.testing.assert_allclose(trace * sign, wanted, rtol=1e-9)


def test_outputs_without_a_trace_are_zero():
    """The output gate of an LSTM reaches no state that is remembered."""
    learner = learner_of(LSTM)
    learner(XS[0])
    for trace in learner.eligibility("w0").values():
        gates = np.asarray(trace).any((0, 1)).reshape(4, -1).any(1)
        assert sorted(gates) == [False, True, True, True]


def test_it_is_read_in_a_loop():
    learner = learner_of(LEAKY)

    def step(x):
        learner(x)
        return learner.eligibility("w0")["h0"]

    found = brainstate.transform.for_loop(step, jnp.asarray(XS))
    assert found.shape == (STEPS, BATCH, INPUTS, UNITS)
    np.testing.assert_array_equal(found[-1], learner.eligibility("w0")["h0"])


def test_what_has_no_trace_is_refused():
    learner = learner_of(LSTM)
    for path in ("v", ("cell", "w"), "out"):
        with pytest.raises(braintrace.OptionError, match="w0"):
            learner.eligibility(path)
    with pytest.raises(braintrace.OptionError, match="traces"):
        learner_of(LSTM, "es_d_rtrl", decay_or_rank=0.9).eligibility("w0")
    with pytest.raises(braintrace.NotCompiledError):
        braintrace.D_RTRL(learner.module).eligibility("w0")

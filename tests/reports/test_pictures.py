"""What pictures of models and of traces show, by their artists."""

import collections
import itertools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest
import saiunit as u
from catalogue import BY_NAME
from drivers import quietly_compiled, shared_learner
from matrices import csr
from test_eligibility import BATCH, DECAY, STEPS, UNITS, XS, Layer, direct, once

import braintrace
from braintrace import nn
from braintrace._learner import trace_pictures
from braintrace._pictures.draw_model import RED
from braintrace._pictures.layers import layout_of
from braintrace._pictures.parts import Arrow, in_bytes

matplotlib.use("agg")
BLACK = "black"


@pytest.fixture(autouse=True)
def figures():
    yield
    matplotlib.pyplot.close("all")


class Drawn:
    """A picture: the text of every node, and the colour and the dash of every arrow."""

    def __init__(self, learner, **options):
        self.ax = learner.plot(**options)
        self.texts, self.boxes, self.arrows = collections.defaultdict(list), {}, {}
        for text in self.ax.texts:
            self.texts[text.get_gid().removeprefix("text ")].append(text.get_text())
        for patch in self.ax.patches:
            name = patch.get_gid()
            if " -> " in name:
                is_past = patch.get_linestyle() != "solid"
                self.arrows[(*name.split(" -> "), is_past)] = colour_of(patch)
            elif name.startswith("node "):
                self.boxes[name.removeprefix("node ")] = patch

    def node(self, word):
        """The key of the only node with some word in it."""
        (found,) = [key for key, lines in self.texts.items() if any(word in x for x in lines)]
        return found

    def arrow(self, source, target, is_past=False):
        return self.arrows.get((self.node(source), self.node(target), is_past))


def colour_of(patch):
    rgb = matplotlib.colors.to_hex(patch.get_edgecolor())
    return {RED: "red", "#000000": BLACK}.get(rgb, rgb)


class Stack(brainstate.nn.Module):
    """Three LSTM layers and a plain readout."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.LSTMCell(3, 4), nn.LSTMCell(4, 4), nn.LSTMCell(4, 4)]
        self.w_out = brainstate.ParamState(jnp.ones((4, 2)))

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return x @ self.w_out.value


class Spiking(brainstate.nn.Module):
    """Recurrent ALIF neurons below a leaky readout, which is a linear one."""

    def __init__(self):
        super().__init__()
        self.w_in = nn.Linear(3, 4, w_init=jnp.ones((3, 4)) * u.mA, b_init=None)
        self.w_rec = nn.Linear(4, 4, w_init=jnp.ones((4, 4)) * u.mA, b_init=None)
        self.neurons = nn.ALIF(4)
        self.readout = nn.LeakyRateReadout(4, 2)

    def update(self, x):
        current = self.w_in(x) + self.w_rec(self.neurons.get_spike())
        return self.readout(self.neurons(current))


def compiled(model, rule="d_rtrl", x=None):
    x = np.ones((2, 3), np.float32) if x is None else x
    with brainstate.environ.context(dt=1.0 * u.ms):
        return braintrace.compile(model, rule, x, batch_size=len(x))


def test_a_stack_of_layers():
    learner = compiled(Stack())
    drawn = Drawn(learner)
    for index, row in enumerate(learner.report().relations):
        name = f"layers/{index}/W/weight"
        assert row.parameters == (name,)
        weight, group = drawn.node(name), f"group {index}"
        assert drawn.texts[weight] == [name, in_bytes(row.stored_bytes)]
        assert sorted(drawn.texts[group]) == [f"layers/{index}/{s}  (2, 4)" for s in "ch"]
        below = f"group {index - 1}" if index else "argument x"
        # what the layer remembers of the one below is left out, and so is its own recurrence
        assert drawn.arrows[below, weight, False] == ("red" if index else BLACK)
        assert drawn.arrows[group, weight, True] == "red"
        assert drawn.arrows[weight, group, False] == BLACK
        assert drawn.arrows[group, group, True] == BLACK
    assert drawn.texts[drawn.node("w_out")] == ["w_out", "no trace"]
    assert drawn.arrow("layers/2/h", "w_out") == drawn.arrow("w_out", "output") == BLACK
    assert len(drawn.arrows) == 3 * 4 + 2
    carried = in_bytes(learner.report().carried_bytes)
    assert drawn.ax.get_title() == f"D_RTRL, {carried} of traces"
    said = [text.get_text() for text in drawn.ax.get_legend().get_texts()]
    assert "truncated path" in said


def test_spiking_neurons_with_a_readout():
    drawn = Drawn(compiled(Spiking()))
    lines = ["1 × filter (32 B)", "neurons/V  (2, 4)", "neurons/a  (2, 4)"]
    assert sorted(drawn.texts["group 0"]) == lines
    assert drawn.texts["state readout/r"] == ["readout/r  (2, 2)", "linear readout"]
    assert drawn.arrow("neurons/V", "w_rec", is_past=True) == "red"
    assert drawn.arrow("w_in", "neurons/V") == drawn.arrow("x", "w_in") == BLACK
    assert drawn.arrow("readout/W", "readout/r  ") == BLACK


def test_nothing_is_cut_by_a_rule_that_leaves_nothing_out():
    learner = compiled(Stack(), "rtrl")
    drawn = Drawn(learner)
    assert "red" not in drawn.arrows.values()
    sizes = collections.Counter()
    for row in learner.report().relations:  # one for each array of the parameter
        sizes[row.parameters[0].partition("#")[0]] += row.stored_bytes
    assert len(sizes) == 3
    for name, size in sizes.items():
        assert drawn.texts[drawn.node(name)] == [name, in_bytes(size)]


def test_a_weight_behind_another_one():
    """The gradient of the reset gate of a GRU is that of the current step."""
    drawn = Drawn(shared_learner(BY_NAME["GRU"]))
    assert drawn.texts[drawn.node("w_r")] == ["w_r", "no trace"]
    assert colour_of(drawn.boxes[drawn.node("w_r")]) == "red"
    assert drawn.arrow("w_r", "w_h") == BLACK
    assert drawn.arrow("x", "w_r") == BLACK


def test_states_that_mix():
    drawn = Drawn(shared_learner(BY_NAME["LayerNormRNN"]))
    assert "red" in {colour for (source, *_), colour in drawn.arrows.items() if "group" in source}


def test_axes_of_a_user_s_own():
    figure = matplotlib.figure.Figure(figsize=(4, 2))
    ax = figure.subplots()
    learner = compiled(Stack())
    drawn = Drawn(learner, ax=ax)
    assert drawn.ax is ax
    whole = Drawn(learner)
    size = [text.get_fontsize() for text in (drawn.ax.texts[0], whole.ax.texts[0])]
    assert size[0] < size[1]


def extent(patch):
    box = patch.get_bbox()
    return box.x0, box.y0, box.x1, box.y1


SHOWN = ["LSTMFused", "GRU", "OneWeightTwoGroups", "SynapsesOfTwoPopulations"]


@pytest.mark.parametrize(
    "name",
    SHOWN,
)
def test_every_model_has_a_readable_picture(name):
    case = BY_NAME[name]
    x = case.sequences(BATCH, 1)[0][0]
    learner = quietly_compiled(case.build(), "d_rtrl", x, batch_size=BATCH)
    drawn = Drawn(learner)
    text = " ".join(itertools.chain(*drawn.texts.values()))
    report = learner.report()
    for row in report.relations:
        assert all(parameter in text for parameter in row.parameters)
    for group in report.groups:
        assert all(state in text for state in group.states)
    assert {end for *ends, _ in drawn.arrows for end in ends} <= set(drawn.boxes)
    boxes = [extent(patch) for patch in drawn.boxes.values()]
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, name
    (left, right), (bottom, top) = drawn.ax.get_xlim(), drawn.ax.get_ylim()
    assert all(left <= b[0] and b[2] <= right and bottom <= b[1] and b[3] <= top for b in boxes)


def test_nodes_stand_behind_what_they_read():
    arrows = [Arrow("a", "b"), Arrow("b", "c"), Arrow("a", "c"), Arrow("c", "b", is_past=True)]
    sizes = dict.fromkeys("abc", (10.0, 10.0))
    layout = layout_of(sizes, arrows)
    xs = [layout.centres[name][0] for name in "abc"]
    assert xs == sorted(xs)
    assert len(set(xs)) == 3
    assert layout.back == {("c", "b")}
    (point,) = layout.passes["a", "c"]
    assert point[0] == xs[1]
    assert abs(point[1] - layout.centres["b"][1]) >= 5  # around the box, not through it


# --- traces ---------------------------------------------------------------------------------


def image_of(ax):
    return np.asarray(ax.images[0].get_array())


def test_a_trace_over_time():
    learner = braintrace.compile(Layer(once), "d_rtrl", XS[0], batch_size=BATCH)
    learner(XS[0])
    before = learner.functional().state()
    (ax,) = braintrace.plot_traces(learner, "w", XS, sample=1)
    trace, norms = direct(XS[0]), []
    for x in XS:
        trace = DECAY * trace + direct(x)
        norms.append(np.linalg.norm(trace[1], axis=0))
    np.testing.assert_allclose(image_of(ax), np.transpose(norms), rtol=1e-5)
    assert image_of(ax).shape == (UNITS, STEPS)
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("∂h / ∂w", "step", "unit")
    after = learner.functional().state()
    for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_trace_of_now():
    learner = braintrace.compile(Layer(once), "d_rtrl", XS[0], batch_size=BATCH)
    learner(XS[0])
    (ax,) = braintrace.plot_traces(learner, ("w",))
    np.testing.assert_allclose(image_of(ax), np.abs(direct(XS[0])[0]).T, rtol=1e-5, atol=1e-7)


def test_the_trace_of_a_kernel_is_drawn_over_all_of_space():
    model = BY_NAME["ConvolutionalLIF"]
    x = np.random.default_rng(0).normal(size=model.shape).astype(np.float32)
    learner = braintrace.compile(model.build(), "d_rtrl", x, batch_size=model.shape[0])
    learner(x)
    (ax,) = braintrace.plot_traces(learner, "kernel")
    (trace,) = map(np.asarray, learner.eligibility("kernel").values())
    expected = np.linalg.norm(trace[0], axis=0).reshape(-1, trace.shape[-1]).T
    np.testing.assert_allclose(image_of(ax), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "rule", "path", "titles", "units"),
    [
        ("LSTMFused", "d_rtrl", "gates", ["∂c / ∂gates/bias", "∂c / ∂gates/weight"], 16),
        ("Leaky", "rtrl", "w_in", ["∂h / ∂w_in"], 4),
    ],
)
def test_traces_of_other_forms(name, rule, path, titles, units):
    case = catalogue.BY_NAME[name]
    xs, _ = case.sequences(2, 3)
    learner = braintrace.compile(case.build(), rule, xs[0], batch_size=2)
    found = braintrace.plot_traces(learner, path, xs)
    assert [ax.get_title() for ax in found] == titles
    assert [image_of(ax).shape for ax in found] == [(units, 3)] * len(titles)
    assert all(image_of(ax).max() > 0 for ax in found)


class Gains(brainstate.nn.Module):
    """Three gains that samples share."""

    def __init__(self):
        super().__init__()
        self.gains = brainstate.ParamState(jnp.ones(3))

    def init_state(self, batch_size=2):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.element_wise(self.gains.value) * x
        return self.h.value


class GainsOfRows(Gains):
    """The same of two rows of units, without samples."""

    def init_state(self):
        super().init_state(2)


def test_the_trace_of_gains_that_samples_share_is_drawn_for_one_sample():
    xs = np.random.default_rng(1).normal(size=(4, 2, 3)).astype(np.float32)
    learner = braintrace.compile(Gains(), "d_rtrl", xs[0], batch_size=2)
    (ax,) = braintrace.plot_traces(learner, "gains", xs, sample=1)
    trace = itertools.accumulate(xs[:, 1], lambda before, x: 0.5 * before + x)
    np.testing.assert_allclose(image_of(ax), np.abs([*trace]).T, rtol=1e-5)


def test_the_trace_of_gains_that_rows_share_is_drawn_over_all_of_them():
    xs = np.random.default_rng(1).normal(size=(4, 2, 3)).astype(np.float32)
    learner = braintrace.compile(GainsOfRows(), "d_rtrl", xs[0])
    (ax,) = braintrace.plot_traces(learner, "gains", xs)
    trace = [*itertools.accumulate(xs, lambda before, x: 0.5 * before + x)]
    np.testing.assert_allclose(image_of(ax), np.linalg.norm(trace, axis=1).T, rtol=1e-5)


def sparse_learner(rows):
    """An independent recurrent layer of 40 units behind a sparse weight, 3 entries each."""
    places = np.random.default_rng(0).integers(0, rows, (40, 3))
    dense = np.zeros((rows, 40), np.float32)
    dense[places.ravel(), np.repeat(np.arange(40), 3)] = 1.0
    matrix = csr(dense)

    class Sparse(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(matrix.data)

        def init_state(self, batch_size=2):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 40)))

        def update(self, x):
            drive = braintrace.sparse_matmul(x, self.w.value, sparse_mat=matrix)
            self.h.value = 0.5 * self.h.value + drive
            return self.h.value

    return braintrace.compile(
        Sparse(), "d_rtrl", np.ones((2, rows), np.float32), batch_size=2
    ), dense


def test_a_sparse_weight_has_one_row_for_each_unit():
    learner, dense = sparse_learner(6)
    xs = np.random.default_rng(1).normal(size=(4, 2, 6)).astype(np.float32)
    (ax,) = braintrace.plot_traces(learner, "w", xs, sample=1)
    trace, norms = np.zeros((6, 40)), []
    for x in xs:
        trace = 0.5 * trace + x[1][:, None] * dense
        norms.append(np.linalg.norm(trace, axis=0))
    np.testing.assert_allclose(image_of(ax), np.transpose(norms), rtol=1e-5)
    (ax,) = braintrace.plot_traces(learner, "w")
    assert image_of(ax).shape == (40, 1)


def test_of_a_large_layer_some_units_are_drawn(monkeypatch):
    learner, _ = sparse_learner(6)
    xs = np.random.default_rng(1).normal(size=(4, 2, 6)).astype(np.float32)
    (whole,) = braintrace.plot_traces(learner, "w", xs)
    monkeypatch.setattr(trace_pictures, "MOST_UNITS", 14)
    (ax,) = braintrace.plot_traces(learner, "w", xs)
    np.testing.assert_array_equal(image_of(ax), image_of(whole)[::3])
    assert ax.get_ylabel() == "unit (14 of 40)"


def test_what_cannot_be_drawn():
    learner = braintrace.compile(Layer(once), "d_rtrl", XS[0], batch_size=BATCH)
    with pytest.raises(braintrace.OptionError, match="which has no trace"):
        braintrace.plot_traces(learner, "v", XS)
    with pytest.raises(braintrace.OptionError, match="compiled for 2 samples"):
        braintrace.plot_traces(learner, "w", XS, sample=2)
    with pytest.raises(braintrace.OptionError, match="`learner`"):
        braintrace.plot_traces(Layer(once), "w", XS)
    with pytest.raises(braintrace.ShapeError, match="time axis"):
        braintrace.plot_traces(learner, "w", XS, XS[:1])
    _, axes = matplotlib.pyplot.subplots(2)
    with pytest.raises(braintrace.OptionError, match="one for each of '∂h / ∂w'"):
        braintrace.plot_traces(learner, "w", axes=axes)

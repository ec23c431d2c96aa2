"""What pictures of models and of traces show, by their artists."""

import collections
import itertools

import brainstate
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest
import saiunit as u
from catalogue import BY_NAME
from drivers import quietly_compiled, shared_learner
from test_eligibility import BATCH

import braintrace
from braintrace import nn
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

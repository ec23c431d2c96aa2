"""How exact every learning rule is on every class of models, as `docs/algorithms.md` says it.

The tables of that page are the data: a row is a class of models, a column one or several rules.
"""

import dataclasses
from collections.abc import Callable, Mapping

import brainstate
import catalogue
import jax.numpy as jnp
import numpy as np
import places
import readouts
import saiunit as u
from catalogue import INPUTS, OUTPUTS, Cell, H
from marks import spike

import braintrace

PAGE = places.DOCS / "algorithms.md"
CORNER = "Model"
"""The first cell of these tables."""


class RecurrentLayers(Cell):
    """Two leaky layers, each with recurrent weights."""

    weights = {
        "w_in": (INPUTS, H),
        "w_rec": (H, H),
        "w_up": (H, H),
        "w_upper": (H, H),
        "w_out": (H, OUTPUTS),
    }
    states_of = {"lower": (H,), "upper": (H,)}
    gain = 1.5

    def update(self, x):
        lower, upper = self.lower.value, self.upper.value
        drive = braintrace.matmul(x, self.w_in.value)
        drive = drive + braintrace.matmul(lower, self.w_rec.value)
        self.lower.value = 0.8 * lower + 0.2 * jnp.tanh(drive)
        drive = braintrace.matmul(self.lower.value, self.w_up.value)
        drive = drive + braintrace.matmul(upper, self.w_upper.value)
        self.upper.value = 0.8 * upper + 0.2 * jnp.tanh(drive)
        return self.upper.value @ self.w_out.value


CONNECTED = np.asarray([[1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0]], float)


class SparseRecurrent(Cell):
    """A recurrent layer of which few units are connected."""

    weights = {"w_in": (INPUTS, H), "w_rec": (7,), "w_out": (H, OUTPUTS)}
    states_of = {"h": (H,)}

    def __init__(self):
        super().__init__()
        self.connected = u.sparse.CSR.fromdense(jnp.asarray(CONNECTED))

    def update(self, x):
        recurrent = braintrace.sparse_matmul(
            self.h.value, self.w_rec.value, sparse_mat=self.connected
        )
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.7 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


class OwnFeedback(Cell):
    """Spiking neurons read out by a product that goes back by a matrix of its own."""

    weights = {"w_in": (INPUTS, H), "w_out": (H, OUTPUTS)}
    states_of = {"V": (H,)}
    gain = 2.5

    def __init__(self):
        super().__init__()
        self.back = brainstate.LongTermState(jnp.asarray(readouts.FIXED["back"], float))

    def update(self, x):
        V = 0.9 * self.V.value
        self.V.value = V * (1 - spike(V - 1)) + braintrace.matmul(x, self.w_in.value)
        z = spike(self.V.value - 1)
        return braintrace.feedback_matmul(z, self.w_out.value, self.back.value)


class NormalisedOverSamples(Cell):
    """A recurrent layer of which every sample sees the others."""

    weights = {"w_in": (INPUTS, H), "w_out": (H, OUTPUTS)}
    states_of = {"h": (H,)}

    def update(self, x):
        h = self.h.value - 0.5 * self.h.value.mean(axis=0)
        self.h.value = 0.8 * h + jnp.tanh(braintrace.matmul(x, self.w_in.value))
        return self.h.value @ self.w_out.value


def leaky_readout():
    return readouts.Net(readouts.alif, readouts.plain)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What stands for a class of models.

    module: its class.
    top: the parameters of its last layer with a memory, and of what comes after it.
    shape: of the input of one sample.
    """

    module: Callable
    top: tuple[str, ...] = ("w_out",)
    shape: tuple[int, ...] = (INPUTS,)


def of_catalogue(name, *top, **options):
    return Model(catalogue.BY_NAME[name].module, ("w_out", *top), **options)


MODELS = {
    "LIF or ALIF neurons, driven by inputs": of_catalogue("ALIF"),
    "the same after a convolution": of_catalogue("ConvolutionalLIF", shape=(5, 2)),
    "uncoupled units (IndRNN, LRU)": of_catalogue("IndRNN"),
    "one of these, a leaky linear readout": Model(leaky_readout),
    "one of these, a `feedback_matmul` as readout": Model(OwnFeedback),
    "a stack of these": of_catalogue("Stacked", "upper/w"),
    "one recurrent layer": of_catalogue("LeakyRNN"),
    "the same, sparse": Model(SparseRecurrent),
    "the same, an ordinary recurrent weight": of_catalogue("PlainRecurrentRNN"),
    "LSTM": of_catalogue("LSTMFused"),
    "GRU with the reset after the product": of_catalogue("GRUResetAfter"),
    "GRU with the reset before the product": of_catalogue("GRU"),
    "a stack of recurrent layers": Model(RecurrentLayers, ("w_out", "w_up", "w_upper")),
    "samples coupled by batch norm": Model(NormalisedOverSamples),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One learning rule: its name, and what it is made with."""

    name: str
    options: Mapping = dataclasses.field(default_factory=dict)


WINDOWS = {"window": 2}
RULES = {
    "`RTRL`": Rule("rtrl"),
    "`OSTLRecurrent`": Rule("ostl_recurrent"),
    "`SnAp(n=2)`": Rule("snap", {"n": 2}),
    "`UORO`": Rule("uoro"),
    "`KF_RTRL`": Rule("kf_rtrl"),
    "`D_RTRL`": Rule("d_rtrl"),
    "`EProp`": Rule("eprop"),
    "`SnAp`": Rule("snap"),
    "`OSTLFeedforward`": Rule("ostl_feedforward"),
    "`RFLO`": Rule("rflo"),
    "`ES_D_RTRL`": Rule("es_d_rtrl"),
    "`OTTT`": Rule("ottt", {"decay": 0.8}),
    "`Immediate`": Rule("immediate"),
    "`D_RTRL` in windows": Rule("d_rtrl", WINDOWS),
    "`Immediate` in windows": Rule("immediate", WINDOWS),
}


def promises():
    """What the page says: {(model, rule): verdict}."""
    found = {}
    rules = None
    for line in PAGE.read_text().splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            rules = None
        elif first == CORNER:
            rules = [cell.split(", ") for cell in cells]
        elif rules and set(first) != {"-"}:
            for names, cell in zip(rules, cells, strict=True):
                found |= {(first, name): cell for name in names}
    return found

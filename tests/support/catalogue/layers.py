"""The layers of `braintrace.nn` in small models, with what the compiler should find in each."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from braintrace import nn

from .layer_models import (
    ConductanceBased,
    CurrentBased,
    Dale,
    Driven,
    Filtered,
    ReadOut,
    Recurrent,
    Synaptic,
    Words,
    spike,
    values,
)
from .model import BATCH, INPUTS, H, Model

LAYERS: list[Model] = []
RECURRENT = ("truncated",)
BEHIND = ("truncated", "no-trace, warning")


TESTED = {"SparseLinear", "LeakyRateReadout", "LIF", "ALIF", "LoRA"}
"""Layers that learn with a batch axis by day."""


def add(name, build, *relations, groups, diagnostics=(), shape=(INPUTS,), **options):
    """Add one model; `build` makes it."""

    def module():
        with brainstate.random.seed_context(3):
            model = build()
        for state in model.states(brainstate.ParamState).values():
            state.value = jax.tree.map(
                lambda leaf: jax.device_put(np.asarray(leaf, float)), state.value
            )
        return model

    LAYERS.append(
        Model(
            name=name,
            module=module,
            reported_relations=relations,
            reported_groups=groups if isinstance(groups, tuple) else (groups,),
            diagnostics=frozenset(diagnostics),
            shape=(BATCH, *shape),
            tested={"d_rtrl": ("chunks of 4",)} if name in TESTED else {},
            **options,
        )
    )


def layer(name, build, *relations, **options):
    """Add a layer in front of a leaky state."""
    relations = [f"{relation} -> h" for relation in relations or ["layer/weight"]]
    add(name, lambda: Filtered(build()), *relations, groups="h", diagonal=True, **options)


def cell(name, build, *relations, states="h", **options):
    """Add a cell in front of a plain readout."""
    names = ", ".join(f"cell/{state}" for state in states.split(", "))
    relations = [f"cell/{relation} -> {names}" for relation in relations]
    add(name, lambda: ReadOut(build()), *relations, groups=names, **options)


def started(layer, *relations, **options):
    """Add a cell that has no options but its initial state."""
    cell(layer.__name__, lambda: layer(INPUTS, H, **state()), *relations, **options)


def neuron(name, build, states, **options):
    """Add neurons behind a weight."""
    names = ", ".join(f"neuron/{state}" for state in states.split(", "))
    add(name, build, f"dense/weight -> {names}", groups=names, spiking=True, **options)


def state():
    return {"state_init": np.linspace(-0.3, 0.5, H)}


def sparse(**options):
    matrix = u.sparse.CSR.fromdense(
        jnp.asarray(values((INPUTS, H)) * (np.arange(INPUTS * H).reshape(INPUTS, H) % 3 > 0))
    )
    return nn.SparseLinear(matrix, np.ones(H), INPUTS, **options)


MASK = (np.arange(INPUTS * H).reshape(INPUTS, H) % 4 > 0).astype(float)
SIGNS = np.array([[1.0], [-1.0], [1.0]])
BIAS = {"b_init": np.full(H, 0.1)}

layer("Linear", lambda: nn.Linear(INPUTS, H, w_mask=MASK))
layer("FeedbackLinear", lambda: nn.FeedbackLinear(INPUTS, H, **BIAS))
layer(
    "FeedbackLinear, adaptive",
    lambda: nn.FeedbackLinear(INPUTS, H, b_init=None, adaptive=True),
    "layer/weight,layer/feedback",
)
layer(
    "GroupedLinear",
    lambda: nn.GroupedLinear((2, 3), (2, 2), b_init=np.full((2, 2), 0.1)),
    shape=(2, 3),
)
layer("Embedding", lambda: Words(padding_idx=0, max_norm=1.5), "layer/table/weight")
layer("SignedWLinear", lambda: nn.SignedWLinear(INPUTS, H, w_sign=SIGNS))
layer("ScaledWSLinear", lambda: nn.ScaledWSLinear(INPUTS, H))
layer("SparseLinear", sparse)
layer(
    "Linear, mask and signs", lambda: nn.Linear(INPUTS, H, w_mask=MASK, w_sign=SIGNS[:, 0], **BIAS)
)
layer("SparseLinear, signs", lambda: sparse(w_sign=SIGNS))
layer("AllToAll", lambda: nn.AllToAll(INPUTS, H, include_self=False, **BIAS))
layer("AllToAll, one weight", lambda: nn.AllToAll(INPUTS, H, w_init=0.3, **BIAS))
layer(
    "OneToOne",
    lambda: nn.OneToOne(INPUTS, b_init=np.full(INPUTS, 0.1)),
    "layer/weight",
    "layer/weight",
)
layer(
    "LoRA",
    lambda: nn.LoRA(INPUTS, 2, H, base_module=nn.Linear(INPUTS, H)),
    "layer/weight",
    "layer/base_module/weight",
)
layer("Conv1d", lambda: nn.Conv1d((5, 2), 2, 3, 2, b_init=np.ones((1, 2))), shape=(5, 2))
layer("Conv2d", lambda: nn.Conv2d((3, 2, 2), 2, 2, groups=2), shape=(3, 2, 2))
layer("Conv3d", lambda: nn.Conv3d((2, 2, 2, 1), 2, 2, padding="VALID"), shape=(2, 2, 2, 1))
layer("ScaledWSConv1d", lambda: nn.ScaledWSConv1d((4, 2), 2, 3), shape=(4, 2))
layer("ScaledWSConv2d", lambda: nn.ScaledWSConv2d((2, 2, 1), 2, 2), shape=(2, 2, 1))
layer("ScaledWSConv3d", lambda: nn.ScaledWSConv3d((2, 2, 1, 1), 2, 2), shape=(2, 2, 1, 1))

started(nn.ValinaRNNCell, "W/weight", diagnostics=RECURRENT)
started(nn.LeakyRNN, "W/weight", diagnostics=RECURRENT)
started(nn.IndRNN, "u", "W/weight", diagonal=True)
started(nn.MinimalRNNCell, "Wx/weight", "Wu/weight", diagnostics=BEHIND)
started(nn.GRUCell, "Wrz/weight", "Wh/weight", "Wh/weight", diagnostics=RECURRENT)
cell(
    "GRUCell, reset before",
    lambda: nn.GRUCell(INPUTS, H, reset_after=False, **state()),
    "Wrz/weight",
    "Wh/weight",
    diagnostics=BEHIND,
)
started(nn.MGUCell, "Wf/weight", "Wh/weight", "Wh/weight", diagnostics=RECURRENT)
cell(
    "MGUCell, reset before",
    lambda: nn.MGUCell(INPUTS, H, reset_after=False, **state()),
    "Wf/weight",
    "Wh/weight",
    diagnostics=BEHIND,
)
started(nn.LSTMCell, "W/weight", states="c, h", diagnostics=RECURRENT)
started(nn.URLSTMCell, "W/weight", "bias", states="c, h", diagnostics=RECURRENT)
started(nn.MiniGRU, "W/weight", diagonal=True)
started(nn.MiniLSTM, "W/weight", diagonal=True)
started(nn.CFNCell, "Wg/weight", "W/weight", diagnostics=RECURRENT)
cell(
    "LRUCell",
    lambda: nn.LRUCell(INPUTS, H, r_min=0.4, **state()),
    *["recurrence"] * 3,
    "B",
    states="im, re",
    diagonal=True,
    diagnostics=("no-trace",),
)
cell(
    "RTUCell",
    lambda: nn.RTUCell(INPUTS, H, r_min=0.4, state_init=np.array([0.3, -0.2])),
    *["recurrence"] * 3,
    "W",
    states="a, b",
    diagonal=True,
)
cell(
    "LeakyRateReadout",
    lambda: nn.LeakyRateReadout(INPUTS, H, **BIAS),
    "W/weight",
    states="r",
    diagonal=True,
)
cell(
    "LeakySpikeReadout",
    lambda: nn.LeakySpikeReadout(INPUTS, H, spk_fun=spike, **BIAS),
    "W/weight",
    states="V",
    diagonal=True,
    spiking=True,
)

neuron("LIF", lambda: Driven(nn.LIF(H, spk_fun=spike)), "V", diagonal=True)
neuron(
    "LIF, hard reset",
    lambda: Driven(nn.LIF(H, spk_fun=spike, spk_reset="hard")),
    "V",
    diagonal=True,
)
neuron("ALIF", lambda: Driven(nn.ALIF(H, spk_fun=spike, beta=0.5 * u.mV)), "V, a", diagonal=True)
neuron(
    "ALIF, recurrent", lambda: Recurrent(nn.ALIF(H, spk_fun=spike)), "V, a", diagnostics=RECURRENT
)
neuron(
    "GIF",
    lambda: Driven(
        nn.GIF(
            H,
            spk_fun=spike,
            a=0.01 / u.ms,
            A1=0.1 * u.mA,
            A2=-0.5 * u.mA,
            V_initializer=jnp.linspace(-70.0, -51.0, H) * u.mV,
        ),
        gain=10.0,
    ),
    "I1, I2, V, V_th",
    diagonal=True,
)

add(
    "Alpha",
    lambda: Synaptic(nn.Alpha(H, 3.0 * u.ms, 0.0 * u.mA), u.mA, 30.0),
    "dense/weight -> neuron/V, synapse/g, synapse/h",
    groups="neuron/V, synapse/g, synapse/h",
    spiking=True,
    diagonal=True,
)
add(
    "CurrentBased",
    CurrentBased,
    "dense/weight -> neuron/V, synapse/g",
    groups="neuron/V, synapse/g",
    spiking=True,
    diagonal=True,
)
EI = "g_e/g, g_i/g_decay, g_i/g_rise, neuron/V"
add(
    "ConductanceBased",
    ConductanceBased,
    f"excitation/weight -> {EI}",
    f"inhibition/weight -> {EI}",
    groups=EI,
    spiking=True,
    diagnostics=RECURRENT,
)
DALE = "neuron/V, neuron/a, projection/synapse/g"
add(
    "Dale's law",
    Dale,
    f"projection/weights/input/weight -> {DALE}",
    f"projection/weights/recurrent/weight -> {DALE}",
    groups=DALE,
    spiking=True,
    diagnostics=RECURRENT,
)

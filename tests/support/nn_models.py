"""The layers of `braintrace.nn` in small models, with what the compiler should find in each."""

import contextlib
from unittest import mock

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import marks
import numpy as np
import saiunit as u
from catalogue import BATCH, INPUTS, OUTPUTS, H

from braintrace import nn

MODELS: list[catalogue.Model] = []
RECURRENT = ("recurrent-mixing",)
BEHIND = ("recurrent-mixing", "nested-weights")


def values(shape, scale=1.0, seed=3):
    return scale * np.random.default_rng(seed).standard_normal(shape)


def dense(inputs, outputs, unit, gain):
    """A linear layer without a bias, its weight in a unit."""
    weight = values((inputs, outputs), gain) * unit
    return nn.Linear(inputs, outputs, w_init=weight, b_init=None)


def spike(v):
    """The default surrogate, its spikes seen by the recorder."""
    z = nn.surrogate.triangle(v, gamma=1.0)
    return z if marks.recorder is None else marks.recorder.spike(z)


class Model(brainstate.nn.Module):
    """Something to be tested in front of a plain readout."""

    def __init__(self, features):
        super().__init__()
        self.w_out = brainstate.ParamState(jnp.asarray(values((features, OUTPUTS), 0.7, seed=5)))

    def update(self, x):
        return self.features(x) @ self.w_out.value


class Filtered(Model):
    """A layer that feeds a leaky state."""

    def __init__(self, layer):
        super().__init__(int(np.prod(layer.out_size)))
        self.layer = layer

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, *self.layer.out_size)))

    def features(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x))
        return self.h.value.reshape(*x.shape[: -len(self.layer.in_size)], -1)


class Words(brainstate.nn.Module):
    """Rows of a table for the largest entry of each input."""

    def __init__(self, **options):
        super().__init__()
        self.in_size, self.out_size = (INPUTS,), (H,)
        self.table = nn.Embedding(INPUTS, H, values((INPUTS, H)), **options)

    def update(self, x):
        return self.table(jnp.argmax(x, axis=-1))


class ReadOut(Model):
    """A cell."""

    def __init__(self, cell):
        super().__init__(cell.out_size[0])
        self.cell = cell

    def features(self, x):
        return self.cell(x)


class Driven(Model):
    """Neurons that inputs drive."""

    def __init__(self, neuron, gain=10.0):
        super().__init__(H)
        self.dense = dense(INPUTS, H, u.mA, gain)
        self.neuron = neuron

    def features(self, x):
        return self.neuron(self.dense(x))


class Recurrent(Driven):
    """Neurons that inputs and their own spikes drive."""

    def __init__(self, neuron):
        super().__init__(neuron)
        self.dense = dense(INPUTS + H, H, u.mA, 8.0)

    def features(self, x):
        return self.neuron(self.dense(jnp.concatenate([x, self.neuron.get_spike()], axis=-1)))


class Synaptic(Model):
    """A synapse of a current between the inputs and the neurons."""

    def __init__(self, synapse, unit, gain):
        super().__init__(H)
        self.dense = dense(INPUTS, H, unit, gain)
        self.synapse = synapse
        self.neuron = nn.LIF(H, spk_fun=spike)

    def features(self, x):
        return self.neuron(self.synapse(self.dense(x)))


class CurrentBased(Synaptic):
    """A conductance with a fixed driving force."""

    def __init__(self):
        super().__init__(nn.Expon(H, tau=4.0 * u.ms), u.mS, 0.08)
        self.current = nn.CUBA(E=0.0 * u.mV, V_rest=-70.0 * u.mV)
        self.neuron = nn.LIF(H, R=1.0 * u.kohm, spk_fun=spike)

    def features(self, x):
        return self.neuron(self.current(self.synapse(self.dense(x))))


class ConductanceBased(Model):
    """Excitation from inputs and from spikes, inhibition from spikes, as conductances."""

    def __init__(self):
        super().__init__(H)
        self.excitation = nn.SignedWLinear(INPUTS + H, H, values((INPUTS + H, H), 0.4) * u.mS)
        self.inhibition = nn.SignedWLinear(H, H, values((H, H), 0.2, 4) * u.mS)
        self.g_e, self.g_i = nn.Expon(H, tau=4.0 * u.ms), nn.DualExpon(H, tau_decay=6.0 * u.ms)
        self.to_e, self.to_i = nn.COBA(0.0 * u.mV), nn.COBA(-80.0 * u.mV)
        potentials = {"V_th": -50.0 * u.mV, "V_reset": -60.0 * u.mV, "V_rest": -60.0 * u.mV}
        start = jnp.linspace(-60.0, -52.0, H) * u.mV
        self.neuron = nn.LIF(
            H, 1.0 * u.kohm, 10.0 * u.ms, **potentials, V_initializer=start, spk_fun=spike
        )

    def features(self, x):
        V, z = self.neuron.V.value, self.neuron.get_spike()
        g_e = self.g_e(self.excitation(jnp.concatenate([jnp.abs(x), z], axis=-1)))
        g_i = self.g_i(self.inhibition(z))
        return self.neuron(self.to_e(g_e, V) + self.to_i(g_i, V))


class Dale(Model):
    """Sparse excitatory and inhibitory neurons; they and the inputs send to one synapse."""

    def __init__(self):
        super().__init__(H)
        sent = values((H, H), 6.0, 4) * (np.arange(H * H).reshape(H, H) % 3 > 0)
        weights = {
            "input": nn.Linear(INPUTS, H, values((INPUTS, H), 12.0) * u.mA, None, w_sign=[1] * 3),
            "recurrent": nn.SparseLinear(
                u.sparse.CSR.fromdense(jnp.asarray(sent) * u.mA), w_sign=[1, 1, -1, -1]
            ),
        }
        self.projection = nn.Projection(
            weights, nn.Expon(H, tau=4.0 * u.ms, g_initializer=0.0 * u.mA)
        )
        self.neuron = nn.ALIF(H, spk_fun=spike)

    def features(self, x):
        sent = {"input": jnp.abs(x), "recurrent": self.neuron.get_spike()}
        return self.neuron(self.projection(sent))


@contextlib.contextmanager
def quick_draws():
    """Initial weights come from NumPy: brainstate compiles seven programs for every shape."""

    def drawn(self, lower, upper, size, dtype=None, **_):
        seed = np.asarray(jax.random.key_data(self.split_key())).ravel()
        values = np.clip(np.random.default_rng(seed).standard_normal(size), lower, upper)
        return jnp.asarray(np.asarray(values, dtype))

    with mock.patch.object(brainstate.random.RandomState, "truncated_normal", drawn):
        yield


BY_DAY = {"SparseLinear", "LeakyRateReadout", "LIF", "ALIF", "LoRA"}
"""Layers that learn with a batch axis by day."""


def add(name, build, *relations, groups, diagnostics=(), shape=(INPUTS,), **options):
    """Add one model; `build` makes it."""

    def module():
        with brainstate.random.seed_context(3), quick_draws():
            model = build()
        for state in model.states(brainstate.ParamState).values():
            state.value = jax.tree.map(
                lambda leaf: jnp.asarray(np.asarray(leaf, float)), state.value
            )
        return model

    MODELS.append(
        catalogue.Model(
            name=name,
            module=module,
            reported_relations=relations,
            reported_groups=groups if isinstance(groups, tuple) else (groups,),
            diagnostics=frozenset(diagnostics),
            shape=(BATCH, *shape),
            by_day={"d_rtrl": ("chunks of 4",)} if name in BY_DAY else {},
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

cell(
    "ValinaRNNCell",
    lambda: nn.ValinaRNNCell(INPUTS, H, **state()),
    "W/weight",
    diagnostics=RECURRENT,
)
cell("LeakyRNN", lambda: nn.LeakyRNN(INPUTS, H, **state()), "W/weight", diagnostics=RECURRENT)
cell("IndRNN", lambda: nn.IndRNN(INPUTS, H, **state()), "u", "W/weight", diagonal=True)
cell(
    "MinimalRNNCell",
    lambda: nn.MinimalRNNCell(INPUTS, H, **state()),
    "Wx/weight",
    "Wu/weight",
    diagnostics=BEHIND,
)
cell(
    "GRUCell",
    lambda: nn.GRUCell(INPUTS, H, **state()),
    "Wrz/weight",
    "Wh/weight",
    "Wh/weight",
    diagnostics=RECURRENT,
)
cell(
    "GRUCell, reset before",
    lambda: nn.GRUCell(INPUTS, H, reset_after=False, **state()),
    "Wrz/weight",
    "Wh/weight",
    diagnostics=BEHIND,
)
cell(
    "MGUCell",
    lambda: nn.MGUCell(INPUTS, H, **state()),
    "Wf/weight",
    "Wh/weight",
    "Wh/weight",
    diagnostics=RECURRENT,
)
cell(
    "MGUCell, reset before",
    lambda: nn.MGUCell(INPUTS, H, reset_after=False, **state()),
    "Wf/weight",
    "Wh/weight",
    diagnostics=BEHIND,
)
cell(
    "LSTMCell",
    lambda: nn.LSTMCell(INPUTS, H, **state()),
    "W/weight",
    states="c, h",
    diagnostics=RECURRENT,
)
cell(
    "URLSTMCell",
    lambda: nn.URLSTMCell(INPUTS, H, **state()),
    "W/weight",
    "bias",
    states="c, h",
    diagnostics=RECURRENT,
)
cell("MiniGRU", lambda: nn.MiniGRU(INPUTS, H, **state()), "W/weight", diagonal=True)
cell("MiniLSTM", lambda: nn.MiniLSTM(INPUTS, H, **state()), "W/weight", diagonal=True)
cell(
    "CFNCell",
    lambda: nn.CFNCell(INPUTS, H, **state()),
    "Wg/weight",
    "W/weight",
    diagnostics=RECURRENT,
)
cell(
    "LRUCell",
    lambda: nn.LRUCell(INPUTS, H, r_min=0.4, **state()),
    *["recurrence"] * 3,
    "B",
    states="im, re",
    diagonal=True,
    diagnostics=("no-hidden-state",),
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

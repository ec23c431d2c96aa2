"""Spiking models of the catalogue."""

import brainstate
import jax.numpy as jnp
import numpy as np
import saiunit as u
from marks import spike
from matrices import csr

import braintrace

from .model import BATCH, INPUTS, OUTPUTS, Cell, H, model, start

W_IN, W_REC, W_OUT = (INPUTS, H), (H, H), (H, OUTPUTS)
SPIKING = {"spiking": True}
DIAGONAL = {"spiking": True, "diagonal": True}
MIXING = ("truncated",)


class SpikingCell(Cell):
    gain = 2.5


@model("w_in -> I1, I2, V, theta", groups="I1, I2, V, theta", **DIAGONAL)
class GIF(SpikingCell):
    """Generalised integrate-and-fire: two after-spike currents and a moving threshold."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    states_of = {"V": (H,), "I1": (H,), "I2": (H,), "theta": (H,)}

    def update(self, x):
        z = spike(self.V.value - 1 - self.theta.value)
        self.I1.value = 0.7 * self.I1.value - 0.2 * z
        self.I2.value = 0.9 * self.I2.value + 0.1 * z
        after_spike = self.I1.value + self.I2.value
        drive = braintrace.matmul(x, self.w_in.value)
        self.V.value = 0.85 * self.V.value * (1 - z) + after_spike + drive
        self.theta.value = 0.8 * self.theta.value + 0.05 * self.V.value + 0.3 * z
        return self.V.value @ self.w_out.value


@model(
    "w_e -> V, g_e, g_i", "w_i -> V, g_e, g_i", groups="V, g_e, g_i", diagnostics=MIXING, **SPIKING
)
class ConductanceSynapses(SpikingCell):
    """Excitatory and inhibitory conductances with reversal potentials (COBA)."""

    weights = {"w_e": (INPUTS + H, H), "w_i": (H, H), "w_out": W_OUT}
    states_of = {"V": (H,), "g_e": (H,), "g_i": (H,)}

    def update(self, x):
        z = spike(self.V.value - 0.2)
        sources = jnp.concatenate([jnp.abs(x), z], -1)
        g_e = 0.7 * self.g_e.value + braintrace.matmul(sources, jnp.abs(self.w_e.value))
        g_i = 0.8 * self.g_i.value + braintrace.matmul(z, jnp.abs(self.w_i.value))
        V = self.V.value * (1 - z)
        V = V + 0.1 * (g_e * (1.5 - V) + g_i * (-0.8 - V) - V)
        self.g_e.value, self.g_i.value, self.V.value = g_e, g_i, V
        return V @ self.w_out.value


@model("w_e -> I_e, I_i, V", "w_i -> I_e, I_i, V", groups="I_e, I_i, V", **DIAGONAL)
class CurrentSynapses(SpikingCell):
    """Excitatory and inhibitory synaptic currents (CUBA)."""

    weights = {"w_e": W_IN, "w_i": W_IN, "w_out": W_OUT}
    states_of = {"I_e": (H,), "I_i": (H,), "V": (H,)}

    def update(self, x):
        rate = jnp.abs(x)
        self.I_e.value = 0.6 * self.I_e.value + braintrace.matmul(rate, jnp.abs(self.w_e.value))
        self.I_i.value = 0.8 * self.I_i.value + braintrace.matmul(rate, jnp.abs(self.w_i.value))
        z = spike(self.V.value - 1)
        self.V.value = 0.9 * self.V.value * (1 - z) + self.I_e.value - 0.4 * self.I_i.value
        return spike(self.V.value - 1) @ self.w_out.value


@model("w_apical -> V, dendrite", "w_basal -> V, dendrite", groups="V, dendrite", **DIAGONAL)
class TwoCompartments(SpikingCell):
    weights = {"w_apical": W_IN, "w_basal": W_IN, "w_out": W_OUT}
    states_of = {"V": (H,), "dendrite": (H,)}

    def update(self, x):
        V, dendrite = self.V.value, self.dendrite.value
        z = spike(V - 1)
        apical = braintrace.matmul(x, self.w_apical.value)
        self.dendrite.value = dendrite + 0.2 * (V - dendrite) + jnp.tanh(apical) + 0.1 * z
        basal = braintrace.matmul(x, self.w_basal.value)
        self.V.value = 0.9 * V + 0.3 * (dendrite - V) + basal - z
        return spike(self.V.value - 1) @ self.w_out.value


@model("kernel,bias -> V", groups="V", shape=(BATCH, 5, 2), **DIAGONAL)
class ConvolutionalLIF(SpikingCell):
    weights = {"kernel": (3, 2, 3), "bias": (3,), "w_out": (15, OUTPUTS)}
    states_of = {"V": (5, 3)}

    def update(self, x):
        z = spike(self.V.value - 1)
        current = braintrace.conv(
            x, self.kernel.value, self.bias.value, dimension_numbers=("NWC", "WIO", "NWC")
        )
        self.V.value = 0.9 * self.V.value - z + current
        return self.V.value.reshape(BATCH, -1) @ self.w_out.value


CONNECTED = csr(jnp.asarray([[1.0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]))


@model("w_in -> V", groups="V", **DIAGONAL)
class SparseLIF(SpikingCell):
    weights = {"w_in": (6,), "w_out": W_OUT}
    states_of = {"V": (H,)}

    def update(self, x):
        z = spike(self.V.value - 1)
        current = braintrace.sparse_matmul(3 * x, self.w_in.value, sparse_mat=CONNECTED)
        self.V.value = 0.9 * self.V.value - z + current
        return spike(self.V.value - 1) @ self.w_out.value


@model("w_e -> V", "w_i -> V", "w_in -> V", groups="V", diagnostics=MIXING, **SPIKING)
class PopulationsAsSlices(SpikingCell):
    """Three excitatory and two inhibitory neurons in one state."""

    weights = {"w_in": (INPUTS, 5), "w_e": (3, 5), "w_i": (2, 3), "w_out": (5, OUTPUTS)}
    states_of = {"V": (5,)}

    def update(self, x):
        z = spike(self.V.value - 1)
        excitation = braintrace.matmul(z[:, :3], jnp.abs(self.w_e.value))
        inhibition = braintrace.matmul(z[:, 3:], jnp.abs(self.w_i.value))
        drive = braintrace.matmul(x, self.w_in.value) + excitation
        current = jnp.concatenate([drive[:, :3] - inhibition, 0.5 * drive[:, 3:]], -1)
        self.V.value = 0.9 * self.V.value - z + current
        return self.V.value @ self.w_out.value


@model("w_in -> neuron[0], neuron[1]", groups="neuron[0], neuron[1]", **DIAGONAL)
class GroupStateALIF(SpikingCell):
    """Membrane and adaptation in one `HiddenGroupState`."""

    weights = {"w_in": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        self.neuron = brainstate.HiddenGroupState(start((batch_size, H, 2)))

    def update(self, x):
        V, a = self.neuron.get_value(0), self.neuron.get_value(1)
        z = spike(V - 1 - 0.4 * a)
        V = 0.9 * V - z + braintrace.matmul(x, self.w_in.value)
        self.neuron.set_value({0: V, 1: 0.8 * a + 0.3 * V + z})
        return self.neuron.get_value(0) @ self.w_out.value


@model(
    "w_in -> pair[0], pair[1]",
    groups="pair[0], pair[1]",
    diagonal=True,
    tested={"d_rtrl": ("stream",)},
)
class RotatedPair(SpikingCell):
    """The two states of a `HiddenGroupState` written as one array, turned by a matrix."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    turn = np.array([[0.8, -0.3], [0.2, 0.9]])

    def init_state(self, batch_size=None, **_):
        self.pair = brainstate.HiddenGroupState(start((batch_size, H, 2)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.pair.value = self.pair.value @ self.turn + drive[..., None] * np.array([1.0, 0.3])
        return jnp.tanh(self.pair.value).sum(-1) @ self.w_out.value


@model(
    "w_in -> pair[0], pair[1]",
    groups="pair[0], pair[1]",
    diagonal=True,
    tested={"d_rtrl": ("chunks of 1",)},
)
class UncoupledPair(RotatedPair):
    turn = np.diag([0.9, 0.4])


@model("w_in -> pair[0], pair[1]", groups="pair[0], pair[1]", diagonal=True)
class TransposedPair(SpikingCell):
    """The model computes with the batch in front and keeps its states with the units in front."""

    weights = {"w_in": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        self.pair = brainstate.HiddenGroupState(start((H, batch_size, 2)))

    def update(self, x):
        V, a = self.pair.value[..., 0].T, self.pair.value[..., 1].T
        V = 0.9 * V - 0.2 * a + braintrace.matmul(x, self.w_in.value)
        self.pair.value = jnp.stack([V.T, (0.8 * a + 0.1 * V).T], -1)
        return jnp.tanh(self.pair.value).sum(-1).T @ self.w_out.value


@model(
    "w_in -> neuron[0], neuron[1]",
    groups="neuron[0], neuron[1]",
    **DIAGONAL,
    tested={"d_rtrl": ("chunks of 6",)},
)
class TreeStateLIF(SpikingCell):
    """Membrane potential and synaptic current with their units in one `HiddenTreeState`."""

    weights = {"w_in": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        values = start((batch_size, H))
        self.neuron = brainstate.HiddenTreeState({"V": values * u.mV, "I": values * u.mA})

    def update(self, x):
        V, current = self.neuron.get_value("V"), self.neuron.get_value("I")
        z = spike(V / u.mV - 1)
        drive = braintrace.matmul(x, self.w_in.value) * u.mA
        current = 0.6 * current + drive
        V = 0.9 * V - z * u.mV + current * (1.0 * u.ohm)
        self.neuron.set_value({"V": V, "I": current})
        return (self.neuron.get_value("V") / u.mV) @ self.w_out.value


@model("w_in -> V", groups="V", **DIAGONAL, tested={"snap": ("own gradient",)})
class QuantityLIF(SpikingCell):
    """Weights in mS, potentials in mV, an exponential-Euler step."""

    weights = {"w_out": W_OUT}

    def __init__(self):
        super().__init__()
        weight = np.random.default_rng(5).standard_normal(W_IN)
        self.w_in = brainstate.ParamState(jnp.asarray(weight, float) * u.mS)

    def init_state(self, batch_size=None, **_):
        self.V = brainstate.HiddenState(start((batch_size, H)) * u.mV)

    def update(self, x):
        tau, dt, resistance = 10.0 * u.ms, 2.0 * u.ms, 2.0 * u.ohm * 1e3
        current = braintrace.matmul(x * u.mV, self.w_in.value)
        decay = u.math.exp(-dt / tau)
        z = spike((self.V.value - 1.0 * u.mV) / u.mV)
        self.V.value = self.V.value * decay + (current * resistance).to(u.mV) - z * u.mV
        return (self.V.value / u.mV) @ self.w_out.value


@model(
    "w_in -> V",
    groups="V",
    **DIAGONAL,
    tested={"ottt": ("own gradient",)},
)
class NoisyLIF(SpikingCell):
    weights = {"w_in": W_IN, "w_out": W_OUT}
    states_of = {"V": (H,)}

    def update(self, x):
        noise = brainstate.random.normal(size=self.V.value.shape, dtype=self.V.value.dtype)
        z = spike(self.V.value - 1)
        drive = braintrace.matmul(x, self.w_in.value)
        self.V.value = (0.9 + 0.05 * noise) * self.V.value - z + drive + 0.3 * noise
        return self.V.value @ self.w_out.value


@model("w_in -> V, m", groups="V, m", **DIAGONAL, tested={"d_rtrl": ("own gradient",)})
class SubSteppedNeuron(SpikingCell):
    """A membrane with a gating variable, integrated in a rolled loop of small steps."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    states_of = {"V": (H,), "m": (H,)}

    def update(self, x):
        current = braintrace.matmul(x, self.w_in.value)

        def small_step(carry, _):
            V, m = carry
            V = V + 0.02 * (current - V - m * (V + 0.8))
            m = m + 0.02 * (jnp.tanh(2 * V) - m)
            return (V, m), None

        z = spike(self.V.value - 0.3)
        start_of_step = (self.V.value - z, self.m.value)
        steps = jnp.arange(40)
        (V, m), _ = brainstate.transform.scan(small_step, start_of_step, steps)
        self.V.value, self.m.value = V, m
        return V @ self.w_out.value

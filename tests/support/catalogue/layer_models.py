"""Layers of `braintrace.nn` in small networks."""

import brainstate
import jax.numpy as jnp
import marks
import numpy as np
import saiunit as u

from braintrace import nn

from .model import INPUTS, OUTPUTS, H


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


class ReadByAProduct(brainstate.nn.Module):
    """Something to be tested in front of a plain readout."""

    def __init__(self, features):
        super().__init__()
        self.w_out = brainstate.ParamState(jnp.asarray(values((features, OUTPUTS), 0.7, seed=5)))

    def update(self, x):
        return self.features(x) @ self.w_out.value


class Filtered(ReadByAProduct):
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


class ReadOut(ReadByAProduct):
    """A cell."""

    def __init__(self, cell):
        super().__init__(cell.out_size[0])
        self.cell = cell

    def features(self, x):
        return self.cell(x)


class Driven(ReadByAProduct):
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


class Synaptic(ReadByAProduct):
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


class ConductanceBased(ReadByAProduct):
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


class Dale(ReadByAProduct):
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

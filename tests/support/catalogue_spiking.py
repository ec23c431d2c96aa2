"""Spiking networks of the catalogue, with synapses, compartments and delays."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from catalogue_models import BATCH, INPUTS, OUTPUTS, Cell, H, model, spike, start

import braintrace

sigmoid = jax.nn.sigmoid
W_IN, W_REC, W_OUT = (INPUTS, H), (H, H), (H, OUTPUTS)
IN_OUT = {"w_in": W_IN, "w_out": W_OUT}
CONNECTED = u.sparse.CSR.fromdense(jnp.asarray([[1.0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]))


@model(is_exact=True)
class InputLIF(Cell):
    weights = IN_OUT
    gain = 2.5
    states_of = {"V": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.V.value = 0.8 * self.V.value + drive - spike(self.V.value - 1)
        return spike(self.V.value - 1) @ self.w_out.value


@model(is_exact=True)
class ALIF(Cell):
    """LIF with an adaptive threshold; the adaptation reads the membrane of the same step."""

    weights = IN_OUT
    gain = 2.5
    states_of = {"V": (H,), "a": (H,)}

    def update(self, x):
        fired = spike(self.V.value - 1 - 0.3 * self.a.value)
        V = 0.8 * self.V.value + braintrace.matmul(x, self.w_in.value) - fired
        a = 0.9 * self.a.value + fired + 0.1 * V
        self.V.value, self.a.value = V, a
        return spike(V - 1 - 0.3 * a) @ self.w_out.value


@model(is_exact=True)
class Synapse(Cell):
    """A linear conductance that drives a linear membrane in the same step."""

    weights = IN_OUT
    states_of = {"g": (H,), "V": (H,)}

    def update(self, x):
        self.g.value = 0.7 * self.g.value + braintrace.matmul(x, self.w_in.value)
        self.V.value = 0.9 * self.V.value + 0.5 * self.g.value
        return self.V.value @ self.w_out.value


@model()
class RecurrentLIF(Cell):
    weights = {**IN_OUT, "w_rec": W_REC}
    gain = 2.5
    states_of = {"V": (H,)}

    def update(self, x):
        fired = spike(self.V.value - 1)
        drive = braintrace.matmul(x, self.w_in.value) + braintrace.matmul(fired, self.w_rec.value)
        self.V.value = 0.8 * self.V.value + drive - fired
        return spike(self.V.value - 1) @ self.w_out.value


@model(is_exact=True)
class GIF(Cell):
    """Generalised integrate-and-fire: two after-spike currents and a moving threshold."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    gain = 2.5
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


@model()
class ConductanceSynapses(Cell):
    """Excitatory and inhibitory conductances with reversal potentials (COBA)."""

    weights = {"w_e": (INPUTS + H, H), "w_i": (H, H), "w_out": W_OUT}
    gain = 2.5
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


@model(is_exact=True)
class CurrentSynapses(Cell):
    """Excitatory and inhibitory synaptic currents (CUBA)."""

    weights = {"w_e": W_IN, "w_i": W_IN, "w_out": W_OUT}
    gain = 2.5
    states_of = {"I_e": (H,), "I_i": (H,), "V": (H,)}

    def update(self, x):
        rate = jnp.abs(x)
        self.I_e.value = 0.6 * self.I_e.value + braintrace.matmul(rate, jnp.abs(self.w_e.value))
        self.I_i.value = 0.8 * self.I_i.value + braintrace.matmul(rate, jnp.abs(self.w_i.value))
        z = spike(self.V.value - 1)
        self.V.value = 0.9 * self.V.value * (1 - z) + self.I_e.value - 0.4 * self.I_i.value
        return spike(self.V.value - 1) @ self.w_out.value


@model(is_exact=True)
class TwoCompartments(Cell):
    weights = {"w_apical": W_IN, "w_basal": W_IN, "w_out": W_OUT}
    gain = 2.5
    states_of = {"V": (H,), "dendrite": (H,)}

    def update(self, x):
        V, dendrite = self.V.value, self.dendrite.value
        z = spike(V - 1)
        apical = braintrace.matmul(x, self.w_apical.value)
        self.dendrite.value = dendrite + 0.2 * (V - dendrite) + jnp.tanh(apical) + 0.1 * z
        basal = braintrace.matmul(x, self.w_basal.value)
        self.V.value = 0.9 * V + 0.3 * (dendrite - V) + basal - z
        return spike(self.V.value - 1) @ self.w_out.value


@model(is_exact=True, shape=(5, 2))
class ConvolutionalLIF(Cell):
    weights = {"kernel": (3, 2, 3), "bias": (3,), "w_out": (15, OUTPUTS)}
    gain = 2.5
    states_of = {"V": (5, 3)}

    def update(self, x):
        z = spike(self.V.value - 1)
        current = braintrace.conv(
            x, self.kernel.value, self.bias.value, dimension_numbers=("NWC", "WIO", "NWC")
        )
        self.V.value = 0.9 * self.V.value - z + current
        return self.V.value.reshape(BATCH, -1) @ self.w_out.value


@model(is_exact=True, shape=(4, 2))
class PooledConvolution(Cell):
    weights = {"kernel": (3, 2, 3), "w_out": (6, OUTPUTS)}
    states_of = {"h": (2, 3)}

    def update(self, x):
        y = braintrace.conv(x, self.kernel.value, dimension_numbers=("NWC", "WIO", "NWC"))
        window = (1, 2, 1)
        mean = jax.lax.reduce_window(y, 0.0, jax.lax.add, window, window, "VALID") / 2
        peak = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")
        self.h.value = 0.7 * self.h.value + jnp.tanh(mean) + 0.3 * peak
        return self.h.value.reshape(BATCH, -1) @ self.w_out.value


@model(is_exact=True)
class SparseLIF(Cell):
    weights = {"w_in": (6,), "w_out": W_OUT}
    gain = 2.5
    states_of = {"V": (H,)}

    def update(self, x):
        z = spike(self.V.value - 1)
        current = braintrace.sparse_matmul(3 * x, self.w_in.value, sparse_mat=CONNECTED)
        self.V.value = 0.9 * self.V.value - z + current
        return spike(self.V.value - 1) @ self.w_out.value


@model()
class PopulationsAsSlices(Cell):
    """Three excitatory and two inhibitory neurons in one state."""

    weights = {"w_in": (INPUTS, 5), "w_e": (3, 5), "w_i": (2, 3), "w_out": (5, OUTPUTS)}
    gain = 2.5
    states_of = {"V": (5,)}

    def update(self, x):
        z = spike(self.V.value - 1)
        excitation = braintrace.matmul(z[:, :3], jnp.abs(self.w_e.value))
        inhibition = braintrace.matmul(z[:, 3:], jnp.abs(self.w_i.value))
        drive = braintrace.matmul(x, self.w_in.value) + excitation
        current = jnp.concatenate([drive[:, :3] - inhibition, 0.5 * drive[:, 3:]], -1)
        self.V.value = 0.9 * self.V.value - z + current
        return self.V.value @ self.w_out.value


@model(is_exact=True)
class GroupStateALIF(Cell):
    """Membrane and adaptation in one `HiddenGroupState`."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    gain = 2.5

    def init_state(self, batch_size=None, **_):
        self.neuron = brainstate.HiddenGroupState(start((batch_size, H, 2)))

    def update(self, x):
        V, a = self.neuron.get_value(0), self.neuron.get_value(1)
        z = spike(V - 1 - 0.4 * a)
        V = 0.9 * V - z + braintrace.matmul(x, self.w_in.value)
        self.neuron.set_value({0: V, 1: 0.8 * a + 0.3 * V + z})
        return self.neuron.get_value(0) @ self.w_out.value


@model(is_exact=True)
class QuantityLIF(Cell):
    """Weights in mS, potentials in mV, an exponential-Euler step."""

    weights = {"w_out": W_OUT}
    gain = 2.5

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


@model(is_exact=True)
class NoisyLIF(Cell):
    weights = {"w_in": W_IN, "w_out": W_OUT}
    gain = 2.5
    states_of = {"V": (H,)}

    def update(self, x):
        noise = brainstate.random.normal(size=self.V.value.shape, dtype=self.V.value.dtype)
        z = spike(self.V.value - 1)
        drive = braintrace.matmul(x, self.w_in.value)
        self.V.value = (0.9 + 0.05 * noise) * self.V.value - z + drive + 0.3 * noise
        return self.V.value @ self.w_out.value


@model(is_exact=True)
class SubSteppedNeuron(Cell):
    """A membrane with a gating variable, integrated in a rolled loop of small steps."""

    weights = {"w_in": W_IN, "w_out": W_OUT}
    gain = 2.5
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


@model()
class LateralInhibition(Cell):
    """A spike resets its own neuron, which is traced, and inhibits the next, which is not."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}
    gain = 2.5

    def update(self, x):
        z = spike(self.h.value - 0.3)
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value - z - 0.3 * (jnp.roll(z, 1, -1)) + drive
        return self.h.value @ self.w_out.value


@model()
class CoupledCompartments(Cell):
    """Small steps of a cable: each compartment has a way of its own, and one to its neighbours."""

    weights = {"w": W_IN, "leak": (H,), "w_out": W_OUT}
    states_of = {"v": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        leak = braintrace.element_wise(self.leak.value, sigmoid)

        def small_step(_):
            v = self.v.value
            axial = jnp.roll(v, 1, -1) + jnp.roll(v, -1, -1)
            self.v.value = (0.6 - 0.2 * leak) * v + 0.2 * jnp.tanh(drive) + 0.2 * axial

        brainstate.transform.for_loop(small_step, np.arange(3))
        return self.v.value @ self.w_out.value


class Delayed(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def __init__(self):
        super().__init__()
        with brainstate.environ.context(dt=1.0):
            target = jax.ShapeDtypeStruct((H,), jnp.zeros(()).dtype)
            self.delay = brainstate.nn.Delay(target, entries={"late": 2.0}, time=2.0)

    def update(self, x):
        with brainstate.environ.context(dt=1.0):
            self.h.value = self.step(x, self.delay.at("late"))
            self.delay.update(self.h.value)
        return self.h.value @ self.w_out.value


@model()
class DelayedRecurrence(Delayed):
    """The recurrent input is two steps old: its weight learns, the delay line has no trace."""

    def step(self, x, late):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(late + 0.1 * self.h.value, self.w_rec.value)
        return 0.8 * self.h.value + jnp.tanh(drive + recurrent)


@model()
class DelayLineForAMarkedOperation(Cell):
    """A shift register of hidden states that the recurrent weight alone reads: nothing is lost."""

    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,), "line": (3, H)}

    def update(self, x):
        late = self.line.value
        recurrent = braintrace.matmul(late[:, -1], self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive + recurrent)
        kept = (self.h.value)[:, None]
        self.line.value = jnp.concatenate([kept, (late[:, :-1])], 1)
        return self.h.value @ self.w_out.value


@model()
class RingForAMarkedOperation(DelayLineForAMarkedOperation):
    """The same, written to one place after the other."""

    states_of = {"h": (H,), "ring": (3, H)}

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.at = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        recurrent = braintrace.matmul(self.ring.value[:, self.at.value], self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive + recurrent)
        kept = self.h.value
        self.ring.value = self.ring.value.at[:, self.at.value].set(kept)
        self.at.value = (self.at.value + 1) % 3
        return self.h.value @ self.w_out.value


@model()
class FilteredReadout(Cell):
    """A readout that is kept in a `ShortTermState` filters what the traces cannot follow."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.filtered = brainstate.ShortTermState(start((batch_size, OUTPUTS)))
        self.count = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        on = (self.count.value + np.arange(H)) % 3 != 0
        self.count.value = self.count.value + 1
        self.h.value = 0.8 * self.h.value + jnp.where(on, braintrace.matmul(x, self.w.value), 0.0)
        output = self.h.value @ self.w_out.value
        self.filtered.value = 0.6 * self.filtered.value + output
        return self.filtered.value

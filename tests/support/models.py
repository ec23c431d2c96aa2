"""Two models beside the catalogue: one with units in every value, one with noise."""

import brainstate
import jax.numpy as jnp
import saiunit

import braintrace


class Conductance(brainstate.nn.Module):
    """A leaky layer of currents, driven by voltages through conductances."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)) * saiunit.mS)

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)) * saiunit.mA)

    def update(self, x):
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x * saiunit.volt, self.w.value)
        return self.h.value


class Noisy(brainstate.nn.Module):
    """A model of one sample that starts from noise and adds noise."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.linspace(-1, 1, 12).reshape(3, 4))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(brainstate.random.normal(size=4))

    def update(self, x):
        noise = brainstate.random.normal(size=4)
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value) + noise)
        return self.h.value

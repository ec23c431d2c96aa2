"""Models of a single test, made of one function; those of several tests are in `catalogue`."""

import brainstate
import jax.numpy as jnp
import saiunit

import braintrace


def small(states, start=0.0, **weights):
    """Make a class of models of a function ``step(model, x) -> output``.

    states: {name: shape of one sample}; all numbers are `start`.
    weights: {name: array}, in double precision where JAX has it.
    """

    def class_of(step):
        class Small(brainstate.nn.Module):
            __doc__ = step.__doc__

            def __init__(self):
                super().__init__()
                for name, value in weights.items():
                    setattr(self, name, brainstate.ParamState(jnp.asarray(value)))

            def init_state(self, batch_size=None, **_):
                lead = () if batch_size is None else (batch_size,)
                for name, shape in states.items():
                    value = start + jnp.zeros((*lead, *shape))
                    setattr(self, name, brainstate.HiddenState(value))

            update = step

        Small.__name__ = step.__name__
        return Small

    return class_of


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

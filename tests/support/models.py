"""Brainstate modules of the catalogue's models, one with units and one with noise."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

import braintrace


def initial_state(units, batch, dtype):
    """(batch, units), or (units,) where batch is None; equal for all samples, and not zero."""
    values = np.linspace(-0.3, 0.5, units)
    return single_precision(values if batch is None else np.tile(values, (batch, 1)), dtype)


def initial_state_behind(weight, batch):
    """Initial state of as many units as the weight has outputs."""
    return initial_state(weight.shape[1], batch, weight.dtype)


def single_precision(values, dtype):
    """Values rounded to float32, in another dtype."""
    return jnp.asarray(np.asarray(values, np.float32).astype(dtype))


class MarkedOps:
    """The library's meaning of a model's operations; new states go into the module's."""

    def __init__(self, hidden):
        self._hidden = hidden

    def matmul(self, name, x, weight, bias=None):
        return braintrace.matmul(x, weight, bias)

    def element_wise(self, name, weight, fn=lambda w: w):
        return braintrace.element_wise(weight, fn)

    def feedback(self, x, weight, feedback):
        return braintrace.feedback_matmul(x, weight, jnp.asarray(feedback, weight.dtype))

    def new_state(self, name, value):
        self._hidden[name].value = value
        return value

    def mixing(self, value):
        return value


class GenericModel(brainstate.nn.Module):
    """A case's step function over ParamStates and HiddenStates of the same names."""

    def __init__(self, case, params):
        super().__init__()
        self.case = case
        self.dtype = jax.tree.leaves(params)[0].dtype
        for name, value in params.items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size=None, **_):
        for name, value in self.case.initial_states(batch_size, self.dtype).items():
            setattr(self, name, brainstate.HiddenState(value))

    def reset_state(self, batch_size=None, **_):
        for name, value in self.case.initial_states(batch_size, self.dtype).items():
            getattr(self, name).value = value

    def update(self, x):
        hidden = {name: getattr(self, name) for name in self.case.states}
        params = {name: getattr(self, name).value for name in self.case.shapes}
        states = {name: state.value for name, state in hidden.items()}
        return self.case.step(MarkedOps(hidden), params, states, x)


class PlainInputRNN(brainstate.nn.Module):
    """`steps.plain_input_rnn`, written as a user would."""

    def __init__(self, case, params):
        super().__init__()
        self.w_rec = brainstate.ParamState(params["w_rec"])
        self.w_in = brainstate.ParamState(params["w_in"])

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(initial_state_behind(self.w_in.value, batch_size))

    def reset_state(self, batch_size=None, **_):
        self.h.value = initial_state_behind(self.w_in.value, batch_size)

    def update(self, x):
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jax.nn.tanh(x @ self.w_in.value + recurrent)
        return self.h.value


class LeakyLayer(brainstate.nn.Module):
    """One layer of `TwoLayers`."""

    def __init__(self, weight, leak):
        super().__init__()
        self.w = brainstate.ParamState(weight)
        self.leak = leak

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(initial_state_behind(self.w.value, batch_size))

    def reset_state(self, batch_size=None, **_):
        self.h.value = initial_state_behind(self.w.value, batch_size)

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = self.leak * self.h.value + jnp.tanh(drive)
        return self.h.value


class TwoLayers(brainstate.nn.Module):
    """`steps.two_layers`, written as a user would: layers in sub-modules."""

    def __init__(self, case, params):
        super().__init__()
        self.lower = LeakyLayer(params["lower.w"], 0.8)
        self.upper = LeakyLayer(params["upper.w"], 0.6)
        self.w_out = brainstate.ParamState(params["w_out"])
        self.w_out_lower = brainstate.ParamState(params["w_out_lower"])

    def update(self, x):
        lower = self.lower(x)
        upper = self.upper(lower)
        return upper @ self.w_out.value + lower @ self.w_out_lower.value


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

"""Coupled states that one operation drives, and what each kind of rule makes of them.

A network's step is the same code with the operation of the library and with its plain form

    h_a' = sum_c m[a, c] sin(h_c) + tanh(y)        y = op(x, theta)
    output = sum_a (a + 1) h_a'

and, if it is recurrent, ``y = op(x + P sum_a h_a, theta)`` with a fixed matrix ``P``, which mixes
all units; the output may go through a `feedback_matmul`. The oracles differentiate the plain form.
"""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import random_oracles
from backpropagation import through_time
from operation_cases import BATCH, OperationCase, loss
from ops_catalogue import plain_feedback

import braintrace

OUTPUTS = 2


def fixed(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape) / 2


@dataclasses.dataclass(frozen=True)
class Network:
    """What is in the model."""

    case: OperationCase
    mixing: tuple[tuple[float, ...], ...]
    is_recurrent: bool = False
    has_feedback: bool = False

    @property
    def parameters(self):
        found = self.case.parameters
        if self.has_feedback:
            found = {**found, "w_out": fixed(1, self.case.hidden[-1], OUTPUTS)}
        return {name: jnp.asarray(value, jnp.float64) for name, value in found.items()}

    @property
    def inputs(self):
        return self.case.inputs.astype(jnp.float64)

    @property
    def start(self):
        """Old states, ``(state, sample, ...)``."""
        return fixed(2, len(self.mixing), BATCH, *self.case.hidden)

    def operand(self, states, x):
        """What the operation reads."""
        return x + self._past(states, self.case.sample) if self.case.name != "embedding" else x

    def driven(self, states, y):
        """The new states, given the output of the operation."""
        if self.case.name == "embedding":
            y = y + self._past(states, self.case.hidden)
        drive = jnp.tanh(y)
        return jnp.stack(
            [
                sum(m * jnp.sin(h) for m, h in zip(row, states, strict=True) if m) + drive
                for row in self.mixing
            ]
        )

    def output(self, new, parameters, product):
        found = sum((a + 1) * h for a, h in enumerate(new))
        if not self.has_feedback:
            return found
        return product(found, parameters["w_out"], fixed(3, self.case.hidden[-1], OUTPUTS))

    def plain(self, states, x, parameters, added=0.0):
        """One step in plain JAX."""
        y = self.case.plain(self.operand(states, x), parameters)
        return self.driven(states, y + added)

    def plain_loss(self, new, parameters):
        return loss(self.output(new, parameters, plain_feedback))

    def _past(self, states, shape):
        """A product of the old states, of the samples' shape."""
        if not self.is_recurrent:
            return 0.0
        past = sum(states).reshape(states[0].shape[0], -1)
        weight = fixed(4, past.shape[1], int(np.prod(shape)))
        return (past @ weight).reshape(-1, *shape)


class Model(brainstate.nn.Module):
    """A network, with the operation of the library."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.parameters_of = {
            name: brainstate.ParamState(value) for name, value in network.parameters.items()
        }

    def init_state(self, batch_size=None, **_):
        self.hidden = {
            f"h{a}": brainstate.HiddenState(jnp.asarray(value))
            for a, value in enumerate(self.network.start)
        }

    def update(self, x):
        network = self.network
        values = {name: state.value for name, state in self.parameters_of.items()}
        old = [state.value for state in self.hidden.values()]
        new = network.driven(old, network.case.marked(network.operand(old, x), values))
        for state, value in zip(self.hidden.values(), new, strict=True):
            state.value = value
        return network.output(list(new), values, braintrace.feedback_matmul)


def _of_losses(network, held):
    def step(parameters, states, x):
        states = network.plain(held(states), x, parameters)
        return states, network.plain_loss(states, parameters)

    return through_time(step, network.parameters, network.start, network.inputs)


@functools.cache
def bptt(network):
    return _of_losses(network, lambda states: states)


@functools.cache
def immediate(network):
    """Gradients of the losses, the states before each of them held constant."""
    return _of_losses(network, jax.lax.stop_gradient)


def filtered(network, decay, spread):
    """By filters of the input: ``spread(t, e, states, y)`` is what ``y`` is worth in new states.

    Its first value is carried, and the second is multiplied with the learning signal.
    """

    @jax.jit
    def gradient(parameters):
        states, eps_x, eps_f = jnp.asarray(network.start), 0.0, jnp.zeros(network.start.shape)
        total = jax.tree.map(jnp.zeros_like, parameters)
        for t, x in enumerate(network.inputs, start=1):
            y = network.case.plain(x, parameters)
            eps_f, worth = spread(t, eps_f, states, 1 - jnp.tanh(y) ** 2)
            states, eps_x = network.driven(states, y), decay * eps_x + x
            signal = jax.grad(network.plain_loss)(states, parameters)
            _, pull_back = jax.vjp(lambda p, x=eps_x: network.case.plain(x, p), parameters)
            total = jax.tree.map(jnp.add, total, pull_back((signal * worth).sum(0))[0])
        return total

    return gradient(network.parameters)


def ottt(network, decay):
    return filtered(network, decay, lambda t, eps_f, states, slope: (eps_f, slope[None]))


def es_d_rtrl(network, alpha):
    mixing = np.asarray(network.mixing)

    def spread(t, eps_f, states, slope):
        carried = jnp.einsum("ac,c...->a...", mixing, jnp.cos(states) * eps_f)
        eps_f = alpha * carried + (1 - alpha) * slope
        return eps_f, eps_f / (1 - alpha**t)

    return filtered(network, alpha, spread)


def decaying(network, decay):
    """By traces ``E' = decay E + F``, the derivative of the step with old states held constant."""

    @jax.jit
    def gradient(parameters):
        states = jnp.asarray(network.start)
        traces = jax.tree.map(lambda p: jnp.zeros((*states.shape, *p.shape)), parameters)
        total = jax.tree.map(jnp.zeros_like, parameters)
        for x in network.inputs:
            entering = jax.jacrev(lambda p, h=states, x=x: network.plain(h, x, p))(parameters)
            traces = jax.tree.map(lambda E, new: decay * E + new, traces, entering)
            states = network.plain(states, x, parameters)
            signal = jax.grad(network.plain_loss)(states, parameters)
            found = jax.tree.map(lambda E, s=signal: jnp.tensordot(s, E, s.ndim), traces)
            total = jax.tree.map(jnp.add, total, found)
        return total

    return gradient(network.parameters)


def of_draws(network, rule, signs):
    """UORO or KF-RTRL, from given signs."""
    S = np.swapaxes(network.start, 0, 1).reshape(BATCH, -1)
    of_samples, params = OfSamples(network), network.parameters
    return random_oracles.of_one_product(rule, of_samples, params, S, network.inputs, signs)


@dataclasses.dataclass(frozen=True)
class OfSamples:
    """A network as `random_oracles.of_one_product` reads it."""

    network: Network

    @property
    def shape(self):
        return 1, *self.network.case.hidden

    def states(self, S):
        return S.reshape(len(self.network.mixing), *self.shape)

    def step(self, S, x, params, added=0.0):
        return self.network.plain(self.states(S), x[None], params, added).ravel()

    def operand(self, S, x):
        x = self.network.operand(self.states(S), x[None])
        return jnp.append(x, 1.0) if self._has_bias else x.ravel()

    def pulled(self, u, onto, params):
        x = (u[:-1] if self._has_bias else u).reshape(1, *self.network.case.sample)
        _, pull = jax.vjp(lambda params: self.network.case.plain(x, params), params)
        (found,) = pull(onto.reshape(self.shape))
        return {**found, "b": u[-1] * found["b"]} if self._has_bias else found

    def loss(self, S):
        states = S.reshape(BATCH, len(self.network.mixing), *self.network.case.hidden)
        return self.network.plain_loss(jnp.swapaxes(states, 0, 1), None)

    @property
    def _has_bias(self):
        return "b" in self.network.case.parameters

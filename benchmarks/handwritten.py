"""The same gradients written by hand in plain JAX: what the library's overhead is measured by.

`one_chunk` does a whole sequence of any network at once; from zero traces it needs none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .networks import Arrays, Network, Plain, squared_error


def _merged(tree: Any) -> Any:
    """Return arrays with time and batch as one axis."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _readout_gradients(
    network: Network, parameters: Arrays, states: Arrays, targets: Any, steps: int
) -> Any:
    """Return the loss of recorded states, and its gradients (parameters, states)."""

    def loss(parameters: Arrays, states: Arrays) -> Any:
        output = network.readout(parameters, _merged(states))
        return squared_error(output, _merged(targets)) * len(targets) / steps

    return jax.value_and_grad(loss, (0, 1))(parameters, states)


def of_chunk(
    network: Network, parameters: Arrays, start: Arrays, xs: Any, targets: Any, steps: int
) -> Any:
    """Return the loss of a chunk, gradients without traces, those by the start, and the states.

    ``steps`` is the length of the whole sequence. The states are the last ones, those before each
    step, and the results of the operations.
    """
    ops = Plain()

    def forward(states: Arrays, x: Any) -> Any:
        ys = network.drive(ops, parameters, states, x)
        new = network.cell(states, ys)
        return new, (states, ys, new)

    end, (before, ys, after) = jax.lax.scan(forward, start, xs)
    loss, (plain, signal) = _readout_gradients(network, parameters, after, targets, steps)

    def backward(carry: Arrays, now: Any) -> Any:
        states, ys, signal = now
        adjoint = jax.tree.map(jnp.add, signal, carry)
        return jax.vjp(network.cell, states, ys)[1](adjoint)

    still = jax.tree.map(jnp.zeros_like, start)
    mu, factors = jax.lax.scan(backward, still, (before, ys, signal), reverse=True)

    def drive(parameters: Arrays) -> Arrays:
        return network.drive(ops, parameters, _merged(before), _merged(xs))

    (through_states,) = jax.vjp(drive, parameters)[1](_merged(factors))
    return loss, jax.tree.map(jnp.add, plain, through_states), mu, (end, before, ys)


def one_chunk(network: Network) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, D_RTRL gradients)``."""

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        start = network.start(xs.shape[1])
        return of_chunk(network, parameters, start, xs, targets, len(xs))[:2]

    return gradients


def contracted(signal: Any, trace: Any) -> Any:
    """Return the sum over samples of signal times trace."""
    if jax.default_backend() != "cpu":
        return jnp.sum(signal[:, None] * trace, axis=0)
    # XLA's reduction over the leading axis takes twenty times as long on a processor.
    return functools.reduce(jnp.add, [s * e for s, e in zip(signal, trace, strict=True)])

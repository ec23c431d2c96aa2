r"""Gradients of a network the literal way, in plain JAX.

`bptt` differentiates the loss of the whole sequence. With ``cut_mixing`` the states that enter
a weight count as constant; what is left is what D_RTRL computes,

.. math:: \epsilon^t = D^t \epsilon^{t-1} + D_f^t \otimes x^t, \qquad
          \nabla w = \sum_t l^t \circ \epsilon^t,

because `D` is elementwise. `es_d_rtrl` is the recursion of that algorithm, step
by step (:math:`\alpha` is its decay):

.. math::

    \epsilon_x^t = \alpha \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[a] = \alpha \sum_c D^t[a, c] \epsilon_f^{t-1}[c] + (1 - \alpha) D_f^t[a], \qquad
    \nabla w = \sum_t \frac{\sum_a l^t[a] \epsilon_f^t[a]}{1 - \alpha^t} \otimes \epsilon_x^t.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.handwritten_steps import jacobians
from benchmarks.networks import Arrays, Network, sequence_loss, squared_error
from benchmarks.operations import PlainOps


def bptt(network: Network, cut_mixing: bool = False) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, gradients)``."""
    return jax.value_and_grad(partial(sequence_loss, network, PlainOps(cut_mixing)))


def windows(network: Network, window: int, with_traces: bool) -> Any:
    """Return ``(parameters, xs, targets) -> gradients`` of windows.

    Each window is differentiated from its first states. With traces, the derivative with respect
    to these states meets the traces of D_RTRL: BPTT without mixing of all steps before.
    """

    def last(parameters: Arrays, states: Arrays, xs: Any, cut: bool) -> Arrays:
        ops = PlainOps(cut)
        return jax.lax.scan(
            lambda states, x: (network.step(ops, parameters, states, x)[0], None), states, xs
        )[0]

    def loss(parameters: Arrays, states: Arrays, xs: Any, targets: Any) -> Any:
        def step(states: Arrays, now: Any) -> Any:
            states, output = network.step(PlainOps(), parameters, states, now[0])
            return states, squared_error(output, now[1])

        return jnp.sum(jax.lax.scan(step, states, (xs, targets))[1])

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Arrays:
        zeros = network.start(xs.shape[1], xs.dtype)
        total = jax.tree.map(jnp.zeros_like, parameters)
        for first in range(0, len(xs), window):
            now = slice(first, first + window)
            start = last(parameters, zeros, xs[:first], False)
            found, mu = jax.grad(loss, (0, 1))(parameters, start, xs[now], targets[now])
            total = jax.tree.map(jnp.add, total, found)
            if with_traces and first:
                before = partial(last, states=zeros, xs=xs[:first], cut=True)
                (past,) = jax.vjp(before, parameters)[1](mu)
                total = jax.tree.map(jnp.add, total, past)
        return {name: value / len(xs) for name, value in total.items()}

    return gradients


def es_d_rtrl(network: Network, alpha: float) -> Any:
    """Return ``(parameters, xs, targets) -> gradients``."""

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Arrays:
        def step(carry: Any, now: Any) -> Any:
            states, filtered_x, filtered_f, total = carry
            x, target, correction = now
            ops = PlainOps()
            ys = network.drive(ops, parameters, states, x)
            D, Df = jacobians(network.cell, states, ys)
            filtered_x = {n: alpha * filtered_x[n] + ops.inputs[n] for n in ops.inputs}
            filtered_f = {
                y: {
                    a: alpha * sum(D[c][a] * filtered_f[y][c] for c in states)
                    + (1 - alpha) * Df[y][a]
                    for a in states
                }
                for y in ys
            }
            new = network.cell(states, ys)
            found = _step_gradient(
                network,
                parameters,
                states,
                new,
                x,
                target,
                filtered_x,
                filtered_f,
                correction,
            )
            return (
                new,
                filtered_x,
                filtered_f,
                jax.tree.map(jnp.add, total, found),
            ), None

        corrections = 1 - alpha ** jnp.arange(1, len(xs) + 1, dtype=jnp.float32)
        start = _zero_carry(network, parameters, xs[0])
        total = jax.lax.scan(step, start, (xs, targets, corrections))[0][-1]
        return {name: value / len(xs) for name, value in total.items()}

    return gradients


def _zero_carry(network: Network, parameters: Arrays, x: Any) -> Any:
    ops, states = PlainOps(), network.start(x.shape[0], x.dtype)
    ys = network.drive(ops, parameters, states, x)
    filtered_x = jax.tree.map(jnp.zeros_like, ops.inputs)
    filtered_f = {y: jax.tree.map(jnp.zeros_like, states) for y in ys}
    return states, filtered_x, filtered_f, jax.tree.map(jnp.zeros_like, parameters)


def _step_gradient(
    network: Network,
    parameters: Arrays,
    states: Arrays,
    new: Arrays,
    x: Any,
    target: Any,
    filtered_x: Arrays,
    filtered_f: Arrays,
    correction: Any,
) -> Arrays:
    def loss(parameters: Arrays, new: Arrays) -> Any:
        return squared_error(network.readout(parameters, new), target)

    plain, signal = jax.grad(loss, (0, 1))(parameters, new)
    factors = {
        y: sum(signal[a] * filtered_f[y][a] for a in signal) / correction for y in filtered_f
    }

    def drive(parameters: Arrays) -> Arrays:
        return network.drive(PlainOps(inputs=filtered_x), parameters, states, x)

    ys, pull_back = jax.vjp(drive, parameters)
    (through_states,) = pull_back({y: factors[y].astype(ys[y].dtype) for y in ys})
    return jax.tree.map(jnp.add, plain, through_states)


def deviation(found: Mapping[Any, Any], expected: Mapping[Any, Any]) -> float:
    """Return the largest relative deviation of a parameter's gradient (root mean square).

    Not a number where a gradient is missing, not finite, or zero in the oracle: nothing can then
    be said to agree.
    """
    if set(found) != set(expected):
        return float("nan")
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Any, expected: Any) -> float:
    found, expected = (jnp.asarray(value, jnp.float32) for value in (found, expected))
    size = float(jnp.linalg.norm(expected.ravel()))
    if found.shape != expected.shape or not 0 < size < float("inf"):
        return float("nan")
    return float(jnp.linalg.norm((found - expected).ravel())) / size

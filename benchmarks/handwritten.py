r"""The same gradients written by hand in plain JAX: what the library's overhead is measured by.

For the leaky tanh RNN, with :math:`D = 0.9` and :math:`D_f = 0.1 (1 - \tanh^2 y)`, a chunk of
``K`` steps from the trace :math:`\epsilon^0` gives

.. math::

    \lambda^s = l^s + D \lambda^{s+1}, \qquad
    \nabla w = \sum_s x^s \otimes (D_f^s \lambda^s) + (D \lambda^1) \circ \epsilon^0, \qquad
    \epsilon^K = D^K \epsilon^0 + \sum_s x^s \otimes (D^{K-s} D_f^s).

`one_chunk` does a whole sequence of any network at once; from zero traces it needs none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .networks import LEAK, Arrays, Network, Plain, squared_error
from .subjects import windows_of


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


def one_chunk(network: Network) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, D_RTRL gradients)``."""
    ops = Plain()

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        def forward(states: Arrays, x: Any) -> Any:
            ys = network.drive(ops, parameters, states, x)
            new = network.cell(states, ys)
            return new, (states, ys, new)

        start = network.start(xs.shape[1])
        before, ys, after = jax.lax.scan(forward, start, xs)[1]
        loss, (plain, signal) = _readout_gradients(network, parameters, after, targets, len(xs))

        def backward(carry: Arrays, now: Any) -> Any:
            states, ys, signal = now
            adjoint = jax.tree.map(jnp.add, signal, carry)
            return jax.vjp(network.cell, states, ys)[1](adjoint)

        end = jax.tree.map(jnp.zeros_like, start)
        factors = jax.lax.scan(backward, end, (before, ys, signal), reverse=True)[1]

        def drive(parameters: Arrays) -> Arrays:
            return network.drive(ops, parameters, _merged(before), _merged(xs))

        (through_states,) = jax.vjp(drive, parameters)[1](_merged(factors))
        return loss, jax.tree.map(jnp.add, plain, through_states)

    return gradients


def _products(xs: Any, factors: Any) -> Any:
    """Return the sum over time of outer products, for each sample."""
    return jnp.einsum("sbi,sbj->bij", xs, factors)


def chunked(network: Network, chunk: int) -> Any:
    """Return the same for the leaky tanh RNN in chunks, which the sequence fills exactly."""

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        steps, batch = xs.shape[:2]
        w_in, w_rec = parameters["w_in"], parameters["w_rec"]

        def forward(h: Any, x: Any) -> Any:
            y = jnp.tanh(x @ w_in + h @ w_rec)
            new = LEAK * h + (1 - LEAK) * y
            return new, (h, (1 - LEAK) * (1 - y * y), new)

        def run_chunk(carry: Any, now: Any) -> Any:
            h, traces, total = carry
            x, target = now
            h, (before, Df, after) = jax.lax.scan(forward, h, x)
            loss, (plain, signal) = _readout_gradients(
                network, parameters, {"h": after}, target, steps
            )
            found = _with_traces(x, before, Df, signal["h"], traces)
            decays = LEAK ** jnp.arange(chunk - 1, -1, -1, dtype=Df.dtype)
            entering = Df * decays[:, None, None]
            traces = {
                name: LEAK**chunk * traces[name] + _products(inputs, entering)
                for name, inputs in (("w_in", x), ("w_rec", before))
            }
            total = jax.tree.map(jnp.add, total, {**found, "w_out": plain["w_out"]})
            return (h, traces, total), loss

        cut = windows_of((xs, targets), chunk)
        start = (
            network.start(batch)["h"],
            {
                name: jnp.zeros((batch, *parameters[name].shape), xs.dtype)
                for name in ("w_in", "w_rec")
            },
            jax.tree.map(jnp.zeros_like, parameters),
        )
        (_, _, total), losses = jax.lax.scan(run_chunk, start, cut)
        return jnp.sum(losses), total

    return gradients


def contracted(signal: Any, trace: Any) -> Any:
    """Return the sum over samples of signal times trace."""
    if jax.default_backend() != "cpu":
        return jnp.sum(signal[:, None] * trace, axis=0)
    # XLA's reduction over the leading axis takes twenty times as long on a processor.
    return functools.reduce(jnp.add, [s * e for s, e in zip(signal, trace, strict=True)])


def _with_traces(x: Any, before: Any, Df: Any, signal: Any, traces: Arrays) -> Arrays:
    def backward(carry: Any, now: Any) -> Any:
        adjoint = now + LEAK * carry
        return adjoint, adjoint

    first, adjoint = jax.lax.scan(backward, jnp.zeros_like(signal[0]), signal, reverse=True)
    factors = _merged(Df * adjoint)
    return {
        name: _merged(inputs).T @ factors + contracted(LEAK * first, traces[name])
        for name, inputs in (("w_in", x), ("w_rec", before))
    }


def smoothed(network: Network, alpha: float) -> Any:
    """Return the same for ES_D_RTRL of the leaky tanh RNN, in one chunk."""

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        w_in, w_rec = parameters["w_in"], parameters["w_rec"]

        def forward(carry: Any, x: Any) -> Any:
            h, trace_x, trace_h, trace_f = carry
            y = jnp.tanh(x @ w_in + h @ w_rec)
            trace_x, trace_h = alpha * trace_x + x, alpha * trace_h + h
            trace_f = alpha * LEAK * trace_f + (1 - alpha) * (1 - LEAK) * (1 - y * y)
            h = LEAK * h + (1 - LEAK) * y
            return (h, trace_x, trace_h, trace_f), (h, trace_x, trace_h, trace_f)

        h = network.start(xs.shape[1])["h"]
        start = (h, jnp.zeros_like(xs[0]), h, h)
        states, traces_x, traces_h, traces_f = jax.lax.scan(forward, start, xs)[1]
        loss, (plain, signal) = _readout_gradients(
            network, parameters, {"h": states}, targets, len(xs)
        )
        correction = 1 - alpha ** jnp.arange(1, len(xs) + 1, dtype=states.dtype)
        factors = _merged(signal["h"] * traces_f / correction[:, None, None])
        return loss, {
            "w_in": _merged(traces_x).T @ factors,
            "w_rec": _merged(traces_h).T @ factors,
            "w_out": plain["w_out"],
        }

    return gradients

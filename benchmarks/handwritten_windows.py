r"""Chunks and windows of `D_RTRL` written by hand in plain JAX, for networks with one hidden state.

A part of K steps starts from the states :math:`h^0` and the traces :math:`E^0`. Its gradient is
that of its losses, plus :math:`\mu E^0` with :math:`\mu = \partial L / \partial h^0`; in a chunk,
without paths through the mixing of states. The traces advance with the elementwise derivatives of
the cell:

.. math::

    E^K = \Big( \prod_t D^t \Big) E^0 + \sum_t x^t \otimes \Big( D_f^t \prod_{s > t} D^s \Big).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .handwritten import contracted
from .networks import Arrays, Network, Plain, squared_error
from .subjects import windows_of

DRIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {"w_in": ("drive",), "w_rec": ("drive",)},
    "gru": {"w_in": ("z", "r", "n_in"), "w_rec": ("z", "r", "n_rec")},
}
"""By network of one hidden state: the products of each weight, side by side."""


def split_inputs(network: Network, length: int, part: Callable[..., Any]) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, gradients)`` in parts that fill the sequence.

    The part is `handwritten.of_chunk` or `of_window`.
    """

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        def run_part(carry: Any, now: Any) -> Any:
            states, traces, total = carry
            loss, found, mu, after = part(network, parameters, states, *now, len(xs))
            end, before, ys = after
            for name, trace in traces.items():
                found[name] += contracted(_repeated(mu["h"], trace), trace)
            traces = _advanced(network, traces, now[0], before["h"], ys)
            return (end, traces, jax.tree.map(jnp.add, total, found)), loss

        batch = xs.shape[1]
        shapes = {name: (batch, *parameters[name].shape) for name in DRIVES[network.name]}
        traces = {name: jnp.zeros(shape, xs.dtype) for name, shape in shapes.items()}
        start = network.start(batch), traces, jax.tree.map(jnp.zeros_like, parameters)
        (_, _, total), losses = jax.lax.scan(run_part, start, windows_of((xs, targets), length))
        return jnp.sum(losses), total

    return gradients


def of_window(
    network: Network, parameters: Arrays, start: Arrays, xs: Any, targets: Any, steps: int
) -> Any:
    ops = Plain()

    def loss_of(parameters: Arrays, start: Arrays) -> Any:
        def step(states: Arrays, now: Any) -> Any:
            ys = network.drive(ops, parameters, states, now[0])
            new = network.cell(states, ys)
            return new, (squared_error(network.readout(parameters, new), now[1]), states, ys)

        end, (losses, before, ys) = jax.lax.scan(step, start, (xs, targets))
        return jnp.sum(losses) / steps, (end, before, ys)

    loss, pull, after = jax.vjp(loss_of, parameters, start, has_aux=True)
    return loss, *pull(jnp.ones(())), after


def _repeated(values: Any, trace: Any) -> Any:
    """Return values of units once for every product of a weight."""
    return jnp.tile(values, trace.shape[-1] // values.shape[-1])


def _advanced(network: Network, traces: Arrays, xs: Any, before: Any, ys: Any) -> Arrays:
    def backward(carry: Any, now: Any) -> Any:
        h, y = now
        states, factors = jax.vjp(network.cell, {"h": h}, y)[1]({"h": carry})
        return states["h"], factors

    ones = jnp.ones_like(before[0])
    decay, factors = jax.lax.scan(backward, ones, (before, ys), reverse=True)
    advanced = {}
    for name, drives in DRIVES[network.name].items():
        inputs = xs if name == "w_in" else before
        side_by_side = jnp.concatenate([factors[drive] for drive in drives], axis=-1)
        kept = _repeated(decay, traces[name])[:, None] * traces[name]
        advanced[name] = kept + jnp.einsum("sbi,sbj->bij", inputs, side_by_side)
    return advanced

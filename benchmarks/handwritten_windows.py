r"""Windows written by hand in plain JAX: truncated BPTT, with and without the traces of `D_RTRL`.

A window of K steps starts from the states :math:`h^0` and the traces :math:`E^0`. Its gradient is
that of its losses, plus :math:`\mu E^0` with :math:`\mu = \partial L / \partial h^0`. The traces
advance with the elementwise derivatives of the cell:

.. math::

    E^K = \Big( \prod_t D^t \Big) E^0 + \sum_t x^t \otimes \Big( D_f^t \prod_{s > t} D^s \Big).
"""

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


def with_traces(network: Network, window: int) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, gradients)`` in windows of `D_RTRL`."""
    weights, ops = DRIVES[network.name], Plain()

    def losses_of(parameters: Arrays, h: Any, xs: Any, targets: Any) -> Any:
        def step(h: Any, now: Any) -> Any:
            x, target = now
            ys = network.drive(ops, parameters, {"h": h}, x)
            new = network.cell({"h": h}, ys)
            loss = squared_error(network.readout(parameters, new), target)
            return new["h"], (loss, h, ys)

        end, (losses, before, ys) = jax.lax.scan(step, h, (xs, targets))
        return jnp.sum(losses), (end, before, ys)

    def gradients(parameters: Arrays, xs: Any, targets: Any) -> Any:
        def run_window(carry: Any, now: Any) -> Any:
            h, traces, total = carry
            xs_now, targets_now = now
            loss, pull, (end, before, ys) = jax.vjp(
                lambda p, h: losses_of(p, h, xs_now, targets_now), parameters, h, has_aux=True
            )
            found, mu = pull(jnp.ones(()) / len(xs))
            total = jax.tree.map(jnp.add, total, found)
            for name, trace in traces.items():
                past = contracted(_repeated(mu, trace), trace)
                total[name] += past
            return (end, _advanced(network, traces, xs_now, before, ys), total), loss

        batch, h = xs.shape[1], network.start(xs.shape[1])["h"]
        traces = {name: jnp.zeros((batch, *parameters[name].shape), xs.dtype) for name in weights}
        start = h, traces, jax.tree.map(jnp.zeros_like, parameters)
        (_, _, total), losses = jax.lax.scan(run_window, start, windows_of((xs, targets), window))
        return jnp.sum(losses) / len(xs), total

    return gradients


def _repeated(values: Any, trace: Any) -> Any:
    """Return values of units once for every product of a weight."""
    return jnp.tile(values, trace.shape[-1] // values.shape[-1])


def _advanced(network: Network, traces: Arrays, xs: Any, before: Any, ys: Any) -> Arrays:
    """Return the traces after a window."""

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

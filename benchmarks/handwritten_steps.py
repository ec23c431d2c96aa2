r"""One step of D_RTRL written by hand in plain JAX, for networks whose weights are matrices.

.. math::

    \epsilon^t[a] = \sum_c D^t[a, c]\, \epsilon^{t-1}[c] + D_f^t[a] \otimes x^t, \qquad
    \nabla w = \sum_b \sum_a l^t[a] \circ \epsilon^t[a].

What a step costs here is what XLA makes of that; the library cannot be far below.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .handwritten import contracted
from .networks import Arrays, Network, Plain, squared_error

Step = Callable[..., tuple[Arrays, Any, Arrays]]
"""``(parameters, states, traces, x, target) -> (states, traces, gradients)``."""


def _one_at(states: Arrays, name: str) -> Arrays:
    return {key: (jnp.ones_like if key == name else jnp.zeros_like)(states[key]) for key in states}


def jacobians(
    cell: Callable[[Arrays, Arrays], Arrays], states: Arrays, ys: Arrays
) -> tuple[Any, Any]:
    """Return ``D[c][a]`` and ``Df[y][a]`` of a cell, which is elementwise."""

    def along(states_tangent: Arrays, ys_tangent: Arrays) -> Arrays:
        return jax.jvp(cell, (states, ys), (states_tangent, ys_tangent))[1]

    still_states, still_ys = (jax.tree.map(jnp.zeros_like, kept) for kept in (states, ys))
    D = {c: along(_one_at(states, c), still_ys) for c in states}
    Df = {y: along(still_states, _one_at(ys, y)) for y in ys}
    return D, Df


def _signal(network: Network, parameters: Arrays, states: Arrays, target: Any) -> Any:
    """Return the gradients of the step's loss by the parameters and by the new states."""

    def loss(parameters: Arrays, states: Arrays) -> Any:
        return squared_error(network.readout(parameters, states), target)

    return jax.grad(loss, (0, 1))(parameters, states)


def _outer(x: Any, factor: Any) -> Any:
    return x[:, :, None] * factor[:, None, :]


def one_drive(network: Network, batch: int) -> tuple[Step, Any]:
    """Return the step and the first traces of a network that adds its products up."""

    def step(parameters: Arrays, states: Arrays, traces: Any, x: Any, target: Any) -> Any:
        ops = Plain()
        ys = network.drive(ops, parameters, states, x)
        D, by_y = jacobians(network.cell, states, ys)
        (Df,) = by_y.values()
        new = network.cell(states, ys)
        gradients, signal = _signal(network, parameters, new, target)
        traces = {
            weight: {
                a: sum(D[c][a][:, None, :] * old[c] for c in states)
                + _outer(ops.inputs[weight], Df[a])
                for a in states
            }
            for weight, old in traces.items()
        }
        found = {
            weight: sum(contracted(signal[a], trace[a]) for a in states)
            for weight, trace in traces.items()
        }
        return new, traces, {**gradients, **found}

    shapes = {name: network.scales[name][0] for name in ("w_in", "w_rec")}
    zeros = {
        name: {a: jnp.zeros((batch, *shape)) for a in network.states}
        for name, shape in shapes.items()
    }
    return step, zeros


def lstm(network: Network, batch: int) -> tuple[Step, Any]:
    """Return the step and the first traces of the LSTM: one trace for each gate of its cell."""

    def step(parameters: Arrays, states: Arrays, traces: Arrays, x: Any, target: Any) -> Any:
        ops = Plain()
        ys = network.drive(ops, parameters, states, x)
        i, f, o = (jax.nn.sigmoid(ys[gate]) for gate in "ifo")
        g = jnp.tanh(ys["g"])
        new = network.cell(states, ys)
        inputs, squashed = ops.inputs["gates"], jnp.tanh(new["c"])
        gradients, signal = _signal(network, parameters, new, target)
        Df = {"i": g * i * (1 - i), "f": states["c"] * f * (1 - f), "g": i * (1 - g * g)}
        traces = {y: f[:, None, :] * traces[y] + _outer(inputs, Df[y]) for y in traces}
        of_cell = signal["c"] + signal["h"] * o * (1 - squashed * squashed)
        parts = [contracted(of_cell, traces[y]) for y in "ifg"]
        parts.append(inputs.T @ (signal["h"] * squashed * o * (1 - o)))
        return new, traces, {**gradients, "gates": jnp.concatenate(parts, axis=1)}

    inputs, gates = network.scales["gates"][0]
    return step, {y: jnp.zeros((batch, inputs, gates // 4)) for y in "ifg"}


BY_HAND = {"dense": one_drive, "alif": one_drive, "lstm": lstm}

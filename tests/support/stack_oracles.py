r"""Gradients of a stack of layers the literal way, in plain JAX.

The trace of a weight goes through the states of its own layer only: with :math:`S_j^t` the states
of layer j, D_RTRL differentiates the loss by the weights of layer k with the states that enter a
weight constant, and with the old states of every other layer constant,

.. math:: \epsilon_k^t = \frac{\partial S_k^t}{\partial S_k^{t-1}} \epsilon_k^{t-1} + \dots, \qquad
          l_k^t = \frac{d L^t}{d S_k^t} \text{ through the layers above, at the same step.}

So there is one differentiation for each layer. `es_d_rtrl` is the recursion of `oracles`, with
the :math:`l_k^t` of each layer. A mask on the losses gives the gradient of the sequence that
comes last, the traces not zero where it begins.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from stack_cells import CELLS, Cell

from benchmarks.handwritten_steps import jacobians
from benchmarks.networks import Arrays, squared_error
from benchmarks.operations import PlainOps
from benchmarks.stack import Layers

Parameters = Mapping[tuple[Any, ...], Any]
"""As ``model.states(ParamState)`` has them: ``('layers', 0, 'W', 'weight')``, ``('out', …)``."""


class Stack(Layers):
    """The equations of a stack."""

    @property
    def equations(self) -> Cell:
        """The equations of every layer."""
        return CELLS[self.cell]

    def start(self, batch: int, dtype: Any) -> list[Arrays]:
        """Return the states before the first step."""
        zeros = jnp.zeros((batch, self.hidden), dtype)
        return [dict.fromkeys(self.equations.states, zeros) for _ in range(self.layers)]

    def weights(self, parameters: Parameters, layer: int) -> Arrays:
        """Return the weights of a layer by the names of its attributes."""
        mine = ("layers", layer)
        return {path[2]: value for path, value in parameters.items() if path[:2] == mine}


def readout(parameters: Parameters, h: Any) -> Any:
    """Return the output of the network."""
    params = parameters["out", "weight"]
    return h @ params["weight"] + params["bias"]


def bptt(stack: Stack) -> Callable[..., Any]:
    """Return ``(parameters, xs, targets, mask) -> gradients`` by backpropagation through time."""

    def loss(parameters: Parameters, *data: Any) -> Any:
        return _sequence_loss(stack, PlainOps(), [parameters] * stack.layers, parameters, data)

    return jax.grad(loss)


def d_rtrl(stack: Stack) -> Callable[..., Any]:
    """Return ``(parameters, xs, targets, mask) -> gradients`` as D_RTRL defines them."""
    ops = PlainOps(cut_mixing=True)

    def gradients(parameters: Parameters, *data: Any) -> Any:
        def loss(parameters: Parameters, layer: int) -> Any:
            constant = jax.lax.stop_gradient(parameters)
            each = [parameters if k == layer else constant for k in range(stack.layers)]
            return _sequence_loss(stack, ops, each, parameters, data, keeping=layer)

        found = [jax.grad(loss)(parameters, layer) for layer in range(stack.layers)]
        return {path: found[path[1] if path[0] == "layers" else 0][path] for path in parameters}

    return gradients


def _sequence_loss(
    stack: Stack,
    ops: PlainOps,
    of_layers: list[Parameters],
    of_readout: Parameters,
    data: tuple[Any, ...],
    keeping: int | None = None,
) -> Any:
    """Return the weighted mean of the losses.

    With `keeping`, the old states of all layers but that one are constant.
    """
    xs, targets, mask = data

    @jax.checkpoint
    def step(states: list[Arrays], now: Any) -> Any:
        x, target = now
        new = []
        for layer, parameters in enumerate(of_layers):
            old = states[layer]
            if keeping not in (None, layer):
                old = jax.lax.stop_gradient(old)
            weights = stack.weights(parameters, layer)
            new.append(stack.equations.cell(old, stack.equations.drive(ops, weights, old, x)))
            x = stack.equations.output(weights, new[-1], x)
        return new, squared_error(readout(of_readout, x), target)

    losses = jax.lax.scan(step, stack.start(xs.shape[1], xs.dtype), (xs, targets))[1]
    return jnp.sum(losses * mask) / jnp.sum(mask)


def es_d_rtrl(stack: Stack, alpha: float) -> Callable[..., Any]:
    """Return ``(parameters, xs, targets, mask) -> gradients`` as ES_D_RTRL defines them."""

    def gradients(parameters: Parameters, xs: Any, targets: Any, mask: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            states, filters, total = carry
            x, target, weight, correction = now
            plain, signals = _plain_gradients(stack, parameters, states, x, target)
            total = _add(total, plain, weight)
            new = []
            for layer in range(stack.layers):
                weights = stack.weights(parameters, layer)
                mine = states[layer], x, filters[layer], signals[layer]
                after, filters[layer], found = _filtered(stack.equations, alpha, weights, *mine)
                x = stack.equations.output(weights, after, x)
                of_layer = {
                    path: found[path[2]] for path in parameters if path[:2] == ("layers", layer)
                }
                total = _add(total, of_layer, weight / correction)
                new.append(after)
            return (new, filters, total), None

        corrections = 1 - alpha ** jnp.arange(1, len(xs) + 1, dtype=jnp.float32)
        start = stack.start(xs.shape[1], xs.dtype)
        zero = jax.tree.map(jnp.zeros_like, dict(parameters))
        filters = _zero_filters(stack, parameters, start, xs[0])
        sequences = (xs, targets, mask, corrections)
        total = jax.lax.scan(step, (start, filters, zero), sequences)[0][-1]
        return jax.tree.map(lambda value: value / jnp.sum(mask), total)

    return gradients


def _add(total: Any, more: Parameters, factor: Any) -> Any:
    scaled = jax.tree.map(lambda a, b: a + factor * b, {p: total[p] for p in more}, dict(more))
    return {**total, **scaled}


def _plain_gradients(
    stack: Stack, parameters: Parameters, states: list[Arrays], x: Any, target: Any
) -> tuple[Any, list[Arrays]]:
    """Return the gradients of a step's loss past the traces, and by every layer's new states."""

    def loss(parameters: Parameters, offsets: list[Arrays]) -> Any:
        reached = x
        for layer, (old, offset) in enumerate(zip(states, offsets, strict=True)):
            weights = stack.weights(parameters, layer)
            traced = jax.lax.stop_gradient(weights)
            ys = stack.equations.drive(PlainOps(), traced, old, reached)
            new = jax.tree.map(jnp.add, stack.equations.cell(old, ys), offset)
            reached = stack.equations.output(weights, new, reached)
        return squared_error(readout(parameters, reached), target)

    return jax.grad(loss, (0, 1))(dict(parameters), jax.tree.map(jnp.zeros_like, states))


def _filtered(
    cell: Cell, alpha: float, weights: Arrays, states: Arrays, x: Any, filters: Any, signal: Arrays
) -> tuple[Arrays, Any, Arrays]:
    """Return a layer's new states and filters, and its gradient without the correction."""
    ops, (filtered_x, filtered_f) = PlainOps(), filters
    ys = cell.drive(ops, weights, states, x)
    D, Df = jacobians(cell.cell, states, ys)
    filtered_x = {name: alpha * filtered_x[name] + ops.inputs[name] for name in ops.inputs}
    filtered_f = {
        y: {
            a: alpha * sum(D[c][a] * filtered_f[y][c] for c in states) + (1 - alpha) * Df[y][a]
            for a in states
        }
        for y in ys
    }
    factors = {y: sum(signal[a] * filtered_f[y][a] for a in states) for y in ys}
    of_filtered = PlainOps(inputs=filtered_x)
    pull_back = jax.vjp(lambda weights: cell.drive(of_filtered, weights, states, x), weights)[1]
    return cell.cell(states, ys), (filtered_x, filtered_f), pull_back(factors)[0]


def _zero_filters(
    stack: Stack, parameters: Parameters, states: list[Arrays], x: Any
) -> list[tuple[Arrays, Any]]:
    filters = []
    for layer, old in enumerate(states):
        ops, weights = PlainOps(), stack.weights(parameters, layer)
        ys = stack.equations.drive(ops, weights, old, x)
        filters.append((jax.tree.map(jnp.zeros_like, ops.inputs), {y: _zeros(old) for y in ys}))
        x = stack.equations.output(weights, stack.equations.cell(old, ys), x)
    return filters


def _zeros(states: Arrays) -> Arrays:
    return jax.tree.map(jnp.zeros_like, states)

r"""The cells of the stacks that are measured, written out in plain JAX.

A layer of a stack has three parts, as a `Network` has (see `networks`), so that one text is the
source of every oracle:

    ys      = drive(ops, weights, states, x)    the operations that learn online
    states' = cell(states, ys)                  position by position
    output  = output(weights, states', x)       what the layer above reads; plain

The weights are those of the module of the same name in ``braintrace.nn``: a mapping from its
attributes to their values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks import Arrays


def _hidden_state(weights: Arrays, states: Arrays, x: Any) -> Any:
    return states["h"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The equations of a layer.

    Attributes
    ----------
    states
        Names of the hidden states, of as many units each.
    drive, cell, output
        The parts of a step; see the module's docstring.
    """

    states: tuple[str, ...]
    drive: Callable[[Any, Arrays, Arrays, Any], Arrays]
    cell: Callable[[Arrays, Arrays], Arrays]
    output: Callable[[Arrays, Arrays, Any], Any] = _hidden_state


def _affine(ops: Any, name: str, x: Any, weight: Any, params: Arrays) -> Any:
    return ops.matmul(name, x, weight) + params["bias"]


def _joined(ops: Any, states: Arrays, x: Any) -> Any:
    return jnp.concatenate([x, ops.mixing(states["h"])], axis=-1)


def _gates(ops: Any, name: str, params: Arrays, states: Arrays, x: Any, letters: str) -> Arrays:
    both = _affine(ops, name, _joined(ops, states, x), params["weight"], params)
    return dict(zip(letters, jnp.split(both, len(letters), axis=-1), strict=True))


def _candidate(ops: Any, params: Arrays, states: Arrays, x: Any) -> Arrays:
    weight, inputs = params["weight"], x.shape[-1]
    h = ops.mixing(states["h"])
    return {
        "from_x": _affine(ops, "from_x", x, weight[:inputs], params),
        "from_h": ops.matmul("from_h", h, weight[inputs:]),
    }


def _gru_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    return _gates(ops, "Wrz", w["Wrz"], states, x, "rz") | _candidate(ops, w["Wh"], states, x)


def _gru_cell(states: Arrays, ys: Arrays) -> Arrays:
    r, z = jax.nn.sigmoid(ys["r"]), jax.nn.sigmoid(ys["z"])
    return {"h": (1 - z) * states["h"] + z * jnp.tanh(ys["from_x"] + r * ys["from_h"])}


def _mgu_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    return _gates(ops, "Wf", w["Wf"], states, x, "f") | _candidate(ops, w["Wh"], states, x)


def _mgu_cell(states: Arrays, ys: Arrays) -> Arrays:
    f = jax.nn.sigmoid(ys["f"])
    return {"h": (1 - f) * states["h"] + f * jnp.tanh(ys["from_x"] + f * ys["from_h"])}


def _lstm_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    return _gates(ops, "W", w["W"], states, x, "igfo")


def _lstm_cell(states: Arrays, ys: Arrays) -> Arrays:
    i, f, o = jax.nn.sigmoid(ys["i"]), jax.nn.sigmoid(ys["f"] + 1), jax.nn.sigmoid(ys["o"])
    c = f * states["c"] + i * jnp.tanh(ys["g"])
    return {"c": c, "h": o * jnp.tanh(c)}


def _leaky_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    return _gates(ops, "W", w["W"], states, x, "y")


def _leaky_cell(states: Arrays, ys: Arrays) -> Arrays:
    return {"h": 0.8 * states["h"] + 0.2 * jax.nn.relu(ys["y"])}


def _repeated(value: Any, like: Any) -> Any:
    return jnp.broadcast_to(value, like.shape)


def _ind_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    u = ops.element_wise("u", w["u"])
    y = _affine(ops, "W", x, w["W"]["weight"], w["W"])
    return {"y": y, "u": _repeated(u, states["h"])}


def _ind_cell(states: Arrays, ys: Arrays) -> Arrays:
    return {"h": jax.nn.relu(ys["y"] + ys["u"] * states["h"])}


def _lru_drive(ops: Any, w: Arrays, states: Arrays, x: Any) -> Arrays:
    r = w["recurrence"]
    eigenvalue = jnp.exp(-jnp.exp(r["nu"]) + 1j * jnp.exp(r["theta"]))
    once = {"cos": eigenvalue.real, "sin": eigenvalue.imag, "gamma": jnp.exp(r["gamma"])}
    repeated = {name: _repeated(value, states["re"]) for name, value in once.items()}
    real, imaginary = jnp.split(ops.matmul("B", x, w["B"]), 2, axis=-1)
    return {"real": real, "imaginary": imaginary, **repeated}


def _lru_cell(states: Arrays, ys: Arrays) -> Arrays:
    re, im = states["re"], states["im"]
    return {
        "re": ys["cos"] * re - ys["sin"] * im + ys["gamma"] * ys["real"],
        "im": ys["sin"] * re + ys["cos"] * im + ys["gamma"] * ys["imaginary"],
    }


def _lru_output(weights: Arrays, states: Arrays, x: Any) -> Any:
    both = jnp.concatenate([states["re"], states["im"]], axis=-1)
    return both @ weights["C"] + x @ weights["D"]


CELLS: Mapping[str, Cell] = {
    "GRUCell": Cell(("h",), _gru_drive, _gru_cell),
    "LSTMCell": Cell(("c", "h"), _lstm_drive, _lstm_cell),
    "MGUCell": Cell(("h",), _mgu_drive, _mgu_cell),
    "LeakyRNN": Cell(("h",), _leaky_drive, _leaky_cell),
    "IndRNN": Cell(("h",), _ind_drive, _ind_cell),
    "LRUCell": Cell(("re", "im"), _lru_drive, _lru_cell, _lru_output),
}

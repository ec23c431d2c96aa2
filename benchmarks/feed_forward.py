"""Layers that read nothing but their inputs, below a leaky readout: the gradient can be exact."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .networks import LEAK, Arrays, Network, spike

Cell = Callable[[Arrays, Any], Arrays]
"""``(states, input) -> states``."""


def rates(states: Arrays, y: Any) -> Arrays:
    """Leaky units."""
    return {"h": LEAK * states["h"] + (1 - LEAK) * jnp.tanh(y)}


def lif(states: Arrays, y: Any) -> Arrays:
    """Leaky integrate-and-fire neurons."""
    return {"V": LEAK * states["V"] * (1 - spike(states["V"] - 1)) + y}


def alif(states: Arrays, y: Any) -> Arrays:
    """Adaptive ones."""
    z = spike(states["V"] - 1 - 0.3 * states["a"])
    return {"V": LEAK * states["V"] - z + y, "a": 0.95 * states["a"] + z}


LAYERS: dict[str, tuple[Cell, tuple[str, ...]]] = {
    "rates": (rates, ("h",)),
    "lif": (lif, ("V",)),
    "alif": (alif, ("V", "a")),
}
"""Layers and their states."""


def feed_forward(
    layer: str, exact: bool, inputs: int = 64, hidden: int = 256, outputs: int = 10
) -> Network:
    """Return a layer below a leaky readout.

    Parameters
    ----------
    layer
        A name of `LAYERS`.
    exact
        Whether what the readout remembers is a part of the gradient.
    inputs, hidden, outputs
        Numbers of units.
    """
    cell, own = LAYERS[layer]

    def drive(ops: Any, p: Arrays, states: Arrays, x: Any) -> Arrays:
        return {"y": ops.matmul("w_in", x, p["w_in"])}

    def readout(p: Arrays, states: Arrays) -> Any:
        z = states["h"] if "h" in states else spike(states["V"] - 1 - 0.3 * states.get("a", 0.0))
        return z @ p["w_out"]

    return Network(
        name=layer,
        input_shape=(inputs,),
        outputs=outputs,
        scales={
            "w_in": ((inputs, hidden), inputs**-0.5),
            "w_out": ((hidden, outputs), hidden**-0.5),
        },
        states={**dict.fromkeys(own, (hidden,)), "o": (outputs,)},
        drive=drive,
        cell=lambda states, ys: cell(states, ys["y"]),
        readout=readout,
        trace_elements=(len(own) + exact) * inputs * hidden,
        factor_elements=(len(own) + exact) * hidden,
        tolerance=1e-3,
        leak=0.8,
        leaks_gradient=exact,
    )

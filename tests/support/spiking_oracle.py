r"""Gradients of a sparse net of LIF or ALIF neurons the literal way, in NumPy.

With the decays :math:`d, d_a`, the surrogate derivative :math:`s` of the spikes :math:`z` and the
step :math:`\beta` of the threshold (0 for LIF), one step is

.. math::
    V^t = d (V^{t-1} - z^{t-1}) + (1 - d)(x^t + W^T z^{t-1}), \qquad
    a^t = d_a a^{t-1} + z^{t-1}, \qquad z^t = \Theta(V^t - 1 - \beta a^t).

What the states of a neuron remember of an entry e, from row r to column c, is D_RTRL's trace

.. math::
    \epsilon_V^t &= d (1 - s_c) \epsilon_V^{t-1} + d \beta s_c \epsilon_a^{t-1}
        + (1 - d) z_r^{t-1} \\
    \epsilon_a^t &= s_c \epsilon_V^{t-1} + (d_a - \beta s_c) \epsilon_a^{t-1}

with :math:`s_c` of step t - 1. ES_D_RTRL filters :math:`z_r` and the same recursion without it.
Entries do not touch one another, so that some of them are enough to compare.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.spiking import Connections
from benchmarks.subjects import ALPHA

TAU, TAU_A, BETA, HEIGHT = 5.0, 100.0, 0.1, 0.3
"""What `LIF`, `ALIF` and their surrogate derivative take where nothing is said; dt is 1."""


def into(connections: Connections, spikes: np.ndarray) -> np.ndarray:
    """Return what spikes ``(batch, neurons)`` give to every neuron."""
    columns = connections.columns.reshape(connections.neurons, -1)
    weights = connections.weights.reshape(connections.neurons, -1)
    total = np.zeros_like(spikes)
    for sums, active in zip(total, spikes != 0, strict=True):
        np.add.at(sums, columns[active], weights[active])
    return total


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The literal recursions of a net.

    Attributes
    ----------
    connections
        Who feeds whom.
    has_adaptation
        Whether the neurons adapt: ALIF.
    readout
        ``weight`` and ``bias``.
    compared
        Entries of which the gradients are taken.
    """

    connections: Connections
    has_adaptation: bool
    readout: Mapping[str, np.ndarray]
    compared: np.ndarray

    @property
    def _beta(self) -> float:
        return BETA if self.has_adaptation else 0.0

    def gradients(self, xs: np.ndarray, targets: np.ndarray, repeats: int) -> dict[str, Any]:
        """Return the gradients of both algorithms, of the last of some equal sequences."""
        d, d_a, beta = (np.float32(v) for v in (np.exp(-1 / TAU), np.exp(-1 / TAU_A), self._beta))
        steps, batch, neurons = xs.shape
        rows, columns = self.compared // self.connections.fan_out, self.connections.columns
        columns = columns[self.compared]
        V, a, f_V, f_a, filtered = list[Any](np.zeros((5, batch, neurons), np.float32))
        e_V, e_a = np.zeros((2, batch, len(self.compared)), np.float32)
        total = {name: _zeros(self.readout, columns) for name in ("d_rtrl", "es_d_rtrl")}
        for t in range(repeats * steps):
            v = V - 1 - beta * a
            z, s = (v >= 0).astype(np.float32), HEIGHT * np.maximum(0, 1 - np.abs(v))
            V = d * (V - z) + (1 - d) * (xs[t % steps] + into(self.connections, z))
            a = d_a * a + z
            along = d * (1 - s), d * beta * s, s, d_a - beta * s
            e_V, e_a = _along([part[:, columns] for part in along], e_V, e_a)
            e_V = e_V + (1 - d) * z[:, rows]
            f_V, f_a = (ALPHA * f for f in _along(along, f_V, f_a))
            f_V = f_V + (1 - ALPHA) * (1 - d)
            filtered = ALPHA * filtered + z
            if t < (repeats - 1) * steps:
                continue
            signal, plain = self._readout_step(V - 1 - beta * a, targets[t % steps])
            factor = signal * (f_V - beta * f_a) / (1 - ALPHA ** (t + 1))
            found = {
                "d_rtrl": signal[:, columns] * (e_V - beta * e_a),
                "es_d_rtrl": factor[:, columns] * filtered[:, rows],
            }
            for name, by_sample in found.items():
                total[name]["recurrent"] += by_sample.sum(0) / steps
                for parameter, gradient in plain.items():
                    total[name][parameter] += gradient / steps
        return total

    def _readout_step(self, v: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return the gradients of a step's loss by v, and those of the readout."""
        z, s = (v >= 0).astype(np.float32), HEIGHT * np.maximum(0, 1 - np.abs(v))
        error = z @ self.readout["weight"] + self.readout["bias"] - target
        error *= 2 / error.size
        signal = s * (error @ self.readout["weight"].T)
        return signal, {"weight": z.T @ error, "bias": error.sum(0)}


def _along(parts: Any, of_V: np.ndarray, of_a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    V_by_V, V_by_a, a_by_V, a_by_a = parts
    return V_by_V * of_V + V_by_a * of_a, a_by_V * of_V + a_by_a * of_a


def _zeros(readout: Mapping[str, np.ndarray], columns: np.ndarray) -> dict[str, np.ndarray]:
    return {"recurrent": np.zeros(len(columns))} | {
        name: np.zeros(value.shape) for name, value in readout.items()
    }

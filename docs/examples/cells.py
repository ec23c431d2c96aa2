"""Compare recurrent cells on streams that are read once, with D-RTRL.

*Wave* asks for the next value of a wave whose frequency and offset drift. *Oscillator* shows random
kicks, and asks for the position of an oscillator that they drive; its frequency is unknown and
drifts, so that the answer depends on the last twenty kicks. Errors are those of forecasts before
the update, relative to the error of a constant.

    pip install -e ".[examples]"
    python docs/examples/cells.py    a minute of processor time
"""

import argparse

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import nn

UNITS, STEPS = 32, 4000

CELLS = {
    "LRU": lambda: nn.LRUCell(1, UNITS, UNITS),
    "RTU": lambda: nn.RTUCell(1, UNITS),
    "IndRNN": lambda: nn.IndRNN(1, UNITS),
    "leaky": lambda: nn.LeakyRNN(1, UNITS),
    "minimal GRU": lambda: nn.MiniGRU(1, UNITS),
    "GRU": lambda: nn.GRUCell(1, UNITS),
    "LSTM": lambda: nn.LSTMCell(1, UNITS),
}
"""Units of the first three do not read one another, so D-RTRL is exact for them."""

WINDOW = 16
"""Also tried for the GRU: an update for each window, within which the gradient is exact."""


def wave(rng):
    """Return a noisy wave, whose frequency and offset drift, and its next value."""
    frequency = 0.3 + 0.1 * np.cumsum(rng.normal(0, 0.02, STEPS + 1))
    offset = np.cumsum(rng.normal(0, 0.02, STEPS + 1))
    values = np.sin(np.cumsum(frequency)) + offset + rng.normal(0, 0.1, STEPS + 1)
    return values[:-1], np.diff(values)


def oscillator(rng):
    """Return random kicks, and the position of an oscillator of unknown frequency, which drifts."""
    kicks, positions = rng.normal(size=STEPS), np.zeros(STEPS)
    frequency = 0.4 + 0.1 * np.sin(2 * np.pi * np.arange(STEPS) / STEPS)
    for step in range(2, STEPS):
        passed = 1.9 * np.cos(frequency[step]) * positions[step - 1] - 0.9 * positions[step - 2]
        positions[step] = passed + 0.3 * kicks[step]
    return kicks, positions / positions.std()


STREAMS = {"wave": wave, "oscillator": oscillator}


class Forecaster(brainstate.nn.Module):
    """A cell, and a readout of the change of the stream."""

    def __init__(self, make_cell):
        super().__init__()
        self.cell = make_cell()
        self.readout = brainstate.nn.Linear(UNITS, 1, w_init=brainstate.nn.init.ZeroInit())

    def update(self, x):
        return self.readout(self.cell(x))


def error(make_cell, stream, seed, window=None):
    """Return the RMSE of forecasts of the last three quarters, over that of the last value."""
    of_stream = STREAMS[stream](np.random.default_rng(seed))
    xs, targets = (jnp.asarray(values[:, None, None], jnp.float32) for values in of_stream)
    with brainstate.random.seed_context(seed):
        model = Forecaster(make_cell)
        learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=1)

        def step_fn(x, target):
            forecast = learner(x)
            return optax.huber_loss(forecast, target).mean(), (forecast - target)[0, 0]

        _, errors = learner.etrace_online(
            *(xs, targets),
            step_fn=step_fn,
            optimizer=optax.adam(3e-3),
            every=window or 1,
            window=window,
            has_aux=True,
        )
    late = slice(STEPS // 4, None)
    return float(np.sqrt(np.mean(errors[late] ** 2) / np.mean(targets[late] ** 2)))


def main(arguments=None):
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = [(name, name, None) for name in CELLS] + [(f"GRU, windows of {WINDOW}", "GRU", WINDOW)]
    for stream in STREAMS:
        for label, name, window in rows:
            found = [error(CELLS[name], stream, seed, window) for seed in range(options.seeds)]
            spread = f"{min(found):.2f} to {max(found):.2f}"
            print(f"{stream:10} {label:18} {np.mean(found):.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()

"""Forecast a drifting stream three samples ahead; each label arrives three samples later.

The stream is an oscillation whose frequency drifts, with noise and missing measurements. A linear
recurrent unit starts without training. Each sample is forecast before its label
is learned, so every error is a test error. The baseline is persistence: the last measured value.

    python docs/examples/live_stream.py
"""

import argparse

import brainstate
import numpy as np
import optax

import braintrace

HORIZON, HIDDEN = 3, 16


def series(samples, seed):
    """Return measurements ``(samples + HORIZON,)``; a twentieth of them is missing (NaN)."""
    rng = np.random.default_rng(seed)
    steps = np.arange(samples + HORIZON)
    frequency = 0.35 + 0.1 * np.sin(2 * np.pi * steps / 2000)
    values = np.sin(np.cumsum(frequency)) + rng.normal(0, 0.1, len(steps))
    values[rng.random(len(steps)) < 0.05] = np.nan
    return values


def stream(values):
    """Yield inputs and label: the last known value, a flag, and the change that comes."""
    known = 0.0
    for now, value in enumerate(values[:-HORIZON]):
        known = known if np.isnan(value) else value
        x = np.array([known, not np.isnan(value)], np.float32)
        yield x, np.float32(values[now + HORIZON] - known)


def run(samples=3000, seed=0):
    """Return root mean square errors of the second half: of the network and of persistence."""
    brainstate.random.seed(seed)
    model = braintrace.nn.LRUCell(2, 1, HIDDEN)
    learner = braintrace.compile(model, "d_rtrl", np.ones((1, 2), np.float32), batch_size=1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step_fn(x, label):
        """Return the squared error; a forecast of no change is persistence."""
        return ((learner(x) - label) ** 2).mean()

    late = learner.live(step_fn, optimizer, pending=HORIZON + 1)
    changes, labels = [], []
    for sample, (x, label) in enumerate(stream(series(samples, seed))):
        changes.append(late.predict(x[None], id=sample))
        labels.append(label)
        arrived = sample - HORIZON
        if arrived >= 0 and not np.isnan(labels[arrived]):
            late.learn(labels[arrived], id=arrived)
    labels = np.array(labels)[samples // 2 :]
    errors = np.ravel(changes)[samples // 2 :] - labels
    return np.sqrt([np.nanmean(errors**2), np.nanmean(labels**2)])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    found = [run(options.samples, seed) for seed in range(options.seeds)]
    for seed, (network, persistence) in enumerate(found):
        print(f"seed {seed}: network {network:.3f}, persistence {persistence:.3f}")
    return found


if __name__ == "__main__":
    main()
